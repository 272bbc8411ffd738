"""Medusa's heads: each guesses one token further ahead from the same feature, knowing nothing of the others' guesses.

Step s of row t is head s: a few residual blocks on the target's top state at t, then a linear head. The carry is the
feature itself at every step, and no token is read: siblings at one level of a tree have the same children.

Source: Medusa (arXiv 2401.10774); FasterDecoding/Medusa 0bfdcd2 medusa/model/medusa_model.py:37-66, 100-108.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.draft.head import HeadStart, check_start, make_head
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.types import Carry, Context, DraftModel, DraftOut, FrozenTarget, Rows


class ResBlock(nn.Module):
    """x + silu(W x + b). W begins at 0, so the block begins as a shift by silu(b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return x + nn.functional.silu(self.linear(x))


class Medusa(DraftModel):
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
    lm_heads: nn.ModuleList
    draft_vocab: DraftVocab

    def __init__(self, heads: int = 5, num_layers: int = 1, head: HeadStart = "target") -> None:
        super().__init__()
        for name, size in (("heads", heads), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"draft.{name} must be >= 1, got {size}")
        check_start(head)
        self.steps, self.blocks_each = heads, num_layers
        self.head: HeadStart = head

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        if width != target.spec.hidden:
            raise ValueError(f"draft width (the features' {width}) must equal the target's {target.spec.hidden}")
        assert self.steps is not None
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(width) for _ in range(self.blocks_each))) for _ in range(self.steps)
        )
        heads = 1 if self.head == "frozen" else self.steps
        self.lm_heads = nn.ModuleList(make_head(target, vocab, self.head) for _ in range(heads))
        self.draft_vocab = DraftVocab(vocab, target.spec.vocab)

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        return features.to(next(self.blocks.parameters()).dtype)

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        assert isinstance(carry, Tensor)
        return DraftOut(head_in=self.blocks[s](carry), carry=carry)

    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        return self.lm_heads[min(s, len(self.lm_heads) - 1)](head_in)

    @property
    def vocab(self) -> Int[Tensor, " Vd"]:
        return self.draft_vocab.ids()

    @property
    def num_layers(self) -> int:
        return 0
