"""The trained heads that an experiment's methods propose with: its own, and those that methods name by the experiment
that trained them, so that heads of several trainings are measured in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eagle3_lab import checkpoint
from eagle3_lab.commands.work import trained_by
from eagle3_lab.decode.methods import Head, Method
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.target.adapter import HFTarget


@dataclass(frozen=True)
class Heads:
    """``own``: of the experiment at hand, None where it has none; ``others`` and their files ``paths``, by name."""

    own: Head | None = None
    others: dict[str, Head] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def of(self, method: Method) -> Head | None:
        """The head that ``method`` proposes with."""
        return self.own if method.head is None else self.others[method.head]

    def hashes(self) -> dict[str, str]:
        """The identity of every named head."""
        return {name: checkpoint.content_hash(path) for name, path in self.paths.items()}


def gather(own: Head | None, methods: dict[str, Method], target: HFTarget, folder: Path) -> Heads:
    """``own`` and every head that one of ``methods`` names, from the store ``folder``, loaded once each.

    Raises:
        UserError: a name that is no experiment, one that trained no head yet, or one of another target.
    """
    heads = Heads(own)
    for key, method in methods.items():
        if method.head is not None and method.head not in heads.others:
            try:
                path, experiment = trained_by(method.head, target, folder)
                heads.others[method.head] = _read(path, experiment, target)
            except UserError as error:
                raise UserError(f"evaluate.methods.{key}.head: {error}") from None
            heads.paths[method.head] = path
    return heads


def _read(path: Path, experiment: Experiment, target: HFTarget) -> Head:
    assert experiment.model is not None
    source, draft = experiment.model.features, experiment.model.draft
    checkpoint.restore(path, target, source, draft)
    return Head(source.to(target.device).eval(), draft.to(target.device).eval())
