"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
