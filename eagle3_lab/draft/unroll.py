"""The unroll of a draft over packed rows: how many steps it is run in training, and what gradient flows between
them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle3_lab.draft.attention.unrolled import JoinedUnrolled
from eagle3_lab.interfaces import CausalDraft, Context, DraftModel
from eagle3_lab.rows import shift
from eagle3_lab.types import Batch, Carry, DraftOut, Rows


class Unroll:
    """``depth`` steps; step s reads the tokens x[t+1+s] of the text (never the draft's own choices) at rope position
    t + s, and the carry of step s - 1.

    ``detach`` stops the gradient at the fed-back carry, and only there: keys and values of earlier steps stay in the
    graph. EAGLE is depth 1; HASS detaches; EAGLE-3 does not. A drafter that gives all its steps in one forward
    overrides ``__call__``. ``attention`` is where keys are kept and how rows attend to them: how fast that is, or a
    published way to mask.

    Raises:
        ValueError: for a depth below 1.

    Source: EAGLE-3 (arXiv 2503.01840) section 3.2; SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:713-868;
    HASS (arXiv 2408.15766), HArmonizedSS/HASS 38922e4 train/main_hass.py:399-420 (detach).
    """

    def __init__(self, depth: int = 7, detach: bool = False, attention: Callable[[], Context] = JoinedUnrolled) -> None:
        if depth < 1:
            raise ValueError(f"unroll.depth must be >= 1, got {depth}")
        self.depth = depth
        self.detach = detach
        self.attention = attention

    def check(self, draft: DraftModel) -> None:
        """Raises ValueError for a draft that takes no steps, or fewer than this."""
        if draft.steps is not None and self.depth > draft.steps:
            raise ValueError(f"unroll.depth must be <= {draft.steps}, as many heads as the draft has, got {self.depth}")
        if isinstance(draft, CausalDraft):
            name = type(draft).__name__
            raise ValueError(f"unroll must be NextToken for {name}, got {type(self).__name__}")  # noqa: TRY004

    @property
    def reach(self) -> int:
        """How many steps ahead the hit table of its output looks."""
        return self.depth

    def table(self, hit: Bool[Tensor, "B T S"]) -> Bool[Tensor, "B T R"]:
        """The hit table from the hits of its steps; R is ``reach``."""
        return hit

    def __call__(
        self,
        draft: DraftModel,
        features: Float[Tensor, "B T D"],
        batch: Batch,
        attention: Callable[[], Context] | None = None,
    ) -> Iterator[DraftOut]:
        """Yield step 0, 1, .. depth - 1 of all rows. ``attention`` stands in for the unroll's own in this one pass."""
        keys = self.attention() if attention is None else attention()
        carry = draft.start(features)
        for s in range(self.depth):
            rows = Rows(position=batch.position + s, document=batch.document)
            out = draft.step(carry, shift(batch.ids, 1 + s), rows, s, keys)
            yield out
            carry = _cut(out.carry) if self.detach else out.carry

    def judging(self, depth: int, steps: int | None = None) -> Unroll:
        """This unroll as a decoder drafts: ``depth`` steps on the head's own feedback, however many it was trained for,
        and unseen keys left out of the softmax, however they were masked in training. A head of fewer ``steps`` is
        judged as deep as it has them.

        Raises:
            ValueError: for a depth below 1.
        """
        if depth < 1:
            raise ValueError(f"judged_depth must be >= 1, got {depth}")
        other = copy.copy(self)
        other.depth = depth if steps is None else min(depth, steps)
        other.attention = JoinedUnrolled
        return other


def _cut(carry: Carry) -> Carry:
    return tuple(part.detach() for part in carry) if isinstance(carry, tuple) else carry.detach()


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
