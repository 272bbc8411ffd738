"""Prompts out of a Hugging Face data set: a hub's by name, or a local copy. Remote code is never run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3_lab.data.fields import Fields
from eagle3_lab.data.prompts import NOT_STATED, Desk, Prompts, Talk
from eagle3_lab.errors import UserError, near
from eagle3_lab.paths import local_path


class HubPrompts(Prompts):
    """A data set of the Hugging Face hub, or a folder on disk: one that `save_to_disk` wrote, or data files.

    Args:
        name: the hub's name (``openai/gsm8k``), or a local folder.
        fields: which columns become turns.
        split: of the set.
        config: of the set, where it has several.
        revision: a branch, tag or commit of the set on the hub; with a commit, the same prompts for good.
        source: what its conversations are called; null: the name, of a local folder without what is above it.
        licence: the terms of the texts, for manifests and cards.
        limit: only the first so many conversations.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(
        self,
        name: str,
        fields: Fields,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        source: str | None = None,
        licence: str = NOT_STATED,
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be >= 1 or null, got {limit}")
        self.name, self.fields, self.split, self.config, self.revision = name, fields, split, config, revision
        self.licence, self.limit, self._source = licence, limit, source

    @property
    def source(self) -> str:
        """What its conversations are called."""
        return self._source or self._called

    @property
    def _called(self) -> str:
        """The name of the set, without the folders that a local one lies in: ids decide what is held out, and must not
        depend on where it lies."""
        folder = local_path(self.name)
        return folder.name if folder.is_dir() else self.name

    def talks(self, desk: Desk) -> Iterator[Talk]:
        rows, called, source = _rows(self.name, self.config, self.split, self.revision), self._called, self.source
        for number, row in enumerate(rows):
            if self.limit is not None and number == self.limit:
                desk.stop_at(self.limit, source)
                return
            if not isinstance(row, dict):
                raise UserError(f"{self.name}[{number}]: a {type(row).__name__}; a row of named columns is needed")
            place = f"{self.name}[{number}]"
            name = self.fields.name(row, place, f"{called}[{number}]")
            yield Talk(name, tuple(self.fields.turns(row, place)), source, self.fields.tools(row))

    def identity(self) -> dict[str, Any]:
        named = {"name": self._called, "config": self.config, "split": self.split, "revision": self.revision}
        folder = local_path(self.name)
        if folder.is_dir():
            named |= {"files": _folder_hash(folder)}
        return named | {"fields": asdict(self.fields), "source": self.source, "limit": self.limit}

    def licences(self) -> dict[str, str]:
        return {self.source: self.licence}


def _rows(name: str, config: str | None, split: str, revision: str | None) -> Iterable[Any]:
    what = f"HubPrompts.name: {name!r} cannot be loaded"
    otherwise = "a set of the hub, or a folder with its data files, is needed"
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise UserError(f"{what}: the package datasets is not installed; PromptFiles reads local files") from None
    folder = local_path(name)
    datasets.disable_progress_bars()
    try:
        if folder.is_dir() and any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(folder))
            if not isinstance(loaded, datasets.DatasetDict):
                return loaded
            if split not in loaded:
                raise UserError(f"HubPrompts.split: {name} has no split {split!r}{near(split, map(str, loaded))}")
            return loaded[split]
        source = str(folder) if folder.is_dir() else name
        return datasets.load_dataset(source, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, TypeError, DatasetsError) as error:
        raise UserError(f"{what} ({' '.join(str(error).split())[:160]}); {otherwise}") from None


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
