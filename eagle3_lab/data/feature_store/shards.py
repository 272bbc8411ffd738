"""Shards on disk: the target's states and what its logits came to, token by token, memory-mapped.

A store is a folder: ``manifest.json`` says whose states these are and of what text, and each shard is a safetensors
file of some whole documents, one behind the other:

    state.I [tokens, Dt]   hidden state I, in the store's dtype
    argmax  [tokens]       int32: the target id of the largest logit
    log_sum [tokens]       float32: the log of the sum of the exponentials of the logits
    start   [documents+1]  where each document begins
    check   [documents, states + 2]  CRC-32 of each document's part of each tensor above, in that order

A shard is written beside its place, synced and renamed: an interrupted one is never found. What is read is checked.

Knows no target, no tokenizer and no trainer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float, Int, Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_lab.data.feature_store.manifest import Contents, Manifest, refuse_other, shard_file
from eagle3_lab.errors import UserError
from eagle3_lab.system.files import write_atomic


def write_shard(
    folder: Path,
    number: int,
    contents: Contents,
    lengths: Sequence[int],
    states: Mapping[int, Float[Tensor, "L Dt"]],
    argmax: Int[Tensor, " L"],
    log_sum: Float[Tensor, " L"],
) -> None:
    """Write one shard, whole or not at all: documents of these lengths, L tokens together."""
    rows = {_state(i): states[i].to(contents.torch_dtype) for i in contents.layers}
    rows |= {"argmax": argmax.int(), "log_sum": log_sum.float()}
    start = [0, *accumulate(lengths)]
    parts = [slice(low, high) for low, high in pairwise(start)]
    check = [[_crc(tensor[part]) for tensor in rows.values()] for part in parts]
    data = safetensors.torch.save(
        rows | {"start": torch.tensor(start), "check": torch.tensor(check)}, metadata={"contents": contents.digest}
    )
    write_atomic(shard_file(folder, number), data)


@dataclass(frozen=True)
class Kept:
    """One document in a store: hidden states by id, and what its L rows of logits came to."""

    states: Mapping[int, Float[Tensor, "L Dt"]]
    argmax: Int[Tensor, " L"]
    log_sum: Float[Tensor, " L"]


class Store:
    """A finished store, read document by document. Files are mapped when they are first asked for, and what is read is
    compared with its checksum: damage is told, not trained on. Several threads may read at once.

    Raises:
        UserError: no finished store in ``folder``, a shard that is missing or of another size, or contents other than
            ``wanted``, by name of what differs.
    """

    def __init__(self, folder: Path, wanted: Contents) -> None:
        manifest = Manifest.read(folder)
        if manifest is None or not manifest.finished:
            raise UserError(f"{folder}: no finished feature store; `fit` makes it")
        refuse_other(folder, manifest.contents, wanted)
        for number, one in enumerate(manifest.shards):
            file = shard_file(folder, number)
            size = file.stat().st_size if file.is_file() else 0
            if size != one.bytes:
                raise UserError(f"{file}: has {size} bytes, {one.bytes} were written; {_anew(folder)}")
        self.folder, self.manifest = folder, manifest
        self._place = [(number, i - span[0]) for number, span in enumerate(manifest.spans()) for i in span]
        self._open: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        """Documents."""
        return len(self._place)

    def document(self, index: int, layers: Sequence[int]) -> Kept:
        """One document's states and summary, views of the file. Raises UserError where the file is damaged."""
        number, within = self._place[index]
        shard = self._shard(number)
        low, high = shard["start"][within : within + 2].tolist()
        names = [*map(_state, self.manifest.contents.layers), "argmax", "log_sum"]

        def rows(name: str) -> Tensor:
            if name not in shard:
                raise UserError(f"{shard_file(self.folder, number)}: holds no {name}; {_anew(self.folder)}")
            part = shard[name][low:high]
            if _crc(part) != int(shard["check"][within, names.index(name)]):
                file = shard_file(self.folder, number)
                raise UserError(f"{file}: {name} of document {index} is damaged (checksum); {_anew(self.folder)}")
            return part

        return Kept({i: rows(_state(i)) for i in layers}, rows("argmax"), rows("log_sum"))

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            self._open[number] = read_shard(self.folder, number, self.manifest)
        return self._open[number]


def read_shard(folder: Path, number: int, manifest: Manifest) -> dict[str, Tensor]:
    """A shard's tensors, mapped from the file. Raises UserError for one that is cut short or of another store."""
    file = shard_file(folder, number)
    try:
        with safe_open(str(file), "pt") as opened:
            mine = (opened.metadata() or {}).get("contents") == manifest.contents.digest
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())}); {_anew(folder)}") from None
    one = manifest.shards[number]
    if not mine or tensors["start"].shape[0] != one.documents + 1 or int(tensors["start"][-1]) != one.tokens:
        raise UserError(f"{file}: belongs to another store than its manifest; {_anew(folder)}")
    return tensors


def _anew(folder: Path) -> str:
    return f"remove {folder} and run again to make it anew"


def _state(layer: int) -> str:
    return f"state.{layer}"


def _crc(tensor: Shaped[Tensor, "*any"]) -> int:
    """Of the bytes. numpy knows no bfloat16, so they are seen as integers of the same width."""
    words: Any = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return zlib.crc32(tensor.contiguous().view(words).numpy().data)
