"""Cells side by side: means over seeds with intervals over conversations, and differences from the base cell with
theirs. Nothing is called a difference whose interval holds zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3_lab.ablation.plan import Ablation
from eagle3_lab.ablation.results import READINGS, Ratio, Result
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.bootstrap import Difference, Interval, holm, mean_over_seeds, paired_difference

LEVEL = 0.05


@dataclass(frozen=True)
class Row:
    """A cell at one scale, over its seeds. ``tau`` and ``n_alpha`` by reading (`results.READINGS`): the mean over seeds
    with its interval over conversations; ``by_seed`` tau of each seed."""

    label: str
    cell: str
    scale: int
    results: tuple[Result, ...]
    tau: dict[str, Interval]
    n_alpha: dict[str, tuple[Interval, ...]]
    by_seed: dict[str, tuple[float, ...]]

    @property
    def tokens(self) -> int:
        """Trained on, passes counted."""
        return self.results[0].facts["tokens"]

    @property
    def minutes(self) -> float | None:
        """A training's, the mean over seeds; None where no rate is known."""
        seconds = [one.facts["training_seconds"] for one in self.results if one.facts["training_seconds"] is not None]
        return sum(seconds) / len(seconds) / 60 if seconds else None


@dataclass(frozen=True)
class Comparison:
    """``label``'s tau less ``against``'s, in one reading. ``corrected``: p by Holm's method, over all comparisons of
    that reading."""

    label: str
    against: str
    reading: str
    difference: Difference
    corrected: float

    @property
    def shown(self) -> bool:
        """Whether a difference is shown: the interval holds no zero, and p stays below 0.05 when corrected."""
        interval = self.difference.interval
        return not interval.low <= 0 <= interval.high and self.corrected < LEVEL

    @property
    def words(self) -> str:
        """The difference in words."""
        said = self.difference.interval
        text = f"{said.value:+.3f} [{said.low:+.3f}, {said.high:+.3f}]"
        return text if self.shown else f"{text}, no difference shown"


def rows(ablation: Ablation, found: Mapping[str, Result]) -> list[Row]:
    """Return a row for each cell at each scale of which any seed is done, in the file's order.

    Raises:
        UserError: results over other conversations than the first one's: nothing could be paired.
    """
    by_label: dict[str, list[Result]] = {}
    for cell in ablation.cells:
        if cell.title in found:
            by_label.setdefault(cell.label, []).append(found[cell.title])
    made = [_row(label, results) for label, results in by_label.items()]
    for row in made:
        for result in row.results:
            if result.conversations.keys() != made[0].results[0].conversations.keys():
                raise UserError(
                    f"{row.label}: was measured on other held-out conversations than {made[0].label}; give all cells "
                    "the same data.path and data.held_out"
                )
    return made


def _row(label: str, found: Sequence[Result]) -> Row:
    first = found[0]
    depth = min(one.depth for one in found)
    return Row(
        label=label,
        cell=first.cell,
        scale=first.scale,
        results=tuple(found),
        tau={reading: _mean([one.tau(reading) for one in found]) for reading in READINGS},
        n_alpha={
            reading: tuple(_mean([one.n_alpha(reading, n) for one in found]) for n in range(depth))
            for reading in READINGS
        },
        by_seed={reading: tuple(one.values[f"tau_{reading}"]["value"] for one in found) for reading in READINGS},
    )


def _mean(seeds: Sequence[Ratio]) -> Interval:
    return mean_over_seeds([(one.above, one.below) for one in seeds], _draw())


def _draw() -> torch.Generator:
    """The resamples are the same ones for every number, and in every process."""
    return torch.Generator().manual_seed(0)


def comparisons(ablation: Ablation, found: Sequence[Row]) -> list[Comparison]:
    """Return every row against the base cell's of the same scale (where that has none, of the largest one) and, where
    there are several scales, against its own cell's at its smallest scale; in both readings."""
    pairs: list[tuple[Row, Row]] = []
    base = {row.scale: row for row in found if row.cell == ablation.against}
    smallest = {row.cell: min((r for r in found if r.cell == row.cell), key=lambda r: r.scale) for row in found}
    for row in found:
        if row.cell != ablation.against and base:
            pairs.append((row, base.get(row.scale, base[max(base)])))
    for row in found:
        if smallest[row.cell] is not row:
            pairs.append((row, smallest[row.cell]))
    made: list[Comparison] = []
    for reading in READINGS:
        differences = [_difference(row, other, reading) for row, other in pairs]
        corrected = holm([one.p for one in differences])
        for (row, other), difference, p in zip(pairs, differences, corrected, strict=True):
            made.append(Comparison(row.label, other.label, reading, difference, p))
    return made


def _difference(row: Row, other: Row, reading: str) -> Difference:
    ours, base = ([one.tau(reading) for one in several.results] for several in (row, other))
    return paired_difference([(r.above, r.below) for r in ours], [(r.above, r.below) for r in base], _draw())
