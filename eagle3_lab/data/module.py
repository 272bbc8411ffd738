"""An experiment's conversations, ready to train on: the one object that a YAML's ``data:`` names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Conversation, Report, read_conversations
from eagle3_lab.data.document_cache import DocumentCache
from eagle3_lab.data.documents import Document, OverLength
from eagle3_lab.data.feature_store.rows import KeptRows, Reading
from eagle3_lab.data.generation.prepared_file import licences_of, stages_of
from eagle3_lab.data.overlap import Overlap
from eagle3_lab.data.packing import PackedRows, RowLoader, RowOrder, pack
from eagle3_lab.data.parts import NOT_THERE, divide, first_share
from eagle3_lab.data.records import file_hash, locate
from eagle3_lab.data.tasks import Prompt
from eagle3_lab.errors import UserError
from eagle3_lab.types import TargetSpec

_log = logging.getLogger(__name__)

PREPARED = "prepared"
"""A path that stands for what the experiment's `prepare` section makes."""


class ConversationData:
    """Conversations from one file: packed training rows, and greedy held-out rows for validation.

    Build it once with the target's chat and sizes; `eagle3_lab.training.module.Loaders` hands it to a trainer.

    Args:
        path: a .jsonl, .jsonl.gz or .json of conversations (see `conversations`), ``package:conversations``, or
            ``prepared``: what the experiment's ``prepare`` section makes.
        max_length: longest document in tokens.
        row_length: tokens a packed row has room for.
        rows_per_batch: rows of one batch, on each process.
        packed: several documents share a row; false: each has a row of its own, behind it padding.
        over_length: what is done with a longer conversation: ``cut`` it at ``max_length``, or ``drop`` it.
        held_out: greedy conversations that validate and never train: a number, a share of the greedy ones, or None:
            all that the file marks ``"split": "held_out"``, else a share of 0.05. 0: no validation.
        limit: train on at most so many conversations, chosen by their ids: a smaller limit's are among a larger one's.
        share: train on this share of the conversations, the first of one fixed order: a smaller share's are among a
            larger one's. Features are kept of all of them, so that every share reads one store.
        seed: of the training order. Neither ``limit``'s and ``share``'s choice nor the held-out ones depend on it.

    Attributes, once built:
        train, held_out: the documents, in a fixed order.
        reports: what was kept, shortened and dropped: in reading each file, in training, in holding out.
        hash: identity of all tokens and masks that train or are held out.
        kept_hash: the same of `all_documents`.
        reading: the store from which batches bring the target's features along; None: they bring none.
    """

    train: list[Document]
    held_out: list[Document]
    reports: list[Report]
    hash: str
    kept_hash: str
    reading: Reading | None

    def __init__(
        self,
        path: str = "package:conversations",
        max_length: int = 512,
        row_length: int = 1024,
        rows_per_batch: int = 1,
        packed: bool = True,
        over_length: OverLength = "cut",
        held_out: int | float | None = None,
        limit: int | None = None,
        share: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not path.strip():
            raise ValueError(f"path must name a .jsonl, .jsonl.gz or .json file, got {path!r}")
        if max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {max_length}")
        if row_length < max_length:
            raise ValueError(f"row_length must be at least max_length, {max_length}, got {row_length}")
        if rows_per_batch < 1:
            raise ValueError(f"rows_per_batch must be at least 1, got {rows_per_batch}")
        if held_out is not None and (held_out < 0 or (isinstance(held_out, float) and held_out >= 1)):
            raise ValueError(f"held_out must be a number from 0, a share in [0.0, 1.0), or null, got {held_out}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or null, got {limit}")
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be within 0 .. 2**63 - 1, got {seed}")
        self.path = path
        self.max_length = max_length
        self.row_length = row_length
        self.rows_per_batch = rows_per_batch
        self.packed = packed
        self.over_length: OverLength = over_length
        self.wanted = held_out
        self.limit = limit
        self.share = share
        self.seed = seed
        self.reading = None

    def build(
        self,
        chat: Chat,
        spec: TargetSpec,
        beside: Sequence[Path | str] = (),
        *,
        file: Path | None = None,
        measured: Overlap | None = None,
        cache: DocumentCache | None = None,
    ) -> None:
        """Read, encode and divide the conversations, for one target.

        ``beside``: further files, trained on as a whole: neither held out nor limited. ``file``: what is read instead
        of ``path``. ``measured``: finds evaluation prompts, with which nothing trained on may overlap. ``cache``: where
        encoded documents are kept; the target must then have its tokenizer's hash. With and without it they are the
        same.

        Raises:
            UserError: an unreadable file, a template that cannot be masked, nothing left to train on, or a target that
                cannot read so many tokens, has no such token, or does not end at the template's end of turn.
        """
        self.check(chat, spec)
        self._file = self.path if file is None else str(file)
        files = [self._file, *map(str, beside)]
        read = [read_conversations(one) for one in files]
        found = [some for some, _ in read]
        rules: dict[str, Any] = {"max_length": self.max_length, "over_length": self.over_length}
        rules |= {"held_out": self.wanted, "limit": self.limit}
        make = partial(divide, found, chat, **rules, measured=measured)
        if cache is None:
            parts = make()
        else:
            parts = cache.parts(_decides(files, chat, spec, measured) | rules, [*chain(*found)], make)
        self._all, self.kept_hash = [*parts.train, *parts.held_out], parts.hash
        if self.share < 1 and parts.train:
            parts = first_share(parts, self.share)
        self.train, self.held_out, self.hash, self._counts = parts.train, parts.held_out, parts.hash, parts.counts
        self.reports = [*(report for _, report in read), *parts.reports]
        if not self.train:
            train, _ = parts.reports
            raise UserError(
                f"{self._file}: nothing to train on within max_length {self.max_length} ({train}); "
                "a larger max_length or other conversations are needed"
            )
        self._check_ids(spec)
        self._spec, self._template_hash = spec, chat.template_hash
        if any(report.dropped or NOT_THERE in report.noted for report in self.reports):
            _log.warning("%s", self.summary())

    def check(self, chat: Chat, spec: TargetSpec) -> None:
        """Refuse a target for which nothing of this can be right, before anything is read or answered.

        Raises:
            UserError: one that cannot read so many tokens, or does not end at the template's end of turn.
        """
        if self.max_length > spec.max_positions:
            raise UserError(f"data.max_length: {self.max_length}, but {spec.name} reads at most {spec.max_positions}")
        if chat.end_of_turn not in spec.end_tokens:
            raise UserError(
                f"chat template: ends an answer with token {chat.end_of_turn}, at which {spec.name} does not stop "
                f"(end tokens {list(spec.end_tokens)}); template and target must be of one model"
            )

    def all_documents(self) -> list[Document]:
        """Those that train at any `share`, then those that are held out: in the order of ``kept_hash``."""
        return self._all

    def way(self) -> list[Report]:
        """What became of the conversations at each stage, from the raw file to what trains and validates; the first
        ones out of the file's manifest. Raises UserError for a damaged one."""
        return [*stages_of(self.file), *self.reports]

    def rows(self, found: Sequence[Document]) -> int:
        """Rows that an epoch of these documents has, on all processes together."""
        return len(pack([len(one) for one in found], self.row_length)) if self.packed else len(found)

    def summary(self) -> str:
        """What was kept, shortened and dropped, and why; one line a stage."""
        return "\n".join(map(str, self.reports))

    def manifest(self) -> dict[str, Any]:
        """Where the training text comes from: enough to tell two runs' data apart."""
        return {
            "hash": self.hash,
            "path": self.path,
            "file_hash": file_hash(self._file),
            "tokenizer_hash": self._spec.tokenizer_hash,
            "template_hash": self._template_hash,
            "max_length": self.max_length,
            "over_length": self.over_length,
            "licences": self.licences(),
            "train": _sizes(self.train),
            "held_out": _sizes(self.held_out),
        }

    @property
    def file(self) -> Path:
        """The file that was read."""
        return locate(self._file)

    def licences(self) -> dict[str, str]:
        """The terms of the texts by source, where a manifest beside the file says them."""
        return licences_of(self.file)

    def token_counts(self) -> Int[Tensor, " V"]:
        """How often each target token was written by the target in the training text, for the draft vocabulary."""
        return pad(self._counts, (0, self._spec.vocab - len(self._counts)))

    def prompts(self) -> list[Prompt]:
        """The held-out conversations' user turns, to be answered anew by a decoder."""
        return [_prompt(one) for one in {id(held.conversation): held.conversation for held in self.held_out}.values()]

    def train_dataloader(self, rank: int = 0, world: int = 1) -> RowLoader:
        """Packed rows, in an order of their own each epoch; resumable at any batch. Part ``rank`` of ``world``."""
        return self._loader(self.train, self.seed, rank, world)

    def val_dataloader(self, rank: int = 0, world: int = 1) -> list[RowLoader]:
        """One loader of packed held-out rows, in one fixed order; none where nothing is held out."""
        return [self._loader(self.held_out, None, rank, world)] if self.held_out else []

    def held_out_order(self) -> list[int]:
        """The places in ``held_out`` of the documents in the order in which `val_dataloader` gives them."""
        order = self._loader(self.held_out, None, 0, 1).order
        return [i for batch in order.batches(0) for row in batch for i in row]

    def _loader(self, found: Sequence[Document], seed: int | None, rank: int, world: int) -> RowLoader:
        order = RowOrder(
            [len(one) if self.packed else self.row_length for one in found],
            self.row_length,
            rows_per_batch=self.rows_per_batch,
            seed=seed,
            rank=rank,
            world=world,
        )
        data = f"{self.hash}, seed {seed}, {self.rows_per_batch} rows of {self.row_length}, {world} processes"
        data += "" if self.packed else ", not packed"
        rows = PackedRows(found, self.row_length)
        if self.reading is None:
            return RowLoader(rows, order, data)
        first = 0 if found is self.train else len(self._all) - len(self.held_out)  # as in `all_documents`
        return RowLoader(KeptRows(rows, self.reading, first), order, data, self.reading.threads)

    def _check_ids(self, spec: TargetSpec) -> None:
        highest = max(int(one.ids.max()) for one in [*self.train, *self.held_out])
        if highest >= spec.vocab:
            raise UserError(
                f"tokenizer: gives token {highest}, but {spec.name} has {spec.vocab}; both must be of one model"
            )


def _decides(files: Sequence[str], chat: Chat, spec: TargetSpec, measured: Overlap | None) -> dict[str, object]:
    """What documents depend on, but for options; a file's name too, by which conversations without an id are called."""
    assert spec.tokenizer_hash
    return {
        "files": [[locate(file).name, file_hash(file)] for file in files],
        "tokenizer": spec.tokenizer_hash,
        "chat": chat.identity(),
        "measured": None if measured is None else measured.identity,
    }


def _sizes(found: Sequence[Document]) -> dict[str, int]:
    return {
        "conversations": len({id(one.conversation) for one in found}),
        "tokens": sum(map(len, found)),
        "supervised": sum(int(one.supervised.sum()) for one in found),
    }


def _prompt(conversation: Conversation) -> Prompt:
    said = list(takewhile(lambda turn: turn["role"] != "tool", conversation.messages))
    system = [turn["content"] for turn in said if turn["role"] == "system"]
    turns = tuple(turn["content"] for turn in said if turn["role"] == "user")
    return Prompt(conversation.id, turns, conversation.source, system[0] if system else None, conversation.tools)
