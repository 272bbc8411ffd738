"""Paths as users write them, atomic writes, file locks, and the files that commands write."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from eagle3_lab.errors import UserError


def bytes_text(count: int | float) -> str:
    """Return a number of bytes as text, in the unit that leaves one to three digits before the point.

    >>> bytes_text(0), bytes_text(999_999), bytes_text(2.5e9)
    ('0 B', '1.0 MB', '2.5 GB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def local_path(text: str) -> Path:
    """Return a path with ``~`` resolved, whether or not it exists. Raises UserError for a text that cannot be a path on
    this machine."""
    try:
        path = Path(text).expanduser()
        path.exists()
        if "\0" in text:  # `exists` returns False for such a text
            raise ValueError("a null character")
    except (RuntimeError, OSError, ValueError) as error:  # no such home; a name too long
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{text[:80]}: is no path here ({reason}); write one that can be opened") from None
    return path


def is_file(path: Path) -> bool:
    """Return whether the path is a file; False for a name that the file system does not allow."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder; False for a name that the file system does not allow."""
    try:
        return path.is_dir()
    except OSError:
        return False


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; at the end flush it to the disk and rename it to ``path``, so that the
    file of that name is always complete. After an error the temporary file is removed; after a kill it stays:
    `remove_leftovers`. Raises OSError."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file as `open_atomic` does. Raises OSError."""
    with open_atomic(path) as file:
        file.write(data)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes. Only for the one process that writes into ``folder``."""
    for leftover in folder.glob(".*-*"):
        with suppress(OSError):  # a disk that cannot be written raises at the next write
            leftover.unlink()


class Busy(UserError):
    """Another process has locked what this process needs."""


def file_lock(path: Path, busy: str) -> AbstractContextManager[object]:
    """Lock a file, which is created with its folder if missing, until the end of a ``with`` statement. The system
    unlocks it when the process ends, also after a kill.

    Raises:
        Busy: with the text ``busy``, where another process has locked it.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path).acquire(timeout=0)
    except Timeout:
        raise Busy(busy) from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. A link is followed; a device or a pipe (``/dev/stdout``) is appended to. Raises
    UserError where the file cannot be written."""
    try:
        if path.exists() and not _is_replaced(path):
            with path.open("a") as stream:  # appended, in case stdout is a file; a folder raises OSError
                stream.write(text)
            return
        place = path.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, text.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a file that can be written") from None


def require_place(path: Path | None, option: str) -> None:
    """Check before a long job that `write_text` could write ``path`` after it. Raises UserError that names the command
    line's ``option``."""
    if path is None:
        return
    try:
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise UserError(f"{option}: {path} cannot be written; name a file that can be written")
        if path.exists() and not _is_replaced(path):
            return
        folder = path.resolve().parent
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):  # raises OSError where no file can be created
            pass
    except (OSError, RuntimeError) as error:  # the second from links that form a circle
        reason = error.strerror if isinstance(error, OSError) else "links in a circle"
        raise UserError(f"{option}: {path} cannot be written ({reason}); name a file that can be written") from None


def _is_replaced(path: Path) -> bool:
    """Return whether writing replaces what exists at ``path``: True for a file, False for a device or a pipe."""
    return path.is_file() and not path.absolute().is_relative_to("/dev")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that this package wrote; {} where the file is missing or damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
