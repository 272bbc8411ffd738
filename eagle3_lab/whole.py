"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(place: Path, data: bytes) -> None:
    """Write beside the place, sync, rename: what is found under its name is whole. Raises OSError, and leaves nothing
    half-written then."""
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
