"""The frozen target's features, made once and kept on disk: what an ablation's trainings then read instead of running
the target.

Features belong to documents, not to packed rows: a row sees its own document alone, so any packing, batch size, order
and rank finds them again. The store is keyed by everything that decides its content (target, text, formats), made
shard by shard, and goes on where a killed run left it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.data.documents import Document
from eagle3_lab.data.feature_store.manifest import MANIFEST, Contents, Manifest, refuse_other, shard_file
from eagle3_lab.data.feature_store.shards import read_shard, write_shard
from eagle3_lab.data.packing import PackedRows, Row, pack
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.system.files import bytes_text, local_path
from eagle3_lab.types import LogitSummary, Needs

SHARD_BYTES = 128 * 2**20
"""How much is made and written at once: what a killed run loses at most, and what it holds in memory."""

MOST_THREADS = 64
"""More read no faster, and each holds a batch."""


@dataclass(frozen=True)
class Features:
    """Keep the target's features on disk and train from there.

    Args:
        dtype: what states are kept in. Their arg-max and log-normaliser are exact (int32, float32) in any.
        layers: hidden states to keep beyond those that this experiment reads, so that others of an ablation read the
            same store; ids as in ``model.features``.
        folder: where the store lies or will; null: in the cache, by content, where one that holds more layers serves
            too.
        threads: batches that are read ahead while training goes on; 0: each when its turn comes.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    layers: list[int] = field(default_factory=list)
    folder: Path | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.layers and min(self.layers) < 0:
            raise ValueError(f"features.layers must be ids >= 0, got {self.layers}")
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"features.layers must differ from each other, got {self.layers}")
        if not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"features.threads must be within 0 .. {MOST_THREADS}, got {self.threads}")

    def contents(self, target: Target, needs: Needs, found: Sequence[Document], data: str) -> Contents:
        """What is to be kept of these documents, whose identity is ``data``. Raises UserError for a layer that the
        target has not."""
        spec = target.spec
        if self.layers and max(self.layers) > spec.layers:
            raise UserError(f"features.layers: {max(self.layers)}, but {spec.name} has hidden states 0..{spec.layers}")
        return Contents(
            target=spec.name,
            weights_hash=spec.weights_hash,
            tokenizer_hash=spec.tokenizer_hash,
            template_hash=spec.template_hash,
            target_dtype=str(target.dtype).removeprefix("torch."),
            dtype=self.dtype,
            data=data,
            layers=tuple(sorted({*needs.layers, *self.layers, spec.layers})),
            width=spec.hidden,
            documents=len(found),
            tokens=sum(map(len, found)),
            settings_hash=spec.settings_hash,
        )

    def place(self, contents: Contents, cache: Path) -> Path:
        """Where the store lies or will: the named folder, else a finished one below ``cache`` that holds what is asked
        for, else a new one there."""
        if self.folder is not None:
            return local_path(str(self.folder))
        for folder in sorted(cache.glob(f"{contents.key}-*"), key=lambda path: (len(path.name), path.name)):
            manifest = Manifest.read(folder)
            if manifest is not None and manifest.finished and not manifest.contents.differs(contents):
                return folder
        return cache / "-".join([contents.key, *map(str, contents.layers)])


class Making:
    """A store in the making, or made. ``contents`` is what is asked for; one that holds more layers in ``folder`` is
    taken as it is.

    Raises:
        UserError: another store in ``folder``, by name of what differs, or safetensors files that are of no store.
    """

    def __init__(
        self, folder: Path, contents: Contents, found: Sequence[Document], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.wanted, self._found = folder, contents, found
        manifest = Manifest.read(folder)
        if manifest is None:
            if next(folder.glob("*.safetensors"), None) is not None:
                raise UserError(
                    f"features.folder: {folder} has safetensors files, but {MANIFEST} is missing there, which "
                    "says what they hold; put it back, or name another folder"
                )
            manifest = Manifest.plan(contents, [len(one) for one in found], shard_bytes)
        refuse_other(folder, manifest.contents, contents)
        self.manifest = manifest

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.manifest.finished

    def tokens_left(self) -> int:
        """In shards that are not there yet."""
        shards = enumerate(self.manifest.shards)
        return sum(one.tokens for number, one in shards if not shard_file(self.folder, number).is_file())

    def make(
        self,
        target: Target,
        row_length: int,
        rows_per_batch: int,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Make what is missing, in rows of ``row_length`` tokens; ``on_tokens`` is told of each batch of them. Another
        process that makes the same store is waited for.

        Raises:
            UserError: a disk that is too small or cannot be written, or a state that the store's dtype cannot hold.
        """
        self._require_room()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock"):
                self.manifest = Manifest.read(self.folder) or self.manifest  # another process may have finished it
                if self.finished:
                    return
                for left in self.folder.glob(".*.safetensors-*"):  # what a kill interrupted
                    left.unlink()
                self.manifest.write(self.folder)
                for number, span in enumerate(self.manifest.spans()):
                    if shard_file(self.folder, number).is_file():
                        read_shard(self.folder, number, self.manifest)  # or raises: it is not what it should be
                        continue
                    some, contents = [self._found[i] for i in span], self.manifest.contents
                    made = _computed(target, some, contents, row_length, rows_per_batch, on_tokens)
                    write_shard(self.folder, number, contents, [len(one) for one in some], *made)
                self.manifest = self.manifest.measured(self.folder)
                self.manifest.write(self.folder)
        except OSError as error:
            raise UserError(
                f"{self.folder}: features cannot be written ({error.strerror}); finished shards are kept: make room or "
                "set features.folder to another disk"
            ) from None

    def _require_room(self) -> None:
        """Before the first byte."""
        needed = self.tokens_left() * self.manifest.contents.token_bytes
        there = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            raise UserError(
                f"{self.folder}: {bytes_text(free)} free, {bytes_text(needed)} needed for features of "
                f"{self.manifest.contents.tokens} tokens; free some, or set features.folder to another disk"
            )


def _computed(
    target: Target,
    some: Sequence[Document],
    contents: Contents,
    row_length: int,
    rows_per_batch: int,
    on_tokens: Callable[[int], None],
) -> tuple[dict[int, Float[Tensor, "L Dt"]], Int[Tensor, " L"], Float[Tensor, " L"]]:
    """States by id, arg-max and log-normaliser of these documents' L tokens, one document behind the other."""
    lengths = [len(one) for one in some]
    start, total = [0, *accumulate(lengths)], sum(lengths)
    dtype = contents.torch_dtype
    states = {i: torch.empty(total, contents.width, dtype=dtype) for i in contents.layers}
    argmax, log_sum = torch.empty(total, dtype=torch.int32), torch.empty(total)
    dataset, rows = PackedRows(some, row_length), pack(lengths, row_length)
    for at in range(0, len(rows), rows_per_batch):
        here: list[Row] = rows[at : at + rows_per_batch]
        batch = dataset[here].to(target.device)
        real = batch.document >= 0
        place = torch.cat([torch.arange(start[i], start[i + 1]) for row in here for i in row])  # as `real` is read
        out = target.features(batch, Needs(layers=contents.layers))
        for layer, tap in zip(contents.layers, out.taps, strict=True):
            states[layer][place] = _narrowed(tap[real], dtype, layer, contents).cpu()
        top = out.taps[-1][real]
        said = target.summary(top)
        if dtype != top.dtype:  # the normaliser is of the logits that the kept state gives, so that laws add up to 1
            kept = target.summary(top.to(dtype).to(top.dtype))
            said = LogitSummary(said.argmax, kept.log_sum)
        argmax[place], log_sum[place] = said.argmax.int().cpu(), said.log_sum.float().cpu()
        on_tokens(place.shape[0])
    return states, argmax, log_sum


def _narrowed(tap: Tensor, dtype: torch.dtype, layer: int, contents: Contents) -> Tensor:
    kept = tap.to(dtype)
    if bool((tap.isfinite() & ~kept.isfinite()).any()):
        raise UserError(
            f"features.dtype: {contents.dtype} cannot hold hidden state {layer} of {contents.target}, which reaches "
            f"{float(tap.abs().max()):.3g}; bfloat16 can"
        )
    return kept
