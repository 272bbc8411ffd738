"""An ablation in MLflow: one parent run, below it a run for each cell with what is compared as its own metrics."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.ablation.results import ALL, READINGS, Result
from eagle3_lab.evaluation.bootstrap import Interval
from eagle3_lab.experiment import Experiment
from eagle3_lab.tracking.provenance import git_state
from eagle3_lab.tracking.run import Run, find_run, open_run, ui_command

ABLATION, CELL, KEY, LOGGED = "ablation", "cell", "cell_key", "result"
"""Tags: of the parent and its cells; the cell's name; its configuration; set once the result is logged."""

VIEW = "cells"

COLUMNS = ("tau", "tau_low", "tau_high", "tau_all", "n_alpha_0")
"""Metrics that the view of the cells has as columns."""


def parent_run(ablation: Ablation) -> Run:
    """Return the run of an ablation, made where this store has none yet. Raises UserError where the store cannot be
    written."""
    tracking, known_by = ablation.tracking, {ABLATION: ablation.name, "kind": "ablation"}
    work = tracking.folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work / f"{ablation.name}.parent.lock"):  # cells that a scheduler starts together make one parent
        run_id = find_run(tracking, known_by)
        run = open_run(tracking, run_id, known_by | {"mlflow.runName": ablation.name})
    if run_id is None:
        run.describe(ablation.question.question)
    return run


def cell_run(parent: Run, ablation: Ablation, cell: Cell, tags: Mapping[str, str]) -> Run:
    """Return the run of a cell below its ablation's, made where there is none yet."""
    own = {ABLATION: ablation.name, CELL: cell.label, "kind": "cell", "seed": str(cell.seed), "scale": str(cell.scale)}
    return parent.continued_child(cell.title, {**tags, **cell.settings, **own}, {KEY: cell.key})


def log_result(run: Run, result: Result) -> None:
    """Log what a cell gave as metrics of its run: ``tau`` and ``n_alpha_0`` .. of the visited anchors, which are a
    chain decoder's, ``tau_all`` .. of all anchors, each with its bounds; once."""
    if run.tags().get(LOGGED) == result.key:
        return
    metrics: dict[str, float] = {}
    for reading in READINGS:
        end = "_all" if reading == ALL else ""
        metrics |= _bounded(f"tau{end}", result.interval(f"tau_{reading}"))
        for n in range(result.depth):
            metrics |= _bounded(f"n_alpha_{n}{end}", result.interval(f"n_alpha_{reading}", n))
    metrics |= {name: value for name, value in result.values.items() if isinstance(value, int | float)}
    run.log_metrics({name: value for name, value in metrics.items() if not math.isnan(value)})
    run.set_tags({LOGGED: result.key})


def log_reused(parent: Run, ablation: Ablation, cell: Cell, result: Result, experiment: Experiment) -> None:
    """Show a result that was there already, such as one of a fresh checkout, as a run of its cell."""
    with cell_run(parent, ablation, cell, {"reused": "true"}) as run:
        if run.tags().get(LOGGED) != result.key:
            run.log_params(experiment.choices())
            run.set_tags({f"of.{name}": str(value) for name, value in result.facts.items()})
            log_result(run, result)


def _bounded(name: str, value: Interval) -> dict[str, float]:
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def runs_address(ablation: Ablation, parent: Run) -> str:
    """Return the command that serves the runs, and the address that shows the cells, best first, with COLUMNS and
    the keys that vary as columns."""
    keys = [key for key in ablation.cells[0].settings if key != "data.seed"]
    columns = [f"metrics.`{name}`" for name in COLUMNS] + [f"tags.`{key}`" for key in keys]
    state = {
        "searchFilter": "tags.kind = 'cell'",
        "orderByKey": "metrics.`tau`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "runsHiddenMode": "SHOW_ALL",
    }
    address = parent.share_view(VIEW, state)
    return f"look: {shlex.join(ui_command(ablation.tracking.folder))}  then  {address}"


def commit() -> dict[str, str]:
    """Return the commit and whether the checkout is dirty, by their tags' names; nothing outside a checkout."""
    state = git_state(Path(__file__).parent)
    return {name.partition(".")[2]: value for name, value in state.items() if name.startswith("git.")}
