"""What trains and what is held out: files' conversations, encoded and divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.documents import Document, OverLength, documents, documents_hash
from eagle3_lab.data.held_out import candidates, without
from eagle3_lab.data.overlap import Overlap, unmeasured

NOT_THERE = "asked for, but not there"


@dataclass(frozen=True)
class Parts:
    """Documents that train, documents that are held out, and the reports of both, in this order.

    ``hash``: of all documents. ``counts[i]``: how often the target wrote token i in what trains; W is the highest such
    token + 1.
    """

    train: list[Document]
    held_out: list[Document]
    reports: tuple[Report, Report]
    hash: str
    counts: Int[Tensor, " W"]

    @staticmethod
    def of(train: list[Document], held_out: list[Document], reports: tuple[Report, Report]) -> Parts:
        """Hashed and counted."""
        written = [one.ids[one.supervised] for one in train]
        counts = torch.bincount(torch.cat(written).long()) if written else torch.zeros(0, dtype=torch.int64)
        return Parts(train, held_out, reports, documents_hash([*train, *held_out]), counts)


def divide(
    read: Sequence[Sequence[Conversation]],
    chat: Chat,
    *,
    max_length: int,
    over_length: OverLength,
    held_out: int | float | None,
    limit: int | None,
    measured: Overlap | None = None,
    on_done: Callable[[int], None] = lambda count: None,
) -> Parts:
    """Encode the conversations of some files: the first is held out from and limited, the others train as a whole.

    The options are `ConversationData`'s. ``measured``: finds evaluation prompts, with which nothing that trains may
    overlap; ``on_done`` is told how many conversations are done with, those that overlap included.

    Raises:
        UserError: a conversation that the template cannot render or mask, or none that can be held out.
    """
    train, held = Report("train"), Report("held out")

    def encoded(some: Iterable[Conversation], report: Report, wanted: int | None) -> Iterator[Document]:
        return documents(some, chat, report, max_length=max_length, over_length=over_length, wanted=wanted)

    split = candidates(read[0], held_out)
    kept = list(encoded(split.held_out, held, split.wanted))
    taken = [one.conversation for one in kept]
    if isinstance(held_out, int) and held.kept < held_out:
        held.noted[NOT_THERE] = held_out - held.kept
    on_done(held.kept)
    found: list[Document] = []
    for some, wanted in ((split.train, limit), *((more, None) for more in read[1:])):
        rest = _told(without(some, taken, train), on_done)
        rest = rest if measured is None else unmeasured(rest, measured, train)
        found += encoded(rest, train, wanted)
    return Parts.of(found, kept, (train, held))


def _told(some: Iterable[Conversation], on_done: Callable[[int], None]) -> Iterator[Conversation]:
    """``some``, telling of each once it is done with."""
    for one in some:
        yield one
        on_done(1)
