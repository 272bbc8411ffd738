"""Losses on the acceptance itself: what a draft is for, instead of a divergence that only bounds it.

A draft token drawn from q is accepted with probability alpha = sum over x of min(p(x), q(x)), p the target's full law
(:meth:`eagle3_lab.training.loss.teacher.Teacher.overlap`), whatever rule the other terms are taught by. A loss of alpha
can be taken row by row, or of a step's mean alpha. The two differ: -log of a mean forgives a hopeless row, a mean of
-log spends most of its gradient on it. The forms of the mean are written so that their row losses average to the loss
of the mean, in value and in gradient, with the mean itself a constant.

Source: LK losses (arXiv 2602.23881); sgl-project/SpecForge a6b6b02 specforge/core/lk_loss.py:83-99.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lab.training.loss.teacher import Teacher
from eagle3_lab.training.loss.terms import KL, RowTerm, StepTerm

FLOOR = 1e-6
"""An acceptance is no smaller than this where it is divided by or its logarithm taken."""


class LogAcceptance(RowTerm):
    """- log alpha of each row."""

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        return -teacher.overlap(log_q).clamp(min=FLOOR).log()


class LogMeanAcceptance(StepTerm):
    """- log of the step's mean alpha: a row's share is - log mean - (alpha - mean) / mean, the mean held constant."""

    def per_row(
        self, log_q: Float[Tensor, "M Vd"], teacher: Teacher, acceptance: Float[Tensor, ""]
    ) -> Float[Tensor, " M"]:
        mean = acceptance.detach().clamp(min=FLOOR)
        return -mean.log() - (teacher.overlap(log_q) - mean) / mean


class KLToAcceptance(RowTerm):
    """From KL(p, q) to 1 - alpha as a row gets better: w KL + (1 - w) (1 - alpha), w = exp(-rate alpha) held constant.

    KL has a gradient where p and q hardly meet and alpha has none; near the aim it is alpha that counts.

    Args:
        weight: of the term.
        rate: how fast the KL fades; 0 is KL alone.

    Raises:
        ValueError: for a negative rate.
    """

    def __init__(self, weight: float = 1.0, rate: float = 3.0) -> None:
        super().__init__(weight)
        self.rate = _checked_rate(rate, self)

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        alpha = teacher.overlap(log_q)
        return _blend(log_q, teacher, alpha, alpha, self.rate)


class KLToMeanAcceptance(StepTerm):
    """:class:`KLToAcceptance` with one w for a step, from the step's mean alpha: the published form.

    Args:
        weight: of the term.
        rate: how fast the KL fades; 0 is KL alone.

    Raises:
        ValueError: for a negative rate.
    """

    def __init__(self, weight: float = 1.0, rate: float = 3.0) -> None:
        super().__init__(weight)
        self.rate = _checked_rate(rate, self)

    def per_row(
        self, log_q: Float[Tensor, "M Vd"], teacher: Teacher, acceptance: Float[Tensor, ""]
    ) -> Float[Tensor, " M"]:
        return _blend(log_q, teacher, teacher.overlap(log_q), acceptance, self.rate)


def _blend(log_q: Tensor, teacher: Teacher, alpha: Tensor, judged_by: Tensor, rate: float) -> Tensor:
    share = torch.exp(-rate * judged_by.detach())
    return share * KL().per_row(log_q, teacher) + (1 - share) * (1 - alpha)


def _checked_rate(rate: float, term: RowTerm | StepTerm) -> float:
    if rate < 0:
        raise ValueError(f"losses.{type(term).__name__}.rate must be >= 0, got {rate}")
    return rate
