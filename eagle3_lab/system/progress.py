"""Progress of a command's stages: units done, rate, time left, budget, and at the end the time that it took.

Written to stderr: on a terminal one line that is updated in place, elsewhere (a log file, CI) a line every 5 seconds.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOBase
from typing import TextIO

from eagle3_lab.system import distributed

Out = TextIO | TextIOBase  # to the type checker sys.stderr is the first, at run time it is the second

TERMINAL_EVERY, LOG_EVERY = 0.1, 5.0


class _NoOutput(TextIOBase):
    def write(self, text: str) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(text)


class Stage:
    """A stage that is running. Created by :func:`stage`."""

    def __init__(
        self,
        name: str,
        unit: str,
        total: int | None,
        budget_s: int | float | None,
        out: Out,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.unit, self.total, self.budget_s = name, unit, total, budget_s
        self.done = self._begun = 0
        self._extra: dict[str, int] = {}
        self._reused = False
        self._out, self._clock = out, clock
        self._terminal = out.isatty()
        self._started = self._shown = clock()

    @property
    def seconds(self) -> float:
        """Return the seconds since the stage began."""
        return self._clock() - self._started

    def advance(self, n: int = 1, **extra: int) -> None:
        """Count ``n`` more units as done, and more of other units by name, e.g. ``tokens=512``."""
        self.done += n
        for unit, count in extra.items():
            self._extra[unit] = self._extra.get(unit, 0) + count
        if self._clock() - self._shown >= (TERMINAL_EVERY if self._terminal else LOG_EVERY):
            self._show()

    def note(self, text: str) -> None:
        """Write a line of its own."""
        self._write(f"{self.name}: {text}", last=True)

    def begin_at(self, done: int, total: int) -> None:
        """Set the units that were done before this stage began, as in a run that is continued, and the total. The rate
        and the time left count later units alone."""
        self.done = self._begun = done
        self.total = total

    def reused(self) -> None:
        """Report at the end that the stage's result already existed and was used."""
        self._reused = True

    def _show(self) -> None:
        self._shown = self._clock()
        of = "" if self.total is None else f"/{self.total}"
        parts = [f"{self.name}: {self.done}{of} {self.unit}", *self._rates(), *self._left()]
        self._write(", ".join(parts), last=False)

    def _rates(self) -> list[str]:
        """Return the rates of the other units if any are counted, else the rate of the stage's own unit."""
        seconds = self.seconds
        if self.total == 1:
            return []
        counts = self._extra or {self.unit: self.done - self._begun}
        return [f"{rate(count, seconds)} {unit}/s" for unit, count in counts.items() if count and seconds > 0]

    def _left(self) -> list[str]:
        budget = [] if self.budget_s is None else [f"budget {duration(self.budget_s)}"]
        done_now = self.done - self._begun
        if not done_now or self.total is None or self.done >= self.total:
            return budget
        return [f"{duration(self.seconds / done_now * (self.total - self.done))} left", *budget]

    def _write(self, line: str, last: bool) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r\x1b[K{line if last else line[:width]}{chr(10) if last else ''}")
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def _close(self, failed: bool) -> None:
        if failed:
            of = "" if self.total is None else f" of {self.total}"
            self._write(
                f"{self.name}: stopped at {self.done}{of} {self.unit} after {duration(self.seconds)}", last=True
            )
        elif self._reused:
            self._write(f"{self.name}: reused (unchanged)", last=True)
        else:
            parts = [f"{self.name}: {self.done} {self.unit} in {duration(self.seconds)}{self._compared()}"]
            self._write(", ".join(parts + self._rates()), last=True)

    def _compared(self) -> str:
        if self.budget_s is None:
            return ""
        over = "over its " if self.seconds > self.budget_s else ""
        return f" ({over}budget {duration(self.budget_s)})"


@contextmanager
def stage(
    name: str,
    unit: str = "steps",
    total: int | None = None,
    budget_s: int | float | None = None,
    out: Out | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Stage]:
    """Report the progress of a stage until the end of the ``with`` statement, also where it fails.

        with stage("answers", "prompts", total=32, budget_s=120) as s:
            for prompt in prompts:
                s.advance(1, tokens=answer(prompt))

        answers: 12/32 prompts, 31 tokens/s, 30 s left, budget 2 min 0 s
        answers: 32 prompts in 48 s (budget 2 min 0 s), 31 tokens/s

    Args:
        name: of the stage.
        unit: what ``advance`` counts.
        total: number of units, if it is known.
        budget_s: seconds that the stage should take; only reported, nothing is stopped.
        out: by default stderr; in all processes of a training but the first, nothing is written.
        clock: returns seconds that never decrease.
    """
    default: Out = sys.stderr if distributed.is_first() else _NoOutput()
    running = Stage(name, unit, total, budget_s, out or default, clock)
    running._show()
    try:
        yield running
    except BaseException:
        running._close(failed=True)
        raise
    running._close(failed=False)


def rate(count: int, seconds: float) -> str:
    """Return a count per second as text: 0.42, 3.1, 31, 1235."""
    value = count / seconds
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def duration(seconds: int | float) -> str:
    """Return seconds as text: 0.4 s, 48 s, 2 min 10 s, 1 h 23 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
