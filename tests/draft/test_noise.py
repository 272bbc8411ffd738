"""Noise on what a draft reads: its width by hand, and that it follows its generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_lab.draft.noise import UniformNoise, document_lengths
from eagle3_lab.types import PADDING


def draw(noise: UniformNoise, batch: Any, seed: int = 0) -> Tensor:
    zeros = torch.zeros(*batch.ids.shape, 64)
    return noise.disturb((zeros,), batch, torch.Generator().manual_seed(seed))[0]


def test_a_rows_document_is_counted() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, PADDING], [0, 0, 0, 0, 0, 0]])
    assert document_lengths(document).tolist() == [[3, 3, 3, 2, 2, 6], [6] * 6]


def test_longer_documents_are_disturbed_less(make_batch: Any) -> None:
    drawn = draw(UniformNoise(width=0.2, reference=8), make_batch([(4, 1), (16, 1)], length=20))
    # u - 0.5 is within 0.5: 0.2 * 8 / 4 / 2 and 0.2 * 8 / 16 / 2
    for rows, most in ((slice(0, 4), 0.2), (slice(4, 20), 0.05)):
        assert 0.9 * most < drawn[0, rows].abs().max() <= most
        assert drawn[0, rows].mean().abs() < 0.2 * most


def test_without_a_reference_every_row_is_disturbed_alike(make_batch: Any) -> None:
    drawn = draw(UniformNoise(width=0.1, reference=None), make_batch([(4, 1), (16, 1)], length=20))
    assert 0.045 < drawn[0, :4].abs().max() <= 0.05
    assert 0.045 < drawn[0, 4:].abs().max() <= 0.05


def test_draws_follow_the_generator_and_taps_differ(make_batch: Any) -> None:
    batch = make_batch([(6, 1)], length=6)
    assert torch.equal(draw(UniformNoise(), batch, 1), draw(UniformNoise(), batch, 1))
    assert not torch.equal(draw(UniformNoise(), batch, 1), draw(UniformNoise(), batch, 2))
    zeros = torch.zeros(1, 6, 4, dtype=torch.bfloat16)
    low, high = UniformNoise().disturb((zeros, zeros), batch, torch.Generator().manual_seed(0))
    assert not torch.equal(low, high)
    assert low.dtype == torch.bfloat16
    assert not zeros.any()


def test_noise_of_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match="noise.width must be > 0, got 0.0; for no noise leave it out"):
        UniformNoise(width=0.0)
    with pytest.raises(ValueError, match="noise.reference must be >= 1 or null, got 0"):
        UniformNoise(reference=0)
