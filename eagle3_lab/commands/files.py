"""Files that verbs leave behind, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from eagle3_lab.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write beside the place and rename. Raises UserError where that cannot be written."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a place that can") from None
