"""Runs the cells of an ablation, each in a process of its own, so that one that fails or is killed ends alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_lab.ablation import results
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.config.reading import label
from eagle3_lab.system.files import read_object, write_text
from eagle3_lab.system.progress import Stage, stage

STARTED = "EAGLE3_LAB_STARTED_BY_ABLATE"
"""Set in a cell's process that ends with the one that started it."""

POLL_S, BUSY_S = 0.2, 5.0

INTERRUPTED = (130, 143)
"""Exit statuses of a cell's process that was interrupted or terminated, and has saved what it had."""


@dataclass(frozen=True)
class Failure:
    """Why a cell failed, in one line. ``busy``: another process trains it."""

    error: str
    busy: bool = False


def failure_file(ablation: Ablation, cell: Cell) -> Path:
    """Return where the failure of a cell is remembered, in the runs' folder: it is of this machine."""
    return ablation.tracking.folder / "work" / f"{ablation.name}.cells" / f"{cell.title}.failed.json"


def failure(ablation: Ablation, cell: Cell) -> Failure | None:
    """Return how the last try of this very cell failed; None where it did not."""
    told = read_object(failure_file(ablation, cell))
    return Failure(told["error"], told["busy"]) if told.get("key") == cell.key else None


def remember(ablation: Ablation, cell: Cell, failed: Failure | None) -> None:
    """Remember that a cell failed, or forget it."""
    path = failure_file(ablation, cell)
    if failed is None:
        path.unlink(missing_ok=True)
    else:
        write_text(path, json.dumps({"key": cell.key, "error": failed.error, "busy": failed.busy}) + "\n")


def steps_of(cell: Cell) -> int:
    """Return the optimizer steps of a cell, by which time left is reckoned; 1 where only its data tells."""
    trainer = cell.config.plain["trainer"] or {}
    return max(1, trainer.get("init_args", trainer).get("max_steps", 1))


@dataclass
class _Going:
    """A cell that runs now."""

    cell: Cell
    process: subprocess.Popen[bytes]
    log: Path | None


def cell_command(ablation: Ablation, cell: Cell) -> list[str]:
    """Return the command line that runs one cell of an ablation."""
    command = [sys.executable, "-m", "eagle3_lab", "ablate", str(ablation.folder), "--cell", cell.title]
    return [*command, *(f"--{key}={text}" for key, text in ablation.overrides)]


@dataclass
class Schedule:
    """Runs cells, ``jobs`` at a time, in their order, each by its ``command``."""

    ablation: Ablation
    jobs: int = 1
    command: Callable[[Ablation, Cell], list[str]] = cell_command
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells. One that fails is shown, and the others go on; one that another process trains is waited
        for. `failed` then has why, by the cells' titles."""
        left, going = list(cells), list[_Going]()
        waiting: dict[str, float] = {}
        with stage("ablation", "steps", sum(map(steps_of, cells))) as s:
            try:
                while left or going:
                    while left and len(going) < self.jobs:
                        ready = next((one for one in left if time.monotonic() >= waiting.get(one.title, 0)), None)
                        if ready is None:
                            break
                        left.remove(ready)
                        if results.find(self.ablation, ready) is not None:  # by the process that was waited for
                            s.advance(steps_of(ready))
                            continue
                        going.append(self._start(ready, len(cells) - len(left), len(cells)))
                    time.sleep(POLL_S)
                    for one in [one for one in going if one.process.poll() is not None]:
                        going.remove(one)
                        if self._ended(one, s):
                            waiting[one.cell.title] = time.monotonic() + BUSY_S
                            left.append(one.cell)
            finally:
                _end(going)

    def _start(self, cell: Cell, number: int, total: int) -> _Going:
        remember(self.ablation, cell, None)
        log = None
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ if self.jobs > 1 else dict(os.environ)
        where = ""
        if self.jobs > 1:
            log = failure_file(self.ablation, cell).with_name(f"{cell.title}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            where = f", log {label(log)}"
        print(f"cell {cell.title}: {number} of {total}{where}", file=sys.stderr, flush=True)
        with open(os.devnull if log is None else log, "ab") as out:
            process = subprocess.Popen(
                self.command(self.ablation, cell),
                stdin=subprocess.PIPE,
                stdout=None if log is None else out,
                stderr=None if log is None else out,
                env=environment | {STARTED: "1"},
            )
        return _Going(cell, process, log)

    def _ended(self, one: _Going, s: Stage) -> bool:
        """Note how a cell ended; returns whether it is to be tried again, since another process trains it."""
        code = _wait(one.process)
        found = failure(self.ablation, one.cell)
        if code == 0:
            s.advance(steps_of(one.cell))
            return False
        if found is not None and found.busy:
            return True
        if found is None:
            how = f"signal {-code}" if code < 0 else f"status {code}"
            found = Failure(f"its process ended with {how}{'' if one.log is None else f', see {label(one.log)}'}")
            if code not in INTERRUPTED:  # such a one goes on the next time
                remember(self.ablation, one.cell, found)
        self.failed[one.cell.title] = found.error
        print(f"cell {one.cell.title}: FAILED: {found.error}", file=sys.stderr, flush=True)
        return False


def _end(going: Sequence[_Going]) -> None:
    """Let the cells that run save what they have, and wait for them."""
    for one in going:
        one.process.terminate()
    for one in going:
        _wait(one.process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process and let go of its standard input; its exit status."""
    code = process.wait()
    assert process.stdin is not None
    process.stdin.close()
    return code


def end_with_starter() -> None:
    """In a cell's process: end as by SIGTERM, saving what was done, when the process that started it is gone, however
    it ended."""
    if os.environ.pop(STARTED, None) is None:
        return

    def watch() -> None:
        os.read(0, 1)  # ends when the other end of the pipe, which nobody writes into, is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
