"""The proposer that proposes nothing: plain decoding, the baseline of every other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.decode.trees import root_only
from eagle3_lab.interfaces import Proposer
from eagle3_lab.types import TargetOut, Tree, Verdict


class Vanilla(Proposer):
    """The root alone, N = 1: each round is one plain step of the target."""

    nodes = 1

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Nothing to learn from a prompt."""

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        """The root alone."""
        return root_only(root, self.nodes)

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        """Nothing to learn from a verdict."""
