"""An unroll whose layers' matrices are cast once to the dtype of products; compiled functions would cast them anew.

Autocast keeps the casts of one step for its own operations, but no compiled function sees what it keeps: each call of
each layer would cast its matrices again, and add up their gradients in float32 once a call.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle3_lab.backend.compile import is_fusing
from eagle3_lab.draft.llama import DecoderLayer
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import DraftModel
from eagle3_lab.types import Batch, DraftOut


def unrolled(unroll: Unroll, draft: DraftModel, features: Float[Tensor, "B T D"], batch: Batch) -> list[DraftOut]:
    """All steps of the unroll; while fusing under autocast, on matrices cast beforehand.

    Raises:
        UserError: while fusing, where torch cannot compile.
    """
    device = features.device.type
    if not (is_fusing() and torch.is_autocast_enabled(device)):
        return list(unroll(draft, features, batch))
    run = _Run(unroll, draft)
    dtype = torch.get_autocast_dtype(device)
    narrow = {name: matrix.to(dtype) for name, matrix in _matrices(run).items() if matrix.dtype == torch.float32}
    return torch.func.functional_call(run, narrow, (features, batch))


class _Run(nn.Module):
    """The unroll as a module, whose parameters torch can stand others in for."""

    def __init__(self, unroll: Unroll, draft: DraftModel) -> None:
        super().__init__()
        self._unroll, self.draft = unroll, draft

    def forward(self, features: Tensor, batch: Batch) -> list[DraftOut]:
        return list(self._unroll(self.draft, features, batch))


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear maps in decoder layers, by name."""
    found = {}
    for place, layer in module.named_modules():
        if isinstance(layer, DecoderLayer):
            for name, part in layer.named_modules():
                if isinstance(part, nn.Linear):
                    found[f"{place}.{name}.weight"] = part.weight
    return found
