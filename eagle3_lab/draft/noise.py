"""Noise on the states that a draft reads in training: it learns to go on from features that are a little wrong, as its
own are. What it is taught stays exact."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.types import PADDING, Batch


class FeatureNoise(ABC):
    """Disturbs the target's states before the source reads them, in training only."""

    @abstractmethod
    def disturb(
        self, taps: tuple[Float[Tensor, "B T Dt"], ...], batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B T Dt"], ...]:
        """The taps, disturbed; all draws come from ``generator``, which lives on their device."""


class UniformNoise(FeatureNoise):
    """Adds (u - 0.5) * width * reference / L with u uniform in [0, 1): L is the tokens of the row's own document, so a
    long document is disturbed less. ``reference`` None: the same width everywhere, u - 0.5 times ``width``.

    Raises:
        ValueError: for a width or a reference that is not positive.

    Source: SafeAILab/EAGLE cb7e084 eagle/train/main.py:109-131 (width 0.2, reference 512), and the same in
    HArmonizedSS/HASS 38922e4. vllm-project/speculators c05b95b noise_transforms.py:23-25 is width 0.1, reference None.
    """

    def __init__(self, width: float = 0.2, reference: int | None = 512) -> None:
        if width <= 0:
            raise ValueError(f"noise.width must be > 0, got {width}; for no noise leave it out")
        if reference is not None and reference < 1:
            raise ValueError(f"noise.reference must be >= 1 or null, got {reference}")
        self.width, self.reference = width, reference

    def disturb(
        self, taps: tuple[Float[Tensor, "B T Dt"], ...], batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B T Dt"], ...]:
        width: Tensor | float = self.width
        if self.reference is not None:
            width = self.width * self.reference / document_lengths(batch.document)[..., None]
        return tuple(tap + self._draw(tap, generator).mul(width).to(tap.dtype) for tap in taps)

    def _draw(self, tap: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(tap.shape, generator=generator, device=tap.device) - 0.5


def document_lengths(document: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """How many tokens each row's document has; the whole row's length for padding.

    [0 0 0 1 1 PADDING] -> [3 3 3 2 2 6]
    """
    real = document != PADDING
    number = document.clamp(min=0)
    count = torch.zeros_like(document).scatter_add(1, number, real.long())
    return torch.where(real, count.gather(1, number), document.shape[1])
