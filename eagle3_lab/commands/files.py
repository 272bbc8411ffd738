"""Files that verbs leave behind, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from eagle3_lab.errors import UserError
from eagle3_lab.whole import write_whole


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
