"""The numbers, defined once: acceptance of rounds, the hit table and its readings.

A reading of nothing (no round, no anchor, no prompt) is NaN, never a division error and never 0.

    tau          tokens emitted in rounds / rounds, pooled over prompts; the prefill's token belongs to no round
    engine tau   accepted drafts per round + 1, the last round untrimmed: what serving engines report
    n-alpha      share accepted of the drafts at depth n that were judged, i.e. whose round accepted all n before
    joint rate   share of all rounds that accepted more than n drafts (serving engines' "per position" rate)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle3_lab.types import Decoded, Round


def ratio(numerator: int | float, denominator: int | float) -> float:
    """``numerator / denominator``, NaN where there is nothing to divide by."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True)
class Acceptance:
    """Counters over decoding rounds; two of them add up. ``judged[n]`` rounds judged a draft at depth n (0-based),
    ``accepted[n]`` accepted one there.

        accepted drafts [0, 2, 3, 1] at depth 3, nothing trimmed:   rounds 4, emitted 10, judged 4 3 2, accepted 3 2 1
        tau 2.5    n-alpha 3/4 2/3 1/2    joint 3/4 2/4 1/4    histogram 1 1 1 1    6 of 12 drafted slots accepted
    """

    rounds: int
    emitted: int
    overrun: int
    judged: tuple[int, ...]
    accepted: tuple[int, ...]

    @staticmethod
    def of(rounds: Iterable[Round], depth: int) -> Acceptance:
        """Count rounds of a drafter that drafts at most ``depth`` levels.

        Raises: ValueError where a round judged more levels than ``depth``.
        """
        rounds = list(rounds)
        deepest = max((r.judged for r in rounds), default=0)
        if deepest > depth:
            raise ValueError(f"depth must be at least the {deepest} levels that a round judged, got {depth}")
        return Acceptance(
            rounds=len(rounds),
            emitted=sum(r.emitted for r in rounds),
            overrun=sum(r.overrun for r in rounds),
            judged=tuple(sum(r.judged > n for r in rounds) for n in range(depth)),
            accepted=tuple(sum(r.accepted > n for r in rounds) for n in range(depth)),
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.rounds + other.rounds,
            self.emitted + other.emitted,
            self.overrun + other.overrun,
            tuple(a + b for a, b in zip(self.judged, other.judged, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Tokens emitted per round, bonus tokens included, trimmed at the end token or length limit."""
        return ratio(self.emitted, self.rounds)

    @property
    def engine_tau(self) -> float:
        """Drafts accepted per round + 1, nothing trimmed: comparable with serving engines, never below ``tau``."""
        return ratio(sum(self.accepted) + self.overrun, self.rounds) + 1

    @property
    def per_slot(self) -> float:
        """Accepted drafts / (rounds x depth): the "acceptance rate" of serving engines, for chains of fixed depth."""
        return ratio(sum(self.accepted), self.rounds * len(self.accepted))

    @property
    def n_alpha(self) -> tuple[float, ...]:
        """Accepted / judged at each depth: conditional on all earlier drafts of the round accepted."""
        return tuple(ratio(a, j) for a, j in zip(self.accepted, self.judged, strict=True))

    @property
    def joint(self) -> tuple[float, ...]:
        """Accepted / rounds at each depth: not conditional, so it also falls where text ends."""
        return tuple(ratio(a, self.rounds) for a in self.accepted)

    @property
    def histogram(self) -> tuple[int, ...]:
        """How many rounds accepted exactly 0, 1, .. depth drafts."""
        at_least = (self.rounds, *self.accepted, 0)
        return tuple(a - b for a, b in pairwise(at_least))


def pooled_tau(decoded: Sequence[Decoded]) -> float:
    """Tokens emitted in rounds / rounds over all answers."""
    rounds = [r for d in decoded for r in d.rounds]
    return ratio(sum(r.emitted for r in rounds), len(rounds))
