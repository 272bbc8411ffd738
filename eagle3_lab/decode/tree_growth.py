"""How a proposer and a shape of tree work together, level by level; neither knows the other's kind.

A proposer drives it; rows are draft rows, tokens are draft ids:

    growth = grow.begin()
    frontier = growth.expand(log_q of the root)                    # [B, 1, Vd]
    while frontier is not None:
        ... gather the last rows' carry by frontier.parent, run the draft on frontier.tokens ...
        frontier = growth.expand(log_q of the frontier's rows)     # [B, F, Vd]
    tree = growth.finish().tree(root, vocab)

``expand`` is called ``levels`` times, the draft is run ``levels - 1`` times below the root. Shapes depend on the
configuration alone. ``log_q`` is the draft's log-softmax at temperature 1, whatever the sampling options. Most growths
take it for a confidence, not a law: they keep the best, so candidates are fixed ones and trees carry no q. A growth
that draws (:mod:`eagle3_lab.decode.sampled_trees`) takes it for the logits of its own law, and its trees carry that
law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.decode.verify import Chance
from eagle3_lab.types import Tree

Choose = Callable[[Tensor, int], Tensor]
"""From the frontier rows' log-probabilities [B, F, Vd] and a count of ranks, the children of each by rank, draft ids
[B, F, ranks]."""


@dataclass(frozen=True)
class Frontier:
    """The draft rows to run next: draft ids, the previous frontier's row each continues (0 at level 1: the root's),
    and which of the M rows written below the root so far (levels 1, 2, ... in order, these last) each may see."""

    tokens: Int[Tensor, "B F"]
    parent: Int[Tensor, "B F"]
    visible: Bool[Tensor, "B F M"]


@dataclass(frozen=True)
class Grown:
    """The chosen nodes: draft ids of nodes 1 .. N-1 (node 0 is the root), and every node's parent. ``scores`` of nodes
    1 .. N-1 where they were chosen by score."""

    tokens: Int[Tensor, "B drafts"]
    parents: Int[Tensor, "B N"]
    scores: Float[Tensor, "B drafts"] | None = None

    def tree(self, root: Int[Tensor, " B"], vocab: Int[Tensor, " Vd"]) -> Tree:
        """The token tree in target ids: draft id i means ``vocab[i]``."""
        tokens = torch.cat((root[:, None], vocab[self.tokens]), dim=1)
        return Tree(tokens, self.parents, torch.ones_like(tokens, dtype=torch.bool))


class Growth(ABC):
    """One tree while it grows."""

    @abstractmethod
    def expand(self, log_q: Float[Tensor, "B F Vd"]) -> Frontier | None:
        """Take the frontier rows' log-probabilities; the next frontier, or None when the last level is reached."""

    @abstractmethod
    def finish(self) -> Grown:
        """The tree, after ``levels`` expansions."""


class Grow(ABC):
    """A shape of tree. ``nodes`` is N with the root; ``levels`` below the root; ``widths`` the rows the draft runs at
    levels 1 .. levels-1. ``draws``: how often a tree asks its chance for a token, 0 where nothing is drawn."""

    nodes: int
    levels: int
    widths: tuple[int, ...]
    draws: int = 0

    @abstractmethod
    def check(self, vocab: int) -> None:
        """Raises ValueError if a draft vocabulary of ``vocab`` tokens is too small for this shape."""

    @abstractmethod
    def begin(self, chance: Chance | None = None) -> Growth:
        """A new tree; ``chance`` where it draws."""

    def require_drawable(self) -> Drawable:
        """This shape, if its children may be drawn from a law q and judged with it. Raises ValueError where that would
        bias the output."""
        raise ValueError(
            f"{type(self).__name__} keeps nodes by score, so its candidates must be fixed: throwing drawn tokens "
            "away biases the output; draw in a chain or a static tree"
        )


class Drawable(Grow):
    """A shape in which a node stands or falls with the ranks on its path, so that nothing drawn is thrown away for its
    token or its score. ``ranks``: how many children each frontier row is asked for, by level."""

    ranks: tuple[int, ...]

    def begin(self, chance: Chance | None = None) -> Growth:
        return self.choosing(likeliest)

    def require_drawable(self) -> Drawable:
        return self

    @abstractmethod
    def choosing(self, choose: Choose) -> Growth:
        """A new tree whose children are what ``choose`` says, by rank."""

    @abstractmethod
    def inner(self, device: torch.device) -> Int[Tensor, " I"]:
        """The nodes that have children, the root first: whose rows ``expand`` is given, in that order."""


def likeliest(log_q: Float[Tensor, "B F Vd"], ranks: int) -> Int[Tensor, "B F ranks"]:
    """The best ``ranks`` tokens of every row, the best first."""
    return top(log_q, ranks)[1]


def top(scores: Float[Tensor, "*rows n"], k: int) -> tuple[Float[Tensor, "*rows k"], Int[Tensor, "*rows k"]]:
    """The k largest, descending, and their indices; equal scores in index order on every device and in every batch
    (``torch.topk`` leaves ties open, and half-precision logits tie often)."""
    if scores.dtype == torch.float64:  # no spare bits for the index; float64 is for tests, where speed is no matter
        values, index = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], index[..., :k]
    bits = scores.float().contiguous().view(torch.int32).long()
    order = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))  # integers that rise with the floats
    key = order * 2**32 - torch.arange(scores.shape[-1], device=scores.device)
    index = key.topk(k, dim=-1).indices
    return scores.gather(-1, index), index
