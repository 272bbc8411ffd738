"""Decoding methods as an experiment names them: each makes a proposer for a target, and a trained head where it needs
one. A new method is a new class here or anywhere a YAML can name it; nothing else knows its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from eagle3_lab.decode.grow import Grow
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla as VanillaProposer
from eagle3_lab.types import DraftModel, FeatureSource, Proposer, TargetSpec


@dataclass(frozen=True)
class Head:
    """A trained draft head and the source of its features, on the target's device."""

    source: FeatureSource
    draft: DraftModel


class Method(ABC):
    """One way of proposing. ``levels``: how many drafts deep its rounds can accept."""

    @property
    @abstractmethod
    def levels(self) -> int: ...

    @abstractmethod
    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        """A proposer for this target. Raises ValueError for a method that needs a head without one."""


class Vanilla(Method):
    """Plain decoding, one token a forward: what everything else is compared with."""

    @property
    def levels(self) -> int:
        return 0

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        return VanillaProposer()


class HeadTree(Method):
    """A trained head that grows a tree (a chain is the narrowest one).

    Args:
        grow: the tree's shape.
    """

    def __init__(self, grow: Grow) -> None:
        self.grow = grow

    @property
    def levels(self) -> int:
        return self.grow.levels

    def proposer(self, spec: TargetSpec, head: Head | None) -> Proposer:
        if head is None:
            raise ValueError(f"{type(self.grow).__name__} is grown by a trained head, and there is none")
        return Eagle(head.source, head.draft, self.grow, spec.layers)
