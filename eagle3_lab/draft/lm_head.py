"""Heads of a draft's own: logits over the draft vocabulary, begun from the target's rows or from nothing."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.interfaces import DraftModel, FrozenTarget

HeadStart = Literal["target", "frozen", "random"]


def check_start(start: HeadStart) -> None:
    """Raises ValueError for an unknown word."""
    if start not in get_args(HeadStart):
        raise ValueError(f"draft.head must be one of {', '.join(get_args(HeadStart))}, got {start!r}")


def make_head(
    target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"], start: HeadStart, *, bias: bool = False
) -> nn.Linear:
    """A linear head on rows of ``width``. ``start``: "target" copies the target's rows of the draft vocabulary, which
    must be as wide, and trains them, "frozen" copies and keeps them, "random" trains from scratch. A ``bias`` begins at
    0 beside copied rows."""
    head = nn.Linear(width, vocab.shape[0], bias=bias)
    if start != "random":
        with torch.no_grad():
            head.weight.copy_(target.head_rows(vocab))
            if bias:
                head.bias.zero_()
    return head.requires_grad_(start != "frozen")


class HeadPerStep(DraftModel):
    """What drafts have in common that take each step with a head of its own; step s speaks through head s.

    Args:
        heads: how many tokens ahead; the unroll's depth is at most this.
        num_layers: blocks a head.
        head: how the linear heads begin, as `make_head` has it; "frozen" shares one copy among them.

    Raises:
        ValueError: for sizes below 1 or an unknown word.
    """

    steps: int
    lm_heads: nn.ModuleList
    draft_vocab: DraftVocab

    def __init__(self, heads: int, num_layers: int, head: HeadStart) -> None:
        super().__init__()
        for name, size in (("heads", heads), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"draft.{name} must be >= 1, got {size}")
        check_start(head)
        self.steps, self.blocks_each = heads, num_layers
        self.head: HeadStart = head

    def build_heads(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"], *, bias: bool = False) -> None:
        """Make the linear heads and the vocabulary. Raises ValueError for features of another width than the
        target's."""
        if width != target.spec.hidden:
            raise ValueError(f"draft width (the features' {width}) must equal the target's {target.spec.hidden}")
        heads = 1 if self.head == "frozen" else self.steps
        self.lm_heads = nn.ModuleList(make_head(target, width, vocab, self.head, bias=bias) for _ in range(heads))
        self.draft_vocab = DraftVocab(vocab, target.spec.vocab)

    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        return self.lm_heads[min(s, len(self.lm_heads) - 1)](head_in)

    @property
    def vocab(self) -> Int[Tensor, " Vd"]:
        return self.draft_vocab.ids()

    def options(self) -> dict[str, object]:
        return {"heads": self.steps, "num_layers": self.blocks_each}
