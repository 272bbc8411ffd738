"""The row convention's arithmetic: the one place that shifts tokens, teachers and masks.

Row ``t`` at step ``s`` reads token ``x[t+1+s]``, predicts ``x[t+2+s]``, and its teacher is the target's row
``t+1+s``. Everything that is shifted goes through :func:`shift`; everything that is weighted through
:func:`row_weights`.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from eagle3_lab.types import PADDING

Mask = Literal["drafted", "official", "root", "predicted"]
Edge = Literal["counted", "dropped"]


def shift(x: Shaped[Tensor, "B T *rest"], by: int, fill: int | float | bool = 0) -> Shaped[Tensor, "B T *rest"]:
    """``out[:, t] = x[:, t + by]``, ``fill`` where that lies past the end.

    shift([a b c d], 1) = [b c d 0]
    """
    if by == 0:
        return x
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


def same_document(document: Int[Tensor, "B T"], by: int) -> Bool[Tensor, "B T"]:
    """Whether rows ``t`` and ``t + by`` are tokens of one document."""
    return (document == shift(document, by, PADDING)) & (document != PADDING)


def row_weights(
    supervised: Bool[Tensor, "B T"],
    document: Int[Tensor, "B T"],
    s: int,
    mask: Mask = "drafted",
    edge: Edge = "dropped",
) -> Float[Tensor, "B T"]:
    """Weight (0 or 1, float32) of row ``t`` at step ``s``.

    Four rules, on one document  u u A A A  (u: not supervised, A: an answer's tokens), T = 5:

        ``drafted``  1 iff x[t+1] .. x[t+2+s] are all supervised tokens of one answer: the rows a decoder could draft
                     at (the first answer token is the target's own, at prefill).
                     s = 0: 0 1 1 0 0    s = 1: 0 1 0 0 0
        ``official`` m[t+s], as EAGLE, HASS, EAGLE-3 and SpecForge train; row t+s = last token has no teacher, so it
                     counts only with edge "counted", which EAGLE-3's code does.
                     s = 0, dropped: 0 0 1 1 0    s = 0, counted: 0 0 1 1 1    s = 1, dropped: 0 1 1 0 0
        ``root``     m[t+1+s], as speculators and ModelOpt train.
                     s = 0: 0 1 1 1 0 (the last teaches what follows the end token)    s = 1: 1 1 1 0 0
        ``predicted`` m[t+2+s], as Medusa and Hydra train: every token of the answer is predicted, the first too.
                     s = 0: 1 1 1 0 0    s = 1: 1 1 0 0 0

    Source: SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:714-868 (official), vllm-project/speculators c05b95b
    models/eagle3/data.py:24-44 (root), FasterDecoding/Medusa 0bfdcd2 medusa/train/train_legacy.py:69-79 (predicted);
    ``drafted`` is ours.
    """
    if mask == "drafted":
        keep = same_document(document, 2 + s)
        for i in range(1, 3 + s):
            keep = keep & shift(supervised, i, False)
        return keep.float()
    if mask == "official":
        keep = shift(supervised, s, False) & same_document(document, s)
        if edge == "dropped":
            keep = keep & same_document(document, 1 + s)
        return keep.float()
    ahead = 1 if mask == "root" else 2
    keep = shift(supervised, ahead + s, False) & same_document(document, ahead + s)
    return keep.float()
