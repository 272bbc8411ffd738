"""Files that verbs leave behind, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eagle3_lab.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write beside the place, sync and rename; what a link points to is written in its place, and into a device or a
    pipe (``/dev/stdout``) the text simply goes. Raises UserError where that cannot be written."""
    try:
        if path.exists() and (not path.is_file() or path.absolute().is_relative_to("/dev")):
            with path.open("a") as stream:  # behind what stands there, if stdout is a file; a folder is refused here
                stream.write(text)
            return
        place = path.resolve()
        temporary = place.with_name(f".{place.name}-{os.getpid()}")
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a place that can") from None


def require_place(path: Path | None, option: str) -> None:
    """Tell before hours of work that a file could not be written after them. Raises UserError."""
    if path is None:
        return
    around = path.absolute().parent
    while not around.exists():
        around = around.parent
    if path.is_dir() or not os.access(path if path.exists() else around, os.W_OK):
        raise UserError(f"{option}: {path} cannot be written; name a file that can")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; empty where there is none or what is there is none (a disk that failed)."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
