"""Drafts drawn from a law of the draft's own, to be judged with that very law as q: what may draw, from which streams
of randomness, and trees grown by drawing.

Siblings stand in the order in which they were drawn. With replacement each is a draw of its own from q, and repeated
ones are nodes of their own. Without it each is drawn from q without the ones before it, renormalised, as the verifier
judges them. Where q has fewer tokens than a node has children, the places left over are filled with tokens that have no
mass in what is left of q: the verifier does not judge those.

Source: Miao et al. 2023 (SpecInfer), algorithm 2, with replacement; EAGLE-1's sampled trees without it, as kept in
Spec-Bench fd2c1cd model/eagle/utils_alpha.py:330-383.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_growth import Drawable, Frontier, Grow, Grown, Growth
from eagle3_lab.decode.verify import Chance
from eagle3_lab.interfaces import Verifier
from eagle3_lab.types import Tree


def require_draft_law(law: SamplingLaw) -> None:
    """Raises ValueError for a law that no draft is drawn from: one with a repetition penalty."""
    if law.repetition_penalty != 1.0:
        raise ValueError(f"law.repetition_penalty must be 1 for a draft, got {law.repetition_penalty}")


def require_drawn(law: SamplingLaw, grow: Grow, verifier: Verifier) -> None:
    """Raises ValueError where a tree of shape ``grow`` cannot be drawn from ``law``, or ``verifier`` not judge it."""
    require_draft_law(law)
    if not verifier.judges_drawn:
        raise ValueError(f"law draws candidates, and {type(verifier).__name__} judges fixed ones only; leave one out")
    try:
        grow.require_drawable()
    except ValueError as error:
        raise ValueError(f"law: {error}") from None


def split(generators: Sequence[torch.Generator]) -> list[torch.Generator]:
    """One new stream a row, seeded by what the row's generator would draw next; that generator is left as it was."""
    seeds = []
    for generator in generators:
        ahead = torch.Generator(generator.device)
        ahead.set_state(generator.get_state())
        seeds.append(torch.randint(2**63 - 1, (1,), generator=ahead, device=generator.device))
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def successive(law: Float[Tensor, "B F V"], count: int, chance: Chance, replacement: bool) -> Int[Tensor, "B F count"]:
    """``count`` tokens a row, one after the other, each from what the ones before left of ``law``."""
    left, drawn = law.clone(), []
    for _ in range(count):
        drawn.append(chance.pick(left))
        if not replacement:
            left.scatter_(-1, drawn[-1][..., None], 0.0)
    return torch.stack(drawn, dim=-1)


class DrawnTree(Grow):
    """A shape whose children are drawn from ``law`` of the draft's logits at their parent; the tree carries that law.

    Args:
        shape: how many children a node draws, by its path; ``[0, 2]`` is the third drawn child of the first drawn.
        law: from the draft's logits to q, over the draft vocabulary; it need not be the target's.
        vocab: the target's ids, the width of q.
        replacement: whether siblings are drawn from all of q, or each without the ones before it.

    Raises ValueError for a law with a repetition penalty.
    """

    def __init__(self, shape: Drawable, law: SamplingLaw, vocab: int, replacement: bool = False) -> None:
        require_draft_law(law)
        self.shape, self.law, self.vocab, self.replacement = shape, law, vocab, replacement
        self.nodes, self.levels, self.widths = shape.nodes, shape.levels, shape.widths
        self.draws = sum(rows * ranks for rows, ranks in zip((1, *shape.widths), shape.ranks, strict=True))

    def check(self, vocab: int) -> None:
        self.shape.check(vocab)

    def begin(self, chance: Chance | None = None) -> Growth:
        assert chance is not None, "a tree that is drawn needs a chance"
        return _DrawnGrowth(self, chance)


class _DrawnGrowth(Growth):
    """The shape's own growth, which asks for children; keeps the laws they were drawn from."""

    def __init__(self, tree: DrawnTree, chance: Chance) -> None:
        self.tree, self.chance = tree, chance
        self.laws: list[Tensor] = []  # each (B, F, Vd)
        self.growth = tree.shape.choosing(self._draw)

    def expand(self, log_q: Float[Tensor, "B F Vd"]) -> Frontier | None:
        return self.growth.expand(log_q)

    def finish(self) -> Grown:
        grown = self.growth.finish()
        return _DrawnNodes(
            grown.tokens,
            grown.parents,
            laws=torch.cat(self.laws, dim=1),
            inner=self.tree.shape.inner(grown.tokens.device),
            width=self.tree.vocab,
            replacement=self.tree.replacement,
        )

    def _draw(self, log_q: Float[Tensor, "B F Vd"], ranks: int) -> Int[Tensor, "B F ranks"]:
        self.laws.append(self.tree.law.filtered(log_q))
        return successive(self.laws[-1], ranks, self.chance, self.tree.replacement)


@dataclass(frozen=True, kw_only=True)
class _DrawnNodes(Grown):
    """Nodes with the laws that the children of the ``inner`` ones were drawn from, in draft ids, and the ``width`` that
    these have in target ids."""

    laws: Float[Tensor, "B I Vd"]
    inner: Int[Tensor, " I"]
    width: int
    replacement: bool

    def tree(self, root: Int[Tensor, " B"], vocab: Int[Tensor, " Vd"]) -> Tree:
        """The token tree with q in target ids; rows of nodes without children are zero, and so is what lies outside the
        draft vocabulary."""
        tree = super().tree(root, vocab)
        q = self.laws.new_zeros(*tree.tokens.shape, self.width)
        q[:, self.inner[:, None], vocab] = self.laws
        return replace(tree, q=q, replacement=self.replacement)
