"""How many rows a loss works off at once within a memory budget.

What head and loss hold for a whole step comes first: the gradients of the head and of its inputs, and the head's
weights cast for narrower products. A chunk's laws, a piece's logits and their gradient share the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3_lab.backend.compile import is_fusing
from eagle3_lab.interfaces import DraftModel
from eagle3_lab.training.loss.head_linear import HeadProducts
from eagle3_lab.types import DraftOut

MIB = 2**20

COMPARED_SHARE, COMPARED_COPIES, FUSED_COPIES = 16, 6, 3
"""What part of the budget the rows take that are compared together, and how many arrays of Vd they have at once: p,
log q, and what statistics, a term and its gradient pass through, which fused is next to nothing."""

GRADIENT_SHARE = 64
"""What part of the budget a slice of the head's gradient takes, until it is added to the rest."""

LEAST_SHARE = 8
"""Laws and logits have at least this part of the budget, however much the gradients take of it."""


@dataclass(frozen=True)
class Room:
    """``rows`` target rows' laws fit together, ``compared`` rows in float32, and beside its law there are ``row_bytes``
    for each target row."""

    rows: int
    compared: int
    row_bytes: int

    @staticmethod
    def of(
        budget_mib: int | None,
        draft: DraftModel,
        steps: Sequence[DraftOut],
        products: HeadProducts,
        law: torch.dtype,
    ) -> Room:
        """Ask the head, by no row at all, which weights it multiplies by and what its logits are."""
        learning, held, logits = torch.is_grad_enabled(), 0, law
        for s, out in enumerate(steps):
            with products:
                logits = draft.logits(out.head_in.detach().flatten(0, 1)[:0].requires_grad_(learning), s).dtype
            held += out.head_in.nbytes if learning else 0
        size, (batch, length, _) = draft.vocab.shape[0], steps[0].head_in.shape
        held += products.held_bytes()
        rows, compared = rows_at_once(budget_mib, size, law, logits, held)
        if budget_mib is not None and draft.vocab.device.type != "cpu":  # whose cache a few rows stay in
            rows = min(rows, batch * (length + len(steps)))
            spare = budget_mib * MIB - held - rows * _row_bytes(size, law, logits)
            compared = max(compared, spare // _compared_bytes(size, law))
        return Room(rows, compared, size * 2 * logits.itemsize)

    def made(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """How many rows' target logits of so many columns take what ``rows`` draft rows will, once these are gone."""
        return max(1, rows * self.row_bytes // (columns * dtype.itemsize))


def rows_at_once(
    budget_mib: int | None, size: int, law: torch.dtype, logits: torch.dtype, held: int
) -> tuple[int, int]:
    """How many target rows' laws fit the budget together, and how many of them are compared at a time; at least 1 each.
    ``size`` of the draft vocabulary; ``held`` bytes are taken beforehand. The fewer pieces a step has, the fewer times
    a trained head's gradient is added up."""
    if budget_mib is None:
        return sys.maxsize, sys.maxsize
    budget = budget_mib * MIB
    comparing = budget // COMPARED_SHARE
    left = max(budget - held - comparing - budget // GRADIENT_SHARE, budget // LEAST_SHARE)
    rows = left // _row_bytes(size, law, logits)
    return max(1, rows), max(1, comparing // _compared_bytes(size, law))


def _compared_bytes(size: int, law: torch.dtype) -> int:
    """What a row takes while it is compared."""
    return (FUSED_COPIES if is_fusing() else COMPARED_COPIES) * size * law.itemsize


def _row_bytes(size: int, law: torch.dtype, logits: torch.dtype) -> int:
    """What a target row takes: its law, and the logits and their gradient of the draft row that is learning it."""
    return size * (law.itemsize + 2 * logits.itemsize)


def slice_bytes(budget_mib: int | None) -> int | None:
    """How much of a head's gradient is made before it is added; None: all of it."""
    return None if budget_mib is None else budget_mib * MIB // GRADIENT_SHARE
