"""Rows compared with their laws, where the loss reads no law."""

from __future__ import annotations

import pytest
import torch

from eagle3_lab.training.loss.row_losses import Learned, compare
from eagle3_lab.training.loss.teacher import Teacher
from eagle3_lab.training.loss.terms import SmoothL1
from eagle3_lab.training.loss.unrolled import UnrolledLoss


def test_a_loss_that_reads_no_law_has_no_gradient_by_logits() -> None:
    teacher = Teacher(
        torch.full((2, 3), 1 / 3), torch.tensor([0, 1]), torch.ones(2), torch.tensor([2, 1]), torch.full((2,), 0.5)
    )
    assert not UnrolledLoss([SmoothL1()]).row_terms
    logits = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]], requires_grad=True)
    learned = Learned(None, torch.zeros(()), torch.ones(2), torch.ones(()))
    found = compare(logits, teacher.rows, torch.arange(3), 1, learned)
    assert found.gradient is None and found.loss == 0
    assert found.hit.tolist() == [True, False]
    # one draft says id 2 nearly surely, of which the full law has a sixth
    assert found.overlap.tolist() == pytest.approx([1 / 6, 1 / 6], abs=1e-3)
