"""What a long job has finished, step by step, on disk: killed at any moment, it goes on behind its last whole step.

One JSON line a step, `{"step": NAME, "value": ...}`, written before the next one begins, so that no kill takes it back;
and flushed to the disk, once a second where steps follow each other fast, so that a power cut takes no more than that.
A line that was left unfinished is taken from the file; whoever asks for its step makes it again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_lab.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows: there, two jobs on one file are not noticed
    fcntl = None

FLUSH_EVERY = 1.0  # seconds


class Journal:
    """The steps that are finished, by name. Made by :func:`journal`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._flushed = time.monotonic()
        self._steps = _whole_lines(path)
        os.lseek(descriptor, 0, os.SEEK_END)

    def known(self, prefix: str) -> list[Any]:
        """The values of the finished steps whose names begin so."""
        return [value for name, value in self._steps.items() if name.startswith(prefix)]

    def step(self, name: str, make: Callable[[], Any]) -> Any:  # noqa: ANN401  JSON has no better type
        """The value of a step: what is written down, else what ``make`` gives now, written down.

        ``name`` names one step of one job for good: the same name must always mean the same value.

        Raises:
            UserError: the file cannot be written.
        """
        if name not in self._steps:
            self.put(name, make())
            self._flush()
        return self._steps[name]

    def found(self, name: str) -> Any:  # noqa: ANN401
        """The value of a finished step; None where it is not finished."""
        return self._steps.get(name)

    def put(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Write down a step's value, which is not None.

        Raises:
            UserError: the file cannot be written.
        """
        line = (json.dumps({"step": name, "value": value}, ensure_ascii=False) + "\n").encode()
        try:
            while line:  # a write to a disk that is nearly full may take a part only
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise _unwritable(self._path, error) from None
        self._steps[name] = value
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._flush()

    def _flush(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        self._flushed = time.monotonic()


@contextmanager
def journal(path: Path) -> Iterator[Journal]:
    """Open a job's journal, alone.

    Raises:
        UserError: the file cannot be written, or another process is at the same job.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{path}: another process is at the same work; wait for it, or stop it") from None
        if not path.exists():  # between our opening it and locking it, another process finished and removed it
            raise UserError(f"{path}: another process has just finished the same work; run again to go on with it")
        yield Journal(path, descriptor)
    finally:
        os.close(descriptor)


def _whole_lines(path: Path) -> dict[str, Any]:
    """The finished steps; what stands behind them is taken from the file."""
    found: dict[str, Any] = {}
    size = 0
    data = path.read_bytes()
    for line in data.split(b"\n")[:-1]:  # not splitlines: a text may hold rarer line ends
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), str) or "value" not in record:
            break  # no line of ours
        found[record["step"]] = record["value"]
        size += len(line) + 1
    if size < len(data):
        os.truncate(path, size)
    return found


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); free space, or set EAGLE3_LAB_CACHE")
