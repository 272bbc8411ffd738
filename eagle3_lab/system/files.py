"""Files: paths as users write them, atomic writes, a lock that one process holds, and the files that commands write."""

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
    """Bytes in the unit that leaves one to three digits before the point.

    >>> bytes_text(0), bytes_text(999_999), bytes_text(2.5e9)
    ('0 B', '1.0 MB', '2.5 GB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def local_path(text: str) -> Path:
    """A path with ``~`` resolved, whether or not something is there. Raises UserError for what can be no path here."""
    try:
        path = Path(text).expanduser()
        path.exists()
        if "\0" in text:  # which `exists` takes for a file that is not there
            raise ValueError("a null character")
    except (RuntimeError, OSError, ValueError) as error:  # no such home; a name too long
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{text[:80]}: is no path here ({said}); write one that can be opened") from None
    return path


def is_file(path: Path) -> bool:
    """Whether a file is there: none is under a name that no file system takes."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is there, as :func:`is_file`."""
    try:
        return path.is_dir()
    except OSError:
        return False


@contextmanager
def replaced(place: Path) -> Iterator[BinaryIO]:
    """A file beside ``place`` to be written within; behind it synced and renamed, so that what is found under its name
    is whole. Nothing half-written is left, but by a process that is killed outright: `remove_leftovers`. Raises
    OSError."""
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(place: Path, data: bytes) -> None:
    """Write a file as `replaced` does. Raises OSError, and leaves nothing half-written then."""
    with replaced(place) as file:
        file.write(data)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in ``folder``. Only for the one process that writes there."""
    for leftover in folder.glob(".*-*"):
        with suppress(OSError):  # a disk that cannot be written says so where something is to be written
            leftover.unlink()


class Busy(UserError):
    """Another process holds what this one needs."""


def hold(lock: Path, busy: str) -> AbstractContextManager[object]:
    """Take a lock, its folder made where it is missing, and let go of it behind the `with` that this is for.

    Raises:
        Busy: with the text ``busy``, where another process holds it.
        OSError: it cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise Busy(busy) from None


def write_text(path: Path, text: str) -> None:
    """Write beside the place, sync and rename; what a link points to is written in its place, and into a device or a
    pipe (``/dev/stdout``) the text simply goes. Raises UserError where that cannot be written."""
    try:
        if path.exists() and not _is_replaced(path):
            with path.open("a") as stream:  # behind what stands there, if stdout is a file; a folder is refused here
                stream.write(text)
            return
        place = path.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a place that can") from None


def require_place(path: Path | None, option: str) -> None:
    """Tell before hours of work that a file could not be written after them, as :func:`write_text` would: by making
    one beside it that leaves no trace. Raises UserError."""
    if path is None:
        return
    try:
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise UserError(f"{option}: {path} cannot be written; name a file that can")
        if path.exists() and not _is_replaced(path):
            return
        around = path.resolve().parent
        while not around.exists():
            around = around.parent
        with tempfile.TemporaryFile(dir=around):  # also refused where there is no folder, or none that takes files
            pass
    except (OSError, RuntimeError) as error:  # the second from links in a circle
        reason = error.strerror if isinstance(error, OSError) else "links in a circle"
        raise UserError(f"{option}: {path} cannot be written ({reason}); name a file that can") from None


def _is_replaced(path: Path) -> bool:
    """Whether what is there is put out of its place by a new file: a file is, a device or a pipe is written into."""
    return path.is_file() and not path.absolute().is_relative_to("/dev")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; empty where there is none or what is there is none (a disk that failed)."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
