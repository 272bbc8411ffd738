"""Loss terms: each compares one draft row with its teacher and knows nothing of rows, steps or weights of others."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lab.draft.vocab import OUTSIDE
from eagle3_lab.interfaces import DraftModel
from eagle3_lab.training.loss.teacher import Teacher


class Term(ABC):
    """One addend of a row's loss, with its weight.

    Raises:
        ValueError: for a negative weight.
    """

    def __init__(self, weight: float = 1.0) -> None:
        if weight < 0:
            raise ValueError(f"losses.{type(self).__name__}.weight must be >= 0, got {weight}")
        self.weight = weight

    def check(self, draft: DraftModel) -> None:
        """Raise ValueError where this term cannot serve a built draft; most serve every one."""


class RowTerm(Term):
    """Compares the draft's law with the target's."""

    @abstractmethod
    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        """The loss of M rows, unweighted. ``log_q`` are the draft's log-probabilities."""


class StepTerm(Term):
    """Compares the draft's law with the target's, in view of how all rows of the step do."""

    @abstractmethod
    def per_row(
        self, log_q: Float[Tensor, "M Vd"], teacher: Teacher, acceptance: Float[Tensor, ""]
    ) -> Float[Tensor, " M"]:
        """The loss of M rows, unweighted. ``acceptance`` is the mean overlap of the step's taught rows in this batch,
        without gradient."""


class FeatureTerm(Term):
    """Compares what the draft's head reads with what the target's head reads."""

    @abstractmethod
    def per_row(self, predicted: Float[Tensor, "M D"], feature: Float[Tensor, "M D"]) -> Float[Tensor, " M"]:
        """The loss of M rows, unweighted."""


class SoftCE(RowTerm):
    """- sum over x of p(x) log q(x): KL(p, q) plus a constant."""

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        return -(teacher.p * log_q).sum(-1)


class KL(RowTerm):
    """sum over x of p(x) log(p(x) / q(x)): SoftCE's gradient, and 0 at the aim."""

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        return torch.xlogy(teacher.p, teacher.p).sum(-1) - (teacher.p * log_q).sum(-1)


class ReverseKL(RowTerm):
    """sum over x of q(x) log(q(x) / p(x)): spares a draft that leaves some of p's ids out, not one that says others.

    p is no smaller than its dtype's least normal number (1e-38 in float32).
    """

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        log_p = teacher.p.clamp(min=torch.finfo(teacher.p.dtype).tiny).log()
        return (log_q.exp() * (log_q - log_p)).sum(-1)


class TotalVariation(RowTerm):
    """1 - sum over x of min(p(x), q(x)), p as the teacher's rule leaves it: the chance that a draft is rejected where
    that is the full law. What p lacks of 1 counts as missed.

    Source: vllm-project/speculators c05b95b losses/eager.py (tv).
    """

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        return 1 - torch.minimum(teacher.p, log_q.exp()).sum(-1)


class HardCE(RowTerm):
    """- log q of the target's arg-max; 0 where that has no draft id."""

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        picked = log_q.gather(-1, teacher.label.clamp(min=0)[:, None])[:, 0]
        return torch.where(teacher.label == OUTSIDE, 0.0, -picked)


class TokenCE(RowTerm):
    """- log q of the token that the text goes on with; 0 where that has no draft id.

    Source: Medusa (arXiv 2401.10774) section 2.2.1; FasterDecoding/Medusa 0bfdcd2 medusa/train/train_legacy.py:69-79.
    """

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        assert teacher.said is not None, "a teacher of a text knows how it goes on"
        picked = log_q.gather(-1, teacher.said.clamp(min=0)[:, None])[:, 0]
        return torch.where(teacher.said == OUTSIDE, 0.0, -picked)


class TopKCE(RowTerm):
    """- sum of p(x) log q(x) over the k ids of largest p, p not renormalised.

    Source: HASS (arXiv 2408.15766) section 3.1; HArmonizedSS/HASS 38922e4 train/main_hass.py:254-255.
    """

    def __init__(self, weight: float = 1.0, k: int = 10) -> None:
        super().__init__(weight)
        if k < 1:
            raise ValueError(f"losses.TopKCE.k must be >= 1, got {k}")
        self.k = k

    def check(self, draft: DraftModel) -> None:
        size = draft.vocab.shape[0]
        if self.k > size:
            raise ValueError(f"losses.TopKCE.k must be <= the draft vocabulary's {size}, got {self.k}")

    def per_row(self, log_q: Float[Tensor, "M Vd"], teacher: Teacher) -> Float[Tensor, " M"]:
        best = teacher.p.topk(self.k, dim=-1)
        return -(best.values * log_q.gather(-1, best.indices)).sum(-1)


class SmoothL1(FeatureTerm):
    """Smooth L1 distance (beta 1), the mean over the width.

    Source: SafeAILab/EAGLE cb7e084 train/main.py:231-239.
    """

    def per_row(self, predicted: Float[Tensor, "M D"], feature: Float[Tensor, "M D"]) -> Float[Tensor, " M"]:
        wide = torch.promote_types(predicted.dtype, torch.float32)
        distance = torch.nn.functional.smooth_l1_loss(predicted.to(wide), feature.to(wide), reduction="none")
        return distance.mean(-1)
