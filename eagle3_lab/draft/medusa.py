"""Medusa's heads: each guesses one token further ahead from the same feature, knowing nothing of the others' guesses.

Step s of row t is head s: a few residual blocks on the target's top state at t, then a linear head. The carry is the
feature itself at every step, and no token is read: siblings at one level of a tree have the same children.

Source: Medusa (arXiv 2401.10774); FasterDecoding/Medusa 0bfdcd2 medusa/model/medusa_model.py:37-66, 100-108.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.draft.lm_head import HeadPerStep, HeadStart
from eagle3_lab.interfaces import Context, FrozenTarget
from eagle3_lab.types import Carry, DraftOut, Rows


class ResBlock(nn.Module):
    """x + silu(W x + b). W begins at 0, so the block begins as a shift by silu(b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return x + nn.functional.silu(self.linear(x))


class Medusa(HeadPerStep):
    """Medusa's heads.

    Args:
        heads: how many tokens ahead; the unroll's depth is at most this.
        num_layers: residual blocks a head, each with weights of its own (the public code reuses one block where there
            are more).
        head: how the linear heads begin: "target" copies the target's rows and trains them, "frozen" shares one copy
            of them, "random" from scratch.

    Raises:
        ValueError: for sizes below 1 or an unknown word; from ``build``, for features of another width than the
            target's.
    """

    blocks: nn.ModuleList

    def __init__(self, heads: int = 5, num_layers: int = 1, head: HeadStart = "target") -> None:
        super().__init__(heads, num_layers, head)

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        self.build_heads(target, width, vocab)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(width) for _ in range(self.blocks_each))) for _ in range(self.steps)
        )

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        return features.to(next(self.blocks.parameters()).dtype)

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        assert isinstance(carry, Tensor)
        return DraftOut(head_in=self.blocks[s](carry), carry=carry)

    @property
    def num_layers(self) -> int:
        return 0
