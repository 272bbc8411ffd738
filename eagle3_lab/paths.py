"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

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
