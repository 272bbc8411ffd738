"""The trained heads of an evaluation: the experiment's own, and those that methods name by the experiment that trained
them, so that heads of several trainings are measured in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_lab.config.reading import label
from eagle3_lab.decode.methods import Head, Method
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.find_head import NotTrained, find_head
from eagle3_lab.pipeline.named_experiments import at, file_of
from eagle3_lab.target_model.hf_target import HFTarget


@dataclass(frozen=True)
class NamedHead:
    """A head that another experiment trained, the path of its file, and the hash of its content."""

    head: Head
    path: Path
    hash: str


@dataclass(frozen=True)
class Heads:
    """The heads of an evaluation. ``own``: the experiment's, None if it has none; ``others``: by the name that methods
    give them."""

    own: Head | None = None
    others: dict[str, NamedHead] = field(default_factory=dict)

    def of(self, method: Method) -> Head | None:
        """Return the head that ``method`` proposes with."""
        return self.own if method.head is None else self.others[method.head].head

    def hashes(self) -> dict[str, str]:
        """Return the hash of every other head by its name."""
        return {name: named.hash for name, named in self.others.items()}


def load_heads(own: Head | None, methods: Mapping[str, Method], experiment: Experiment, target: HFTarget) -> Heads:
    """Return the experiment's own head with the heads that its methods name, each loaded once.

    Raises:
        UserError: a name that is no experiment or is ``experiment`` itself, experiments that trained no head yet (all
            of them are listed), or a head for another target.
    """
    heads, missing = Heads(own), list[NotTrained]()
    chain = [] if (file := file_of(experiment)) is None else [file]
    for name, method in methods.items():
        if method.head is None or method.head in heads.others:
            continue
        try:
            place = find_head(method.head, experiment, target, chain)
            source, draft = place.load_parts(target, experiment)
            head = Head(source.to(target.device).eval(), draft.to(target.device).eval(), target.record)
            heads.others[method.head] = NamedHead(head, place.path, place.content_hash())
        except NotTrained as error:
            missing.append(error)
        except UserError as error:
            raise UserError(f"{at(experiment, f'evaluate.methods.{name}.head')}: {error}") from None
    if missing:
        raise _all_missing(missing, experiment)
    return heads


def _all_missing(errors: list[NotTrained], experiment: Experiment) -> UserError:
    key = at(experiment, "evaluate.methods")
    files = list(dict.fromkeys(label(error.file) for error in errors if error.file is not None))
    if len(files) == 1:
        return UserError(f"{key}: {errors[0]}")
    return UserError(
        f"{key}: no heads of {', '.join(files)}, as they are written, are in {experiment.tracking.folder} yet; run "
        "`python -m eagle3_lab fit FILE` for each first"
    )
