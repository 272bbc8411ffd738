"""Bootstrap intervals: prompts are resampled, and the statistic is a ratio of sums over them.

Rounds and tokens of one prompt are not independent, so prompts are the unit. 95 %, percentiles of 10,000 resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Column = Sequence[int] | Sequence[float]
"""One number for each prompt."""


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its bootstrap interval. One prompt alone gives an interval of no width."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _bootstrap(
    columns: Sequence[Column],
    statistic: Callable[[Float[Tensor, "K R"]], Float[Tensor, " R"]],
    generator: torch.Generator,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap over prompts of a statistic of pooled sums. ``columns`` [K][P]: K numbers a prompt."""
    table = torch.tensor(columns, dtype=torch.float64)
    prompts = table.shape[1]
    if prompts == 0:
        return Interval(math.nan, math.nan, math.nan)
    drawn = []
    for start in range(0, resamples, 1000):  # bounds memory
        pick = torch.randint(prompts, (min(1000, resamples - start), prompts), generator=generator)
        drawn.append(statistic(table[:, pick].sum(-1)))
    tail = torch.tensor(((1 - level) / 2, (1 + level) / 2), dtype=torch.float64)
    low, high = torch.nanquantile(torch.cat(drawn), tail).tolist()
    return Interval(statistic(table.sum(-1, keepdim=True)).item(), low, high)


def ratio_interval(numerator: Column, denominator: Column, generator: torch.Generator) -> Interval:
    """Ratio of sums over prompts with its 95 % bootstrap interval: tau from (emitted, rounds) a prompt, tokens/s from
    (tokens, seconds) a prompt. ``generator`` is a CPU generator; the same seed gives the same interval."""
    return _bootstrap((numerator, denominator), lambda sums: sums[0] / sums[1], generator)


def speedup_interval(
    tokens: Column,
    seconds: Column,
    base_tokens: Column,
    base_seconds: Column,
    generator: torch.Generator,
) -> Interval:
    """Tokens/s over the baseline's tokens/s, the same prompts resampled in both, with its 95 % bootstrap interval.

    With equal token counts (T = 0) this is total baseline time / total speculative time. Clocks are the caller's:
    synchronised with the device, warm-up outside.

    Raises: ValueError where the four columns do not hold one number for each prompt.
    """
    columns = (tokens, seconds, base_tokens, base_seconds)
    if len({len(c) for c in columns}) > 1:
        raise ValueError(f"speed-up needs the same prompts in every column, got {[len(c) for c in columns]}")
    return _bootstrap(columns, lambda s: (s[0] / s[1]) / (s[2] / s[3]), generator)
