"""Attention of an unrolled draft: which keys a row of step s sees, and the dense form of it.

At step s, row t sees the keys of step 0 causally within its document, and behind them one key of each step
i = 1..s: its own. Two documents of two and one tokens, and a padding row, at step 2:

          step 0       step 1   step 2
    row 0  1 . . .      own      own
    row 1  1 1 . .      own      own
    row 2  . . 1 .      own      own
    row 3  . . . 1      own      own       padding sees itself alone, so that it stays finite; nobody sees it

Rows never see other rows' keys of steps >= 1: those stand for drafts of another anchor.

Source: EAGLE-3 (arXiv 2503.01840) section 3.2; SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:277-305.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.interfaces import Context
from eagle3_lab.types import PADDING, Rows


def rotate(
    x: Float[Tensor, "B heads T d"], cos: Float[Tensor, "B T d"], sin: Float[Tensor, "B T d"]
) -> Float[Tensor, "B heads T d"]:
    """Turn each pair ``(x[i], x[i + d/2])`` by its row's angle (the rotate-half layout of Llama)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def causal_within(document: Int[Tensor, "B T"]) -> Bool[Tensor, "B T T"]:
    """``[b, t, u]``: row t sees row u's step-0 key: u <= t in one document, or u = t."""
    rows = document.shape[1]
    lower = torch.ones(rows, rows, dtype=torch.bool, device=document.device).tril()
    together = (document[:, :, None] == document[:, None, :]) & (document != PADDING)[:, None, :]
    itself = torch.eye(rows, dtype=torch.bool, device=document.device)
    return (together & lower) | itself


class DenseUnrolled(Context):
    """The plain form, with a T x (T + s) score matrix: what faster ones are tested against.

    Keys and values of all steps stay in the graph. The step is the number of keys a layer has stored so far, so one
    object serves one unroll. The softmax runs in float32 (float64 for float64 scores).
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._unseen: Tensor | None = None

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "B heads T d"],
        k: Float[Tensor, "B kv_heads T d"],
        v: Float[Tensor, "B kv_heads T d"],
        rows: Rows,
    ) -> Float[Tensor, "B heads T d"]:
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # (B, kv_heads, group, T, d)

        scores = torch.einsum("bkgtd,bkud->bkgtu", grouped, keys[0])
        scores = scores.masked_fill(self._unseen_by(rows), float("-inf"))
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]
        scores = torch.cat((scores, *own), dim=-1)  # (B, kv_heads, group, T, T + s)

        weights = self._weights(scores, rows).to(v.dtype)
        first, *rest = weights.split((k.shape[2], *(1 for _ in own)), dim=-1)
        out = torch.einsum("bkgtu,bkud->bkgtd", first, values[0])
        for weight, value in zip(rest, values[1:], strict=True):
            out = out + weight * value[:, :, None]
        return out.flatten(1, 2)

    def _weights(self, scores: Tensor, rows: Rows) -> Tensor:
        """From scores [.., T, T + s], -inf where unseen, to weights."""
        return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))

    def _unseen_by(self, rows: Rows) -> Tensor:
        """Step 0's mask, complemented, as (B, 1, 1, T, T); documents are the same at every step."""
        assert rows.document is not None, "an unroll's rows carry their document"
        if self._unseen is None:
            self._unseen = ~causal_within(rows.document)[:, None, None]
        return self._unseen
