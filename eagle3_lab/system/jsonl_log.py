"""Append logs: files of JSON lines that let a killed job continue after its last complete line.

A line that a kill or a power cut left incomplete is removed when the log is read; its record is computed again.
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
from eagle3_lab.system.files import file_lock

FLUSH_EVERY = 1.0  # seconds
ADVICE = "free space, or set EAGLE3_LAB_CACHE"


class JsonLines:
    """An append-only file of JSON lines.

    Args:
        path: of the file; it is created, with its folder, by the first `append`.
        advice: the end of an error's text: what the user should do where the file cannot be written.
    """

    def __init__(self, path: Path, advice: str) -> None:
        self.path = path
        self._advice = advice
        self._flushed = time.monotonic()

    def read(self, is_record: Callable[[Any], bool] = lambda value: True) -> list[Any]:
        """Return the records. A last line without its end, which a kill left, is removed from the file; so is the first
        line that is no record, with all lines behind it.

        Args:
            is_record: of the value of a complete line, or of its bytes where it is no JSON. By default every line is a
                record, so that the caller refuses what it cannot read, and no complete line is removed.

        Raises:
            UserError: the file cannot be read.
        """
        records: list[Any] = []
        size = 0
        try:
            data = self.path.read_bytes() if self.path.is_file() else b""
            for line in data.split(b"\n")[:-1]:  # not splitlines: a text may contain rarer line ends
                try:
                    value = json.loads(line)
                except ValueError:
                    value = line
                if not is_record(value):
                    break
                records.append(value)
                size += len(line) + 1
            if size < len(data):
                os.truncate(self.path, size)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); remove it to start anew") from None
        return records

    def append(self, record: object, flush: bool = True) -> None:
        """Append a record, which no kill removes. ``flush``: also write it to the disk now, so that no power cut
        removes it; otherwise at the latest by the first `append` a second later. Raises UserError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                if flush or time.monotonic() - self._flushed > FLUSH_EVERY:
                    os.fsync(file.fileno())
                    self._flushed = time.monotonic()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); {self._advice}") from None


class AppendLog:
    """The finished steps of one job, each a name and a JSON value. Created by `open_append_log`."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path, ADVICE)
        self._steps = {record["step"]: record["value"] for record in self._lines.read(_is_step)}

    def values(self, prefix: str) -> list[Any]:
        """Return the values of the finished steps whose names begin with ``prefix``."""
        return [value for name, value in self._steps.items() if name.startswith(prefix)]

    def get(self, name: str) -> Any:  # noqa: ANN401  JSON has no better type
        """Return the value of a finished step; None for a step that is not finished."""
        return self._steps.get(name)

    def step(self, name: str, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the value of a step: the logged one, else the result of ``compute``, which is then logged. One name
        always means the same value. Raises UserError where the file cannot be written."""
        if name not in self._steps:
            self._put(name, compute(), flush=True)
        return self._steps[name]

    def put(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Log the value of a step, which is not None. Raises UserError where the file cannot be written."""
        self._put(name, value, flush=False)

    def _put(self, name: str, value: Any, flush: bool) -> None:  # noqa: ANN401
        self._lines.append({"step": name, "value": value}, flush)
        self._steps[name] = value


def _is_step(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, dict) and isinstance(value.get("step"), str) and "value" in value


@contextmanager
def open_append_log(path: Path) -> Iterator[AppendLog]:
    """Open a job's append log, locked against other processes.

    Raises:
        UserError: the file cannot be written, or another process is doing the same job or has just finished it.
    """
    lock = path.with_name(f".{path.name}.lock")
    existed = path.exists()
    try:
        locked = file_lock(lock, f"{path}: another process is at the same work; wait for its end, or end it")
        finished = existed and not path.exists()  # the other process removed it before this one locked it
        if not finished:
            path.touch()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {ADVICE}") from None
    with locked:
        try:
            if finished:
                raise UserError(f"{path}: another process has just finished the same work; run again to use its result")
            yield AppendLog(path)
        finally:
            lock.unlink(missing_ok=True)  # while it is locked: afterwards it may be another process's
