"""JSON objects out of a local file, each with the place where it stands; every fault is one line that names it."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from eagle3_lab.errors import UserError, near
from eagle3_lab.paths import local_path

PACKAGE = "package:"
"""Before a name: a .jsonl or .jsonl.gz of the package's own resources, without its ending."""


def locate(path: str) -> Path:
    """The file that ``path`` names: a local one, or ``package:NAME``. Raises UserError where there is none."""
    if not path.strip():
        raise UserError(f"{path!r} names no file; a .jsonl, .jsonl.gz or .json file is needed")
    if not path.startswith(PACKAGE):
        file = local_path(path)
        if file.is_dir():
            raise UserError(f"{path}: is a folder; a .jsonl, .jsonl.gz or .json file is needed")
        if not file.is_file():
            raise UserError(f"no file {path}; a .jsonl, .jsonl.gz or .json file, or 'package:conversations'")
        return file
    name = path.removeprefix(PACKAGE)
    folder = Path(str(resources.files("eagle3_lab") / "resources"))
    files = {file.name.partition(".jsonl")[0]: file for file in folder.glob("*.jsonl*")}
    if name not in files:
        raise UserError(f"{path}: the package has no {name!r}{near(name, files)}")
    return files[name]


def file_hash(path: str) -> str:
    """Identity of a file's bytes."""
    with locate(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a .jsonl (blank lines skipped) or of a .json array, each with its place ``path:line``,
    the path as it was given.

    Files ending in ``.gz`` are unpacked; a byte order mark is skipped.

    Raises:
        UserError: ``path:line: what is wrong; what would be right``.
    """
    file = locate(path)
    called = file.name if path.startswith(PACKAGE) else path
    count = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                place = f"{called}:{number}"
                text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, place)
                if count == 0 and text.lstrip().startswith("["):
                    yield from _array(text + _decode(stream.read(), place), called, number)
                    return
                if text.strip():
                    count += 1
                    yield place, _object(_parse(text, called, number), place)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{called}: cannot be unpacked ({error}); a whole gzip file is needed") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); a file that can is needed") from None
    if count == 0:
        raise UserError(f"{called}: empty; one JSON object a line is needed")


def without_folders(place: str) -> str:
    """A place as ``file:line``: what a record without an id is called, wherever its file lies."""
    return place.rpartition("/")[2]


def name_of(values: Iterable[object], otherwise: str) -> str:
    """Return the first of ``values`` that can name a record: a text that is not blank, or a number. null, true, false,
    "", a list and an object name nothing, so that they never give one name to many records; then ``otherwise``."""
    for value in values:
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
    return otherwise


class Names:
    """Gives every record a name of its own: the second of one name becomes ``NAME~2``."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._numbers: dict[str, int] = {}

    def once(self, name: str) -> str:
        """Return ``name``, with a number behind it where it was given before."""
        number = self._numbers.get(name, 1)
        fresh = name if number == 1 else f"{name}~{number}"
        while fresh in self._given:
            number += 1
            fresh = f"{name}~{number}"
        self._given.add(fresh)
        self._numbers[name] = number + 1
        return fresh


def say(value: object) -> str:
    """A JSON value in few words, for messages."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def names(keys: Iterable[object]) -> str:
    """Keys in a row, for messages."""
    return ", ".join(sorted(json.dumps(str(key))[1:-1][:40] for key in keys)) or "none"


def whole_characters(text: str) -> bool:
    """Whether ``text`` can be written down (JSON can carry half a surrogate pair, which no tokenizer takes)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _array(text: str, name: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, value in enumerate(_parse(text, name, number)):
        yield f"{name}[{i}]", _object(value, f"{name}[{i}]")


def _parse(text: str, name: str, number: int) -> Any:  # noqa: ANN401  JSON has no better type
    """The value of ``text``, which begins in line ``number``."""
    text = text.rstrip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = number + text.count("\n", 0, error.pos)
        fault = f"broken JSON ({error.msg}, column {error.colno})"
        raise UserError(f"{name}:{line}: {fault}; valid JSON is needed") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{name}:{number}: {str(error).partition(':')[0]}; shorter numbers are needed") from None
    except RecursionError:
        raise UserError(f"{name}:{number}: nested too deeply; a flat JSON object is needed") from None


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place}: {say(value)}; a JSON object is needed")
    return value


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise UserError(f"{place}: not UTF-8; the file has to be saved as UTF-8") from None
