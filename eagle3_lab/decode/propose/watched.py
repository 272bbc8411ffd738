"""A proposer that hands on to another, for those who look at what passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int

from eagle3_lab.interfaces import Proposer
from eagle3_lab.types import TargetOut, Tree, Verdict


class Watched(Proposer):
    """Proposes what ``proposer`` does. A subclass sees each tree or each verdict on the way."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.needs, self.nodes, self.positions = proposer.needs, proposer.nodes, proposer.positions

    def start(
        self,
        prompt: Int[torch.Tensor, "B L"],
        lengths: Int[torch.Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        self._proposer.start(prompt, lengths, out, capacity, generators)

    def propose(self, root: Int[torch.Tensor, " B"]) -> Tree:
        return self._proposer.propose(root)

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        self._proposer.observe(tree, verdict, out)
