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


RESAMPLES, LEVEL = 10_000, 0.95


def _resampled(
    columns: Sequence[Column],
    statistic: Callable[[Float[Tensor, "K R"]], Float[Tensor, "S R"]],
    generator: torch.Generator,
) -> tuple[Float[Tensor, " S"], Float[Tensor, "S R"]]:
    """S statistics of pooled sums over prompts, and their values in resamples of the prompts, the same ones for all S.
    ``columns`` [K][P]: K numbers a prompt. NaN where there is no prompt."""
    table = torch.tensor(columns, dtype=torch.float64)
    prompts = table.shape[1]
    if prompts == 0:
        nothing = statistic(torch.full((table.shape[0], 1), math.nan, dtype=torch.float64))
        return nothing[:, 0], nothing
    drawn = []
    for start in range(0, RESAMPLES, 1000):  # bounds memory
        pick = torch.randint(prompts, (min(1000, RESAMPLES - start), prompts), generator=generator)
        drawn.append(statistic(table[:, pick].sum(-1)))
    return statistic(table.sum(-1, keepdim=True))[:, 0], torch.cat(drawn, 1)


def _intervals(values: Float[Tensor, " S"], drawn: Float[Tensor, "S R"]) -> list[Interval]:
    """Percentiles of the resamples that have a value."""
    tail = torch.tensor(((1 - LEVEL) / 2, (1 + LEVEL) / 2), dtype=torch.float64)
    low, high = torch.nanquantile(drawn, tail, dim=1).tolist()
    return [Interval(*bounds) for bounds in zip(values.tolist(), low, high, strict=True)]


def ratio_intervals(
    numerators: Sequence[Column], denominators: Sequence[Column], generator: torch.Generator
) -> list[Interval]:
    """Several ratios of sums over the same prompts, each with its 95 % bootstrap interval; the prompts are resampled
    once for all. ``numerators`` and ``denominators`` [S][P]: S numbers a prompt.

    Raises: ValueError where they are not equally many.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"ratios need as many denominators as numerators ({len(numerators)}), got {len(denominators)}")
    if not numerators:
        return []
    return _intervals(*_resampled([*numerators, *denominators], _ratios, generator))


def _ratios(sums: Float[Tensor, "K R"]) -> Float[Tensor, "S R"]:
    half = len(sums) // 2
    return sums[:half] / sums[half:]


def ratio_interval(numerator: Column, denominator: Column, generator: torch.Generator) -> Interval:
    """Ratio of sums over prompts with its 95 % bootstrap interval: tau from (emitted, rounds) a prompt, tokens/s from
    (tokens, seconds) a prompt. ``generator`` is a CPU generator; the same seed gives the same interval."""
    return ratio_intervals([numerator], [denominator], generator)[0]


def _speedup(sums: Float[Tensor, "4 R"]) -> Float[Tensor, "1 R"]:
    return (sums[0] / sums[1] / (sums[2] / sums[3]))[None]


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
    _require_equal(columns)
    return _intervals(*_resampled(columns, _speedup, generator))[0]


def _require_equal(columns: Sequence[Column]) -> None:
    if len({len(c) for c in columns}) > 1:
        raise ValueError(f"speed-up needs the same prompts in every column, got {[len(c) for c in columns]}")


# ------------------------------------------------------------------------------------------------- means over tasks


def mean_ratio_interval(tasks: Sequence[tuple[Column, Column]], generator: torch.Generator) -> Interval:
    """The unweighted mean over tasks of each task's ratio of sums, as papers' tables have it, with its 95 % bootstrap
    interval: prompts are resampled within their task. A task is (numerator, denominator); NaN where one has no ratio.

    Raises: ValueError for no task.
    """
    return _mean(tasks, _ratios, generator)


def mean_speedup_interval(
    tasks: Sequence[tuple[Column, Column, Column, Column]], generator: torch.Generator
) -> Interval:
    """The unweighted mean over tasks of each task's speed-up, with its 95 % bootstrap interval as in
    `mean_ratio_interval`. A task is the four columns of `speedup_interval`.

    Raises: ValueError for no task, or where a task's columns do not hold one number for each prompt.
    """
    for columns in tasks:
        _require_equal(columns)
    return _mean(tasks, _speedup, generator)


def _mean(
    tasks: Sequence[Sequence[Column]],
    statistic: Callable[[Float[Tensor, "K R"]], Float[Tensor, "S R"]],
    generator: torch.Generator,
) -> Interval:
    if not tasks:
        raise ValueError("a mean over tasks needs at least one task")
    found = [_resampled(columns, statistic, generator) for columns in tasks]
    values, drawn = (torch.stack(parts).mean(0) for parts in zip(*found, strict=True))
    return _intervals(values, drawn)[0]


# ---------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """A difference of two means with its bounds, and the bootstrap's two-sided ``p``: twice the share of resamples on
    the other side of zero, never 0."""

    interval: Interval
    p: float


def mean_over_seeds(seeds: Sequence[tuple[Column, Column]], generator: torch.Generator) -> Interval:
    """Return the mean over seeds of each one's ratio of sums, with its 95 % bootstrap interval. A seed is (numerator,
    denominator), one number a prompt; the prompts are the same for all and resampled once for all, so the interval is
    of the choice of prompts and not of seeds."""
    return _intervals(*_resampled(_columns(seeds), _mean_ratio, generator))[0]


def paired_difference(
    ours: Sequence[tuple[Column, Column]], base: Sequence[tuple[Column, Column]], generator: torch.Generator
) -> Difference:
    """Return the mean over seeds of ``ours`` less that of ``base``, as `mean_over_seeds`: in each resample both have
    the same prompts, so that what is hard or easy for both leaves their difference alone.

    Raises: ValueError where the columns do not hold one number for each of the same prompts.
    """
    lengths = {len(column) for seed in (*ours, *base) for column in seed}
    if len(lengths) > 1:
        raise ValueError(f"a paired difference needs the same prompts in every column, got {sorted(lengths)}")
    split = 2 * len(ours)

    def statistic(sums: Float[Tensor, "K R"]) -> Float[Tensor, "1 R"]:
        return _mean_ratio(sums[:split]) - _mean_ratio(sums[split:])

    value, drawn = _resampled([*_columns(ours), *_columns(base)], statistic, generator)
    below, above = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    p = min(1.0, 2 * (min(below, above) + 1) / (drawn.shape[1] + 1))
    return Difference(_intervals(value, drawn)[0], p)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method: with them below 0.05, the chance that any of the
    differences is none stays below 0.05.

        holm([0.01, 0.04, 0.03]) = [0.03, 0.06, 0.06]

    Source: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    corrected, highest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = highest
    return corrected


def _columns(seeds: Sequence[tuple[Column, Column]]) -> list[Column]:
    return [column for seed in seeds for column in seed]


def _mean_ratio(sums: Float[Tensor, "K R"]) -> Float[Tensor, "1 R"]:
    """Of numerators and denominators in turn."""
    return (sums[0::2] / sums[1::2]).mean(0, keepdim=True)
