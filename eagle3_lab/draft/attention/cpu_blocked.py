"""Causal attention on a CPU by plain products and compiled passes between them, a block of queries at a time.

torch's flash kernel for the CPU multiplies tiles of 64 rows, one head at a time. Here all query heads of a key head
are rows of one product, and what lies between products is one pass (:mod:`eagle3_lab.backend.compile`): compiled it is
the faster way, forward and backward (NOTES.md). Scores are float32 products whatever the inputs are, as the kernel's;
weights meet values and gradients in the inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.backend.compile import fusible
from eagle3_lab.backend.onednn_linear import multiplied
from eagle3_lab.draft.attention.flash import Gradients, PerDocument

POSITIONS, LEAST_POSITIONS = 144, 16
"""How many positions a block has at most, and at least (or all there are)."""

BLOCK_BYTES = 8 * 2**20
"""What a block's scores should take, for they are read again and should still be near the processor."""


class Blocked(PerDocument):
    """See above. A block reads the keys up to its last query, so of what lies above the diagonal little is made.

    Within, a row is one query head of one position, in the order of positions: (kv_heads, rows, d), L * group rows.
    """

    def forward_one(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads, q, k, v = q.shape[1], _by_key_head(q, k), k[0], v[0].contiguous()
        rows, keys = _wide(q), _wide(k)
        out, lse = torch.empty_like(q), rows.new_empty(q.shape[:2])
        for block in _blocks(q, keys, 1):
            here, seen, (scores,), (weights,) = block.rows, block.keys, block.wide, block.narrow
            _multiply(rows[:, here], keys[:, seen], scores)
            lse[:, here] = _softmax(scores, block.last, q.shape[-1] ** -0.5, weights)
            out[:, here] = torch.bmm(weights, v[:, seen])
        return _by_head(out, heads), _by_head(lse, heads)

    def backward_one(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        heads = q.shape[1]
        grad, q, out, lse = (_by_key_head(x, k) for x in (grad, q, out, lse))
        k, v = k[0].contiguous(), v[0]
        rows, pulls, keys, values = _wide(q), _wide(grad), _wide(k), _wide(v)
        inner = (pulls * out).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for block in _blocks(q, keys, 2):
            here, seen, (scores, by_weight), (weights, slopes) = block.rows, block.keys, block.wide, block.narrow
            _multiply(rows[:, here], keys[:, seen], scores)
            _multiply(pulls[:, here], values[:, seen], by_weight)
            among = lse[:, here], inner[:, here], block.last
            _slopes(scores, by_weight, *among, q.shape[-1] ** -0.5, weights, slopes)
            dv[:, seen] += torch.bmm(weights.mT, grad[:, here])
            dk[:, seen] += torch.bmm(slopes.mT, q[:, here])
            dq[:, here] = torch.bmm(slopes, k[:, seen])
        return _by_head(dq, heads), dk.to(k.dtype)[None], dv.to(v.dtype)[None]


@dataclass(frozen=True)
class Block:
    """A run of a document's positions: their ``rows``, the ``keys`` that these see, the ``last`` key of each row, and
    places (kv_heads, rows, keys) for scores and what becomes of them, in the dtypes of scores and of inputs. The next
    block's lie in the same memory: memory asked for anew would be cleared each time."""

    rows: slice
    keys: slice
    last: Int[Tensor, " rows"]
    wide: tuple[Tensor, ...]
    narrow: tuple[Tensor, ...]


def _blocks(q: Tensor, keys: Tensor, places: int) -> Iterator[Block]:
    """All of a document, as long as each other, with so many places of each dtype."""
    (kv_heads, length, _), group = keys.shape, q.shape[1] // keys.shape[1]
    fit = BLOCK_BYTES // (keys.element_size() * kv_heads * group * length)
    count = -(-length // min(max(fit, LEAST_POSITIONS), POSITIONS))
    size = kv_heads * group * -(-length // count) * length
    memory = [[x.new_empty(size) for _ in range(places)] for x in (keys, q)]
    for begin, end in pairwise(length * i // count for i in range(count + 1)):
        shape = kv_heads, (end - begin) * group, end
        wide, narrow = (tuple(x[: math.prod(shape)].view(shape) for x in some) for some in memory)
        last = torch.arange(begin, end, device=q.device).repeat_interleave(group)
        yield Block(slice(begin * group, end * group), slice(0, end), last, wide, narrow)


def _multiply(
    rows: Float[Tensor, "kv_heads rows d"],
    keys: Float[Tensor, "kv_heads keys d"],
    into: Float[Tensor, "kv_heads rows keys"],
) -> None:
    """rows keys', a key head at a time: that is how oneDNN takes them."""
    torch.stack([multiplied(some, its_keys) for some, its_keys in zip(rows, keys, strict=True)], out=into)


@fusible("any")
def _softmax(scores: Tensor, last: Tensor, scale: float, weights: Tensor) -> Tensor:
    """Weights to their place, and log-sum-exps of the scaled scores."""
    scores = torch.where(_seen(scores, last), scores * scale, float("-inf"))
    most = scores.amax(-1, keepdim=True)
    powers = (scores - most).exp()
    total = powers.sum(-1, keepdim=True)
    weights.copy_(powers / total)
    return (most + total.log())[..., 0]


@fusible("any")
def _slopes(
    scores: Tensor,
    by_weight: Tensor,
    lse: Tensor,
    inner: Tensor,
    last: Tensor,
    scale: float,
    weights: Tensor,
    slopes: Tensor,
) -> None:
    """Weights, and the gradient by the scores before they were scaled, to their places."""
    found = torch.where(_seen(scores, last), (scores * scale - lse[..., None]).exp(), 0.0)
    weights.copy_(found)
    slopes.copy_(found * (by_weight - inner[..., None]) * scale)


def _seen(scores: Tensor, last: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device) <= last[:, None]


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(1, heads, L, ...) as (kv_heads, rows, ...)."""
    return x[0].unflatten(0, (k.shape[1], -1)).transpose(1, 2).flatten(1, 2).contiguous()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """And back, a view."""
    return x.unflatten(1, (-1, heads // x.shape[0])).transpose(1, 2).flatten(0, 1)[None]


def _wide(x: Tensor) -> Tensor:
    """In the dtype of scores, contiguous, as their products need them."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
