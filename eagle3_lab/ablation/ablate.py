"""`ablate`: train and measure the cells of an ablation's folder, each once."""

from __future__ import annotations

import builtins
import sys

from eagle3_lab.ablation import decoding, results
from eagle3_lab.ablation.cell import run_cell
from eagle3_lab.ablation.page import show
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.ablation.schedule import Failure, Schedule, end_with_starter, failure, remember
from eagle3_lab.config.reading import label
from eagle3_lab.errors import UserError
from eagle3_lab.system.files import Busy


def ablate(
    ablation: Ablation,
    *,
    list: bool = False,
    cell: str | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    retry_failed: bool = False,
) -> None:
    """Train and measure every cell that has no result yet, in a process for each, and write its result into the folder.

    Args:
        ablation: the folder's.
        list: show the cells with their state, and stop.
        cell: run this one in this process: a cell's name with all its scales and seeds, one with its scale, one with
            its seed too, its number in the list, or ``decoding`` for what the ablation decodes.
        jobs: so many cells at a time.
        dry_run: show the hours, by a timed step, and the disk that what is left takes, and stop.
        retry_failed: run cells again that failed before.

    Raises:
        UserError: a mistake in the ablation, a result of another configuration, or cells that failed.
    """
    if jobs < 1:
        raise UserError(f"--jobs: must be >= 1, got {jobs}")
    for path in results.strangers(ablation):
        print(
            f"{label(path)}: belongs to no cell of {ablation.name}; remove it, or bring the cell back", file=sys.stderr
        )
    if list:
        print(_listed(ablation), end="")
        return
    if cell == decoding.TITLE and ablation.decode is not None:
        end_with_starter()
        decoding.decode(ablation)
        return
    if ablation.decode is not None:
        decoding.heads(ablation)  # refuses a head that is no cell, before hours of training
    chosen = builtins.list(ablation.cells) if cell is None else ablation.chosen(cell)
    left = [one for one in chosen if results.find(ablation, one) is None]
    if dry_run:
        from eagle3_lab.ablation.estimate import estimate

        print(estimate(ablation, left), end="")
    elif cell is not None:
        _here(ablation, chosen)
    else:
        _all(ablation, left, jobs, retry_failed)


def _here(ablation: Ablation, cells: builtins.list[Cell]) -> None:
    """Run cells one by one in this process, for whoever started it, such as a scheduler."""
    end_with_starter()
    for one in cells:
        try:
            result = run_cell(ablation, one)
        except UserError as error:
            remember(ablation, one, Failure(" ".join(str(error).split()), isinstance(error, Busy)))
            raise
        except Exception as error:
            remember(ablation, one, Failure(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
            raise
        remember(ablation, one, None)
        print(f"{one.title}: {_readings(result)}", flush=True)


def _all(ablation: Ablation, left: builtins.list[Cell], jobs: int, retry_failed: bool) -> None:
    """Run all that is left but for what failed before, and say what failed at the end."""
    failed = {one.title: said.error for one in left if (said := failure(ablation, one)) and not said.busy}
    skipped = {} if retry_failed else failed
    todo = [one for one in left if one.title not in skipped and results.of_a_sibling(ablation, one) is None]
    seeds = list(dict.fromkeys(one.seed for one in ablation.cells))
    todo.sort(key=lambda one: seeds.index(one.seed))  # all cells with one seed can be compared before the next seed
    schedule = Schedule(ablation, jobs)
    if todo:
        schedule.run(todo)
    for one in ablation.cells:
        if one not in todo and one.title not in skipped:
            run_cell(ablation, one)  # no training: the result is there, and is shown among this store's runs
    wrong = {**skipped, **schedule.failed}
    if ablation.decode is not None and not wrong and decoding.find(ablation, results.found(ablation)) is None:
        decoding.decode(ablation)
    print(_listed(ablation) + show(ablation), end="")
    if wrong:
        names = ", ".join(wrong)
        again = "; --retry-failed runs them again" if skipped else ""
        raise UserError(f"{ablation.name}: {len(wrong)} of {len(ablation.cells)} cells failed ({names}){again}")


def _listed(ablation: Ablation) -> str:
    lines = []
    for number, one in enumerate(ablation.cells, 1):
        lines.append((str(number), one.title, _state(ablation, one)))
    if ablation.decode is not None:
        there = decoding.find(ablation, results.found(ablation)) is not None
        lines.append(("", decoding.TITLE, "done" if there else "left"))
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "".join(f"{n:>{widths[0]}}  {title:<{widths[1]}}  {state}\n" for n, title, state in lines)


def _state(ablation: Ablation, cell: Cell) -> str:
    try:
        found = results.find(ablation, cell)
    except UserError as error:
        return str(error)
    if found is not None:
        return f"done: {_readings(found)}"
    if said := failure(ablation, cell):
        return "another process trains it" if said.busy else f"failed: {said.error}"
    return "left" if results.of_a_sibling(ablation, cell) is None else "left, and done in an ablation beside this one"


def _readings(result: results.Result) -> str:
    return f"tau {result.interval('tau_visited')}, of all anchors {result.interval('tau_all')}"
