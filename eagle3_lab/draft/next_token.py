"""The unroll of a draft that is a language model: one forward over the text, one draft a row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.rows import shift
from eagle3_lab.types import Batch, CausalDraft, Context, DraftModel, DraftOut


class NextToken(Unroll):
    """Step 0 alone: row t is the language model behind x[t+1], which predicts x[t+2].

    Later steps would say nothing new. A language model reads tokens and never its own states, so on the text's own
    tokens its draft s from anchor t is its draft 0 from anchor t + s; the loss takes each row once, and the hit table
    looks ``reach`` drafts ahead by shifting:

        hits of step 0   1 1 0 1 0     reach 3, anchor by anchor   110 101 010 10. 0..

    Raises:
        ValueError: for a reach below 1.
    """

    def __init__(self, reach: int = 5) -> None:
        super().__init__(depth=1)
        if reach < 1:
            raise ValueError(f"unroll.reach must be >= 1, got {reach}")
        self._reach = reach

    def check(self, draft: DraftModel) -> None:
        """Raises ValueError for a draft that is no language model."""
        if not isinstance(draft, CausalDraft):
            name = type(draft).__name__
            raise ValueError(f"unroll must be Unroll for {name}, which reads features, got NextToken")  # noqa: TRY004

    @property
    def reach(self) -> int:
        return self._reach

    def table(self, hit: Bool[Tensor, "B T S"]) -> Bool[Tensor, "B T R"]:
        return torch.stack([shift(hit[..., 0], s, False) for s in range(self._reach)], dim=-1)

    def judging(self, depth: int, steps: int | None = None) -> Unroll:
        if depth < 1:
            raise ValueError(f"judged_depth must be >= 1, got {depth}")
        other = copy.copy(self)
        other._reach = depth
        return other

    def __call__(
        self,
        draft: DraftModel,
        features: Float[Tensor, "B T D"],
        batch: Batch,
        attention: Callable[[], Context] | None = None,
    ) -> Iterator[DraftOut]:
        """Yield the one step. The model's own attention serves; ``features`` are NoFeature's."""
        assert isinstance(draft, CausalDraft), "checked when the module was made"
        top = shift(draft.lm(batch), 1)
        yield DraftOut(head_in=top, carry=top)
