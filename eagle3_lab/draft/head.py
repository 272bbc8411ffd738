"""A head of a draft's own: logits over the draft vocabulary, begun from the target's rows or from nothing."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from eagle3_lab.types import FrozenTarget

HeadStart = Literal["target", "frozen", "random"]


def check_start(start: HeadStart) -> None:
    """Raises ValueError for an unknown word."""
    if start not in get_args(HeadStart):
        raise ValueError(f"draft.head must be one of {', '.join(get_args(HeadStart))}, got {start!r}")


def make_head(target: FrozenTarget, vocab: Int[Tensor, " Vd"], start: HeadStart, *, bias: bool = False) -> nn.Linear:
    """A linear head of the target's width. ``start``: "target" copies the target's rows of the draft vocabulary and
    trains them, "frozen" copies and keeps them, "random" trains from scratch. A ``bias`` begins at 0 beside copied
    rows."""
    head = nn.Linear(target.spec.hidden, vocab.shape[0], bias=bias)
    if start != "random":
        with torch.no_grad():
            head.weight.copy_(target.head_rows(vocab))
            if bias:
                head.bias.zero_()
    return head.requires_grad_(start != "frozen")
