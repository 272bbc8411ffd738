"""The trained heads that an experiment's methods propose with: its own, and those that methods name by the experiment
that trained them, so that heads of several trainings are measured in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_lab.config.reading import label
from eagle3_lab.decode.methods import Head, Method
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.named_experiments import at, file_of
from eagle3_lab.pipeline.run_folder import NotTrained, find_head
from eagle3_lab.target_model.hf_target import HFTarget


@dataclass(frozen=True)
class NamedHead:
    """A head that another experiment trained: the parts, their file and its identity."""

    head: Head
    path: Path
    hash: str


@dataclass(frozen=True)
class Heads:
    """``own``: of the experiment at hand, None where it has none; ``others`` by the name that methods give them."""

    own: Head | None = None
    others: dict[str, NamedHead] = field(default_factory=dict)

    def of(self, method: Method) -> Head | None:
        """The head that ``method`` proposes with."""
        return self.own if method.head is None else self.others[method.head].head

    def hashes(self) -> dict[str, str]:
        """The identity of every named head."""
        return {name: one.hash for name, one in self.others.items()}


def gather(own: Head | None, methods: Mapping[str, Method], experiment: Experiment, target: HFTarget) -> Heads:
    """``own`` and every head that one of ``methods``, all of ``experiment``, names, loaded once each.

    Raises:
        UserError: a name that is no experiment or is ``experiment`` itself, those that trained no head yet (all of
            them), or a head of another target.
    """
    heads, missing = Heads(own), list[NotTrained]()
    chain = [] if (file := file_of(experiment)) is None else [file]
    for name, method in methods.items():
        if method.head is None or method.head in heads.others:
            continue
        try:
            heads.others[method.head] = _named(method.head, experiment, target, chain)
        except NotTrained as error:
            missing.append(error)
        except UserError as error:
            raise UserError(f"{at(experiment, f'evaluate.methods.{name}.head')}: {error}") from None
    if missing:
        raise _missing(missing, experiment)
    return heads


def require_model(experiment: Experiment, checkpoint_path: Path | None) -> None:
    """Refuse a head that the experiment has no model for, before it is passed over. Raises UserError."""
    if checkpoint_path is not None and experiment.model is None:
        raise UserError(
            f"--checkpoint-path: {checkpoint_path} holds a head, and the experiment has no model to load it into"
        )


def _named(name: str, experiment: Experiment, target: HFTarget, chain: list[Path]) -> NamedHead:
    place = find_head(name, experiment, target, chain)
    source, draft = place.loaded(target, experiment)
    head = Head(source.to(target.device).eval(), draft.to(target.device).eval(), target.record)
    return NamedHead(head, place.path, place.content_hash())


def _missing(found: list[NotTrained], experiment: Experiment) -> UserError:
    key = at(experiment, "evaluate.methods")
    files = list(dict.fromkeys(label(one.file) for one in found))
    if len(files) == 1:
        return UserError(f"{key}: {found[0]}")
    return UserError(
        f"{key}: no heads of {', '.join(files)}, as they are written, are in {experiment.tracking.folder} yet; run "
        "`python -m eagle3_lab fit FILE` for each first"
    )
