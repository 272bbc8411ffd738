"""Layers that look back only so far: their window goes into our mask over a full-length cache.

A key is seen where the mask of the tree (or of the document) shows it and its position lies less than the window behind
the query's. Positions, not slots: a tree's nodes of one depth share a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    import transformers  # takes a second

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layer types

Mask = Tensor | dict[str, Tensor]
"""What a model takes as `attention_mask`: one 4-D mask, or one for each layer type."""


@dataclass(frozen=True)
class Windows:
    """How far a model's layers look back: ``width`` positions, the query's own included (None: all the way).

    ``by_type``: the model has windowed layers beside full ones and takes a mask for each type; False: one mask, the
    windowed one where ``width`` is given.
    """

    width: int | None = None
    by_type: bool = False

    @staticmethod
    def of(config: transformers.PretrainedConfig) -> Windows:
        """What a decoder's configuration says. Models that name their layers' types read a mask by type."""
        said = config.to_dict()
        types, width = said.get("layer_types"), said.get("sliding_window")
        if types is None:
            return Windows(width)
        return Windows(width, by_type=True) if SLIDING in types else Windows()

    def masks(
        self,
        visible: Bool[Tensor, "B T S"],
        query: Int[Tensor, "B T"],
        key: Int[Tensor, "B S"],
        dtype: torch.dtype,
    ) -> Mask:
        """The model's mask from what rows see, and from the positions of rows and keys.

        Additive, in the queries' dtype: every attention implementation reads it alike, and none has to convert it anew
        in each layer. Rows that see nothing stay finite.
        """
        if self.width is None:
            return _additive(visible, dtype)
        near = visible & (query[:, :, None] - key[:, None, :] < self.width)
        if not self.by_type:
            return _additive(near, dtype)
        return {FULL: _additive(visible, dtype), SLIDING: _additive(near, dtype)}


def _additive(visible: Bool[Tensor, "B T S"], dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
