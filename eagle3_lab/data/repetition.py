"""When an answer loops: one rule for what is left out of training and for what is shown in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

GRAM, TIMES = 8, 3


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether one 8-gram stands in the tokens more than three times (overlaps count). Loops raise acceptance, so tau is
    shown with and without them, and nothing is trained on them."""
    grams = Counter(tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1))
    return max(grams.values(), default=0) > TIMES
