"""Work that one process at a time may do: a lock beside what is made, which ends with its process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3_lab.errors import UserError


def hold(lock: Path, busy: str) -> AbstractContextManager[object]:
    """Take a lock, its folder made where it is missing, and let go of it behind the `with` that this is for.

    Raises:
        UserError: ``busy``, where another process holds it.
        OSError: it cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise UserError(busy) from None
