"""A cell's result: a small file in the ablation's folder, written whole when the cell is done, read by whoever comes
later, in this checkout or in a fresh one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_lab.ablation.identity import cell_options, first_difference
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.config.reading import label
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.bootstrap import Interval, ratio_intervals
from eagle3_lab.system.files import write_atomic
from eagle3_lab.training.hit_reading import DocumentHits

FORMAT = 1
RESULTS = "results"

VISITED, ALL = "visited", "all"
"""The hit table's two readings: the anchors that a chain decoder would visit, and all anchors."""

READINGS = (VISITED, ALL)


@dataclass(frozen=True)
class Ratio:
    """A number that is a ratio of sums over conversations: what is summed above and below, in one order."""

    above: tuple[int, ...]
    below: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What one cell gave.

    Args:
        cell: the name, ``scale`` and ``seed`` are as in `Cell`.
        key: of the cell's configuration; ``configuration`` is what it was made of.
        settings: the keys that vary within the ablation.
        values: tau and n-alpha of both readings, with their intervals over conversations; losses.
        conversations: by the held-out conversation's id, its counts: see `pack`.
        facts: data, target, steps, tokens, seconds, machine, code: flat names as a run's tags have them.
    """

    cell: str
    scale: int
    seed: int
    key: str
    settings: dict[str, str]
    configuration: dict[str, str]
    values: dict[str, Any]
    conversations: dict[str, list[int]]
    facts: dict[str, Any]

    @property
    def depth(self) -> int:
        """How many drafts deep the head was judged."""
        return (len(next(iter(self.conversations.values()))) - 4) // 4

    def tau(self, reading: str) -> Ratio:
        """Expected tau of all anchors, or tau of the visited ones."""
        rows = self.conversations.values()
        if reading == VISITED:
            return Ratio(tuple(row[1] for row in rows), tuple(row[0] for row in rows))
        return Ratio(tuple(row[2] + row[3] for row in rows), tuple(row[2] for row in rows))

    def n_alpha(self, reading: str, n: int) -> Ratio:
        """Drafts accepted of those judged at depth ``n``."""
        depth, rows = self.depth, self.conversations.values()
        at = 4 + n + (0 if reading == VISITED else 2 * depth)
        return Ratio(tuple(row[at + depth] for row in rows), tuple(row[at] for row in rows))

    def interval(self, name: str, n: int | None = None) -> Interval:
        """A value with its bounds: ``tau_all``, or ``n_alpha_visited`` at depth ``n``."""
        value = self.values[name] if n is None else self.values[name][n]
        return Interval(**{bound: math.nan if number is None else number for bound, number in value.items()})


def pack(hits: DocumentHits) -> list[int]:
    """Return a document's counts as one row: visited rounds and the tokens emitted in them; anchors whose drafts all
    lie in the answer and the leading hits of these; then, by depth, drafts judged and accepted in visited rounds, and
    drafts reached and passed at all anchors."""
    seen = hits.visited
    four = [seen.rounds, seen.emitted, hits.whole, hits.leading]
    return [*four, *seen.judged, *seen.accepted, *hits.reached, *hits.passed]


def by_conversation(ids: Iterable[str], documents: Iterable[DocumentHits]) -> dict[str, list[int]]:
    """Return the rows of all conversations in the order of their ids; several documents of one add up."""
    found: dict[str, list[int]] = {}
    for name, hits in zip(ids, documents, strict=True):
        row = pack(hits)
        found[name] = [a + b for a, b in zip(found[name], row, strict=True)] if name in found else row
    return dict(sorted(found.items()))


def values_of(result: Result) -> dict[str, Any]:
    """Return the readings of a result with their 95 % intervals over conversations, as JSON."""
    ratios = {}
    for reading in READINGS:
        ratios[f"tau_{reading}"] = [result.tau(reading)]
        ratios[f"n_alpha_{reading}"] = [result.n_alpha(reading, n) for n in range(result.depth)]
    flat = [one for several in ratios.values() for one in several]
    draw = torch.Generator().manual_seed(0)
    made = iter(ratio_intervals([one.above for one in flat], [one.below for one in flat], draw))
    values = {name: [_rounded(next(made)) for _ in several] for name, several in ratios.items()}
    return {name: several if name.startswith("n_alpha") else several[0] for name, several in values.items()}


def _rounded(value: Interval) -> dict[str, float | None]:
    return {name: None if math.isnan(number) else round(number, 6) for name, number in asdict(value).items()}


# -------------------------------------------------------------------------------------------------------------- files


def place(ablation: Ablation, cell: Cell) -> Path:
    """Return where the result of a cell lies or will."""
    return ablation.folder / RESULTS / f"{cell.title}.json"


def write(path: Path, result: Result) -> None:
    """Write a result whole or not at all, a line a key and a line a conversation. Raises UserError where that cannot be
    written."""
    told = {"format": FORMAT, **asdict(result)}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result.conversations.items())
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in told.items() if name != "conversations"]
    text = "{\n" + ",\n".join([*lines, f' "conversations": {{\n{rows}\n }}']) + "\n}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room, or make the folder writable"
        ) from None


def read(path: Path) -> Result:
    """Read a result. Raises UserError for a file that is none, or of a later format."""
    try:
        told = json.loads(path.read_text("utf-8"))
        if told["format"] > FORMAT:
            raise UserError(f"{label(path)}: is of format {told['format']}, this version reads {FORMAT}; update it")
        result = Result(**{name: value for name, value in told.items() if name != "format"})
        if not result.conversations or {len(row) for row in result.conversations.values()} != {4 * result.depth + 4}:
            raise ValueError("rows of conversations")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{label(path)}: is no result ({said}); remove it, and its cell is run again") from None
    return result


def find(ablation: Ablation, cell: Cell) -> Result | None:
    """Return the result of a cell; None where it has none yet. Raises UserError for a file of another configuration."""
    path = place(ablation, cell)
    if not path.is_file():
        return None
    result = read(path)
    if result.key != cell.key:
        why = first_difference(cell_options(cell.config), result.configuration)
        raise UserError(
            f"{label(path)}: is of another configuration ({why or 'another version of keys'}); remove it to run the "
            "cell, or change the cell back"
        )
    return result


def found(ablation: Ablation) -> dict[str, Result]:
    """Return the results that there are, by their cells' titles. Raises UserError as `find`."""
    pairs = ((cell.title, find(ablation, cell)) for cell in ablation.cells)
    return {title: result for title, result in pairs if result is not None}


def of_a_sibling(ablation: Ablation, cell: Cell) -> tuple[Path, Result] | None:
    """Return the result of the same configuration that another cell has, of this ablation or of one beside it, and
    where it lies; None where there is none."""
    for path in _all_results(ablation.folder):
        if cell.key in path.read_text("utf-8", errors="replace")[:400]:
            result = read(path)
            if result.key == cell.key:
                return path, result
    return None


def _all_results(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.resolve().parent.glob(f"*/{RESULTS}/*.json"))


def strangers(ablation: Ablation) -> Sequence[Path]:
    """Return the files among the results that belong to no cell."""
    known = {place(ablation, cell).name for cell in ablation.cells}
    return [path for path in sorted((ablation.folder / RESULTS).glob("*.json")) if path.name not in known]
