"""HASS's published masking, for parity: unseen keys are not left out of the softmax, they enter it with score 0.

HASS multiplies scores by the mask before the softmax, and the weights by it afterwards. So each weight is

    exp(score) / (sum over seen keys of exp(score) + number of unseen keys)

over all T columns of the batch, later ones and padding included: what a row computes depends on how long the batch it
stands in was padded. In our rows: row t at step s stands in column t + s and sees t + 1 + s keys, so T - 1 - t - s are
unseen. The default masking leaves unseen keys out, and is what decoding does.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.errors import UserError
from eagle3_lab.types import Rows


class MultiplicativeUnrolled(DenseUnrolled):
    """Dense attention of an unroll with HASS's published masking. Rows of one document each, padded or not.

    Raises:
        UserError: from ``check`` and ``attend``, for packed rows: a document's weights would depend on its neighbours.

    Source: HArmonizedSS/HASS 38922e4 model/cnets_hass.py:336-341.
    """

    def check(self, document: Int[Tensor, "B T"]) -> None:
        _refuse_packed(document)

    def _weights(self, scores: Tensor, rows: Rows) -> Tensor:
        assert rows.document is not None, "an unroll's rows carry their document"
        length = scores.shape[-2]
        step = scores.shape[-1] - length
        if step == 0:  # documents are the same at every step
            _refuse_packed(rows.document)
        column = torch.arange(length, device=scores.device) + step
        unseen = (length - 1 - column).clamp(min=0)
        extra = unseen.to(scores.dtype).log().expand(scores.shape[:-1])[..., None]
        return super()._weights(torch.cat((scores, extra), dim=-1), rows)[..., :-1]


def _refuse_packed(document: Tensor) -> None:
    most = int(document.max()) + 1
    if most > 1:
        raise UserError(
            "unroll.attention: MultiplicativeUnrolled depends on a row's whole length, so it needs one document a "
            f"row, got a row of {most}; set data.packed: false, or leave attention out"
        )
