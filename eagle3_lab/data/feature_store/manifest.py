"""What a feature store says of itself: whose states it holds, of what text, in which shards.

Knows no tensors' values, no target and no trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from eagle3_lab.errors import UserError
from eagle3_lab.system.files import write_atomic

FORMAT = 1
MANIFEST = "manifest.json"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

SUMMARY_BYTES = 8
"""Of a token: its arg-max and its log-normaliser."""


@dataclass(frozen=True)
class Contents:
    """What a store holds, of whom, and of what text. ``layers`` ascend; ``target_dtype`` is what the target ran in,
    ``dtype`` what its states are kept in; ``data`` is the identity of the documents in their order."""

    target: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    target_dtype: str
    dtype: str
    data: str
    layers: tuple[int, ...]
    width: int
    documents: int
    tokens: int
    format: int = FORMAT
    settings_hash: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """What states are kept in."""
        return DTYPES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: its states and its logits' summary."""
        return len(self.layers) * self.width * self.torch_dtype.itemsize + SUMMARY_BYTES

    @property
    def bytes(self) -> int:
        """What the store takes on disk, but for a fraction of a percent."""
        return self.tokens * self.token_bytes

    @property
    def digest(self) -> str:
        """Identity of a store: what each of its shards carries."""
        return _digest(self._said())

    @property
    def key(self) -> str:
        """Identity of what a store is made of, whatever layers it holds."""
        return _digest({name: value for name, value in self._said().items() if name not in ("layers", "target")})

    def _said(self) -> dict[str, object]:
        """All fields; settings that are not known are left out, as they were before there were any."""
        return {name: value for name, value in asdict(self).items() if value != "" or name != "settings_hash"}

    def differs(self, wanted: Contents) -> str:
        """Why this is not what is ``wanted``, or "". More layers than wanted are no difference."""
        for what, mine, theirs in (
            ("in format", self.format, wanted.format),
            ("of a target with weights hash", self.weights_hash, wanted.weights_hash),
            ("of a target whose config.json has hash", self.settings_hash, wanted.settings_hash),
            ("of a tokenizer with hash", self.tokenizer_hash, wanted.tokenizer_hash),
            ("of a chat template with hash", self.template_hash, wanted.template_hash),
            ("of a target run in", self.target_dtype, wanted.target_dtype),
            ("kept in", self.dtype, wanted.dtype),
            ("of data with hash", self.data, wanted.data),
        ):
            if mine != theirs:
                return f"holds states {what} {mine}, needed is {theirs}"
        if missing := sorted(set(wanted.layers) - set(self.layers)):
            return f"holds hidden states {_listed(self.layers)}, needed is also {_listed(missing)}"
        return ""


@dataclass(frozen=True)
class Shard:
    """Some documents in one file. ``bytes`` is the file's size, None until the whole store is finished."""

    documents: int
    tokens: int
    bytes: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A store's contents and its shards, in order."""

    contents: Contents
    shards: tuple[Shard, ...]

    @staticmethod
    def plan(contents: Contents, lengths: Sequence[int], shard_bytes: int) -> Manifest:
        """Documents of these lengths in shards of about ``shard_bytes``, at least one document each."""
        room = max(1, shard_bytes // contents.token_bytes)
        shards: list[Shard] = []
        for length in lengths:
            last = shards[-1] if shards else None
            if last is not None and last.tokens + length <= room:
                shards[-1] = Shard(last.documents + 1, last.tokens + length)
            else:
                shards.append(Shard(1, length))
        return Manifest(contents, tuple(shards))

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest in a folder, None where there is none. Raises UserError for a broken or a newer one."""
        file = folder / MANIFEST
        if not file.is_file():
            return None
        try:
            said = json.loads(file.read_text())
            if (version := said["contents"]["format"]) != FORMAT:
                raise UserError(f"{file}: is of format {version}, this lab reads {FORMAT}; remove the folder")
            contents = Contents(**said["contents"] | {"layers": tuple(said["contents"]["layers"])})
            return Manifest(contents, tuple(Shard(**one) for one in said["shards"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}: is no manifest of a feature store ({error}); remove the folder") from None

    def write(self, folder: Path) -> None:
        """Into its folder, whole or not at all."""
        said = {"contents": asdict(self.contents), "shards": [asdict(one) for one in self.shards]}
        write_atomic(folder / MANIFEST, (json.dumps(said, indent=1) + "\n").encode())

    @property
    def finished(self) -> bool:
        """Whether every shard was there when this was written."""
        return all(one.bytes is not None for one in self.shards)

    def measured(self, folder: Path) -> Manifest:
        """With the sizes of the files that are there now."""
        sizes = [shard_file(folder, i).stat().st_size for i in range(len(self.shards))]
        return replace(self, shards=tuple(replace(s, bytes=n) for s, n in zip(self.shards, sizes, strict=True)))

    def spans(self) -> Iterator[range]:
        """The documents of each shard, by index."""
        ends = list(accumulate(one.documents for one in self.shards))
        yield from (range(end - one.documents, end) for one, end in zip(self.shards, ends, strict=True))


def shard_file(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{number:06d}.safetensors"


def refuse_other(folder: Path, found: Contents, wanted: Contents) -> None:
    """Raises UserError where a folder holds something else than what is wanted."""
    if what := found.differs(wanted):
        raise UserError(f"features.folder: {folder} {what}; name another folder, or null for one of its own")


def _digest(said: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
