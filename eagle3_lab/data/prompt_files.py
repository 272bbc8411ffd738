"""Prompts out of local files: one, or all of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3_lab.data.fields import Fields
from eagle3_lab.data.prompts import NOT_STATED, Desk, Prompts, Talk
from eagle3_lab.data.records import PACKAGE, file_hash, records, without_folders
from eagle3_lab.errors import UserError
from eagle3_lab.paths import local_path

ENDINGS = (".jsonl", ".jsonl.gz", ".json")

BESIDE = (".manifest.json", ".card.json")
"""What `prepare` writes beside its conversations: no prompts."""


class PromptFiles(Prompts):
    """JSONL or JSON of messages, ShareGPT or turns, told apart record by record.

    Args:
        path: a .jsonl, .jsonl.gz or .json, a folder of them (read in the order of their names, subfolders included),
            or ``package:NAME``.
        fields: which keys become turns, for records of another form.
        source: what its conversations are called; null: the file's or folder's name.
        licence: the terms of the texts, for manifests and cards.
        limit: only the first so many conversations.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(
        self,
        path: str,
        fields: Fields | None = None,
        source: str | None = None,
        licence: str = NOT_STATED,
        limit: int | None = None,
    ) -> None:
        if not path.strip():
            raise ValueError(f"path must name a file or a folder, got {path!r}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be >= 1 or null, got {limit}")
        self.path, self.fields, self.licence, self.limit = path, fields or Fields(), licence, limit
        self.source = source or Path(path.removeprefix(PACKAGE)).name.partition(".")[0] or path

    def talks(self, desk: Desk) -> Iterator[Talk]:
        count = 0
        for file in self._files():
            for place, record in records(file):
                if self.limit is not None and count == self.limit:
                    desk.stop_at(self.limit, self.source)
                    return
                count += 1
                turns, name = self.fields.turns(record, place), self.fields.name(record, place, without_folders(place))
                yield Talk(name, tuple(turns), self.source, self.fields.tools(record))

    def identity(self) -> dict[str, Any]:
        hashes = [file_hash(file) for file in self._files()]
        return {"files": hashes, "fields": asdict(self.fields), "source": self.source, "limit": self.limit}

    def licences(self) -> dict[str, str]:
        return {self.source: self.licence}

    def _files(self) -> list[str]:
        if self.path.startswith(PACKAGE) or not (folder := local_path(self.path)).is_dir():
            return [self.path]
        found = sorted(
            str(file)
            for file in folder.rglob("*")
            if file.name.endswith(ENDINGS) and not file.name.endswith(BESIDE) and file.is_file()
        )
        if not found:
            raise UserError(f"{self.path}: no {', '.join(ENDINGS)} in this folder; one is needed")
        return found
