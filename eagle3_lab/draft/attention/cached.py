"""A draft's attention while decoding: its rows against a key/value cache.

Committed keys are those of rows that saw the target's own features; the rows being drafted are scratch, and see of the
scratch what ``Rows.visible`` names (a chain's earlier rows, a tree node's ancestors), themselves included.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lab.interfaces import Context
from eagle3_lab.kv_cache import KVCache
from eagle3_lab.types import Rows


class Cached(Context):
    """Attention of rows written from scratch slot ``offset`` on, which read the first ``view`` slots (None: as few as
    will do). One object serves one forward of all layers."""

    def __init__(self, cache: KVCache, offset: int = 0, view: int | None = None) -> None:
        self._cache, self._offset, self._view = cache, offset, view
        self._mask: Tensor | None = None

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "B heads T d"],
        k: Float[Tensor, "B kv_heads T d"],
        v: Float[Tensor, "B kv_heads T d"],
        rows: Rows,
    ) -> Float[Tensor, "B heads T d"]:
        assert rows.visible is not None, "a cache's rows say which scratch keys they see"
        count, scratch = k.shape[2], rows.visible.shape[2]
        assert scratch == self._offset + count, "visible names every scratch row written so far"
        cache = self._cache
        cache.write(layer, k, v, cache.slots(count, self._offset))
        view = cache.view(scratch) if self._view is None else self._view
        if self._mask is None:
            self._mask = cache.visible(rows.visible, view)[:, None]
        keys, values = cache.read(layer, view)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, self._mask, enable_gqa=True)
