"""Documents side by side in rows of one length, the same rows in the same order however they are loaded.

An epoch's order is a function of (seed, epoch) alone: documents are laid by length into the fullest row that has room,
equal lengths in the epoch's own order, and the rows are shuffled. The count of rows depends on the lengths only, so
every epoch has the same number of batches. Whoever iterates may stop and go on at any batch.

Knows no text, no tokenizer and no trainer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from eagle3_lab import seeds
from eagle3_lab.data.documents import Document
from eagle3_lab.errors import UserError
from eagle3_lab.types import PADDING, Batch

Key = TypeVar("Key")
Loaded = TypeVar("Loaded")

Row = tuple[int, ...]
"""The documents of one row, by index; () is a row of padding."""


def pack(lengths: Sequence[int], row_length: int, generator: torch.Generator | None = None) -> list[Row]:
    """Lay documents of these lengths into rows: each document once, no row longer than ``row_length``.

    Best fit, longest first; ``generator`` orders documents of one length, and the rows (None: both as they come).

        pack([3, 2, 2, 1], 4) = [(0, 3), (1, 2)]

    Raises:
        ValueError: a document longer than a row.
    """
    count = len(lengths)
    order = list(range(count)) if generator is None else torch.randperm(count, generator=generator).tolist()
    order.sort(key=lambda i: -lengths[i])
    if order and lengths[order[0]] > row_length:
        raise ValueError(f"row_length must be at least the longest document, {lengths[order[0]]}, got {row_length}")
    rows: list[list[int]] = []
    open_rows: defaultdict[int, list[int]] = defaultdict(list)  # room left -> rows
    rooms = 0  # bit r is set where a row has room r, so the tightest fit is the lowest set bit from `length` on
    for i in order:
        length = lengths[i]
        fits = rooms >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(i)
        open_rows[room - length].append(row)
        rooms |= 1 << (room - length)
    turn = range(len(rows)) if generator is None else torch.randperm(len(rows), generator=generator).tolist()
    return [tuple(rows[r]) for r in turn]


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of one epoch's order, which shares nothing with other epochs and other seeds."""
    return seeds.generator(seeds.order_seed(seed, epoch))


class RowSource(Dataset[Batch], ABC):
    """Documents as batches: index it with the rows that a batch shall have."""

    @abstractmethod
    def __getitem__(self, rows: Sequence[Row]) -> Batch: ...

    @abstractmethod
    def lay(self, rows: Sequence[Row]) -> Batch:
        """Tokens and masks of these rows alone."""


class PackedRows(RowSource):
    """Documents in packed rows."""

    def __init__(self, found: Sequence[Document], row_length: int) -> None:
        self.documents = found
        self.row_length = row_length

    def __getitem__(self, rows: Sequence[Row]) -> Batch:
        return self.lay(rows)

    def lay(self, rows: Sequence[Row]) -> Batch:
        """Tokens and masks of these rows."""
        shape = (len(rows), self.row_length)
        ids = torch.zeros(shape, dtype=torch.int64)
        supervised = torch.zeros(shape, dtype=torch.bool)
        position = torch.zeros(shape, dtype=torch.int64)
        document = torch.full(shape, PADDING, dtype=torch.int64)
        for b, row in enumerate(rows):
            start = 0
            for number, i in enumerate(row):
                one = self.documents[i]
                here = slice(start, start + len(one))
                ids[b, here] = one.ids.long()
                supervised[b, here] = one.supervised
                position[b, here] = torch.arange(len(one))
                document[b, here] = number
                start += len(one)
        return Batch(ids, supervised, position, document)


class RowOrder:
    """Which rows make up each batch of an epoch. ``seed`` None: the same shuffled order in every epoch, for validation.

    Every rank gets as many batches of as many rows as any other; the last ones are filled with rows of padding.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        row_length: int,
        *,
        rows_per_batch: int = 1,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._lengths = list(lengths)
        self._row_length = row_length
        self._rows_per_batch = rows_per_batch
        self._seed = seed
        self._rank, self._world = rank, world
        self._rows = len(pack(self._lengths, row_length))
        self._laid: tuple[int, list[Row]] = (-1, [])  # the epoch asked for last

    @property
    def rows(self) -> int:
        """Rows of an epoch, padding rows not counted, on all ranks together."""
        return self._rows

    @property
    def processes(self) -> int:
        """How many ranks share an epoch."""
        return self._world

    def __len__(self) -> int:
        """Batches of any epoch, on each rank."""
        return math.ceil(self._rows / (self._rows_per_batch * self._world))

    def batches(self, epoch: int) -> list[list[Row]]:
        """This rank's batches of an epoch, in order."""
        step = self._rows_per_batch * self._world
        rows = self._epoch(epoch)
        return [rows[at + self._rank : at + step : self._world] for at in range(0, len(rows), step)]

    def everywhere(self, epoch: int, batch: int) -> list[Row]:
        """The rows of an epoch's batch ``batch`` on all ranks together."""
        step = self._rows_per_batch * self._world
        return self._epoch(epoch)[batch * step : (batch + 1) * step]

    def _epoch(self, epoch: int) -> list[Row]:
        if self._laid[0] != epoch:
            step = self._rows_per_batch * self._world
            generator = epoch_generator(0, 0) if self._seed is None else epoch_generator(self._seed, epoch)
            rows = pack(self._lengths, self._row_length, generator)
            self._laid = (epoch, rows + [()] * (len(self) * step - len(rows)))
        return self._laid[1]


def read_ahead(load: Callable[[Key], Loaded], keys: Iterable[Key], threads: int) -> Iterator[Loaded]:
    """``map(load, keys)``, with ``threads`` of them loaded while their turn is yet to come; 0: none is."""
    if threads == 0:
        yield from map(load, keys)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        waiting: deque[Future[Loaded]] = deque()
        for key in keys:
            waiting.append(pool.submit(load, key))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class RowLoader:
    """Loads an epoch of batches, and the next one whenever it is iterated again; resumable at any batch.

    It counts the epochs itself, because a trainer's own count may be off by one after a resume. It draws from no
    global generator and starts no process: a row is laid out in microseconds. ``threads`` load batches ahead, in the
    same order: what is read from disk is copied outside Python's lock.

    ``data`` is the identity of what is loaded and in which order: a state of other data is refused.
    """

    def __init__(self, dataset: RowSource, order: RowOrder, data: str = "", threads: int = 0) -> None:
        self.dataset = dataset
        self.order = order
        self.data = data
        self.threads = threads
        self._epoch, self._batch = 0, 0  # what comes next
        self._running = 0  # the epoch of the batch that was given last
        self._resumed = False

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so nothing is decided before the first batch is asked for: a trainer may load a state between.
        if self._batch and not self._resumed:  # the last pass was left early
            self._epoch, self._batch = self._epoch + 1, 0
        self._resumed = False
        coming = self.order.batches(self._epoch)[self._batch :]
        for batch in read_ahead(self.dataset.__getitem__, coming, self.threads):
            # counted once it is read: one that cannot be read is the next one still
            self._running, self._batch = self._epoch, self._batch + 1
            if self._batch == len(self):
                self._epoch, self._batch = self._epoch + 1, 0
            yield batch

    def together(self, batches: range) -> Iterator[Batch]:
        """Batches ``batches`` of the running epoch as all ranks have them together: each one's rows side by side.

        Every rank can lay them out, so what an optimizer step sums over micro-batches and ranks is known to all before
        the first forward, and no rank has to ask another.
        """
        for batch in batches:
            yield self.dataset.lay(self.order.everywhere(self._running, batch))

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch stands."""
        return {"epoch": self._epoch, "batch": self._batch, "data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises UserError if that was other data or another order of it."""
        if state_dict["data"] != self.data:
            raise UserError(
                f"checkpoint: was trained on other data ({state_dict['data']}) than this ({self.data}); "
                "give back the data, its options, the seed and the number of processes, or start afresh"
            )
        self._epoch, self._batch = state_dict["epoch"], state_dict["batch"]
        self._resumed = True
