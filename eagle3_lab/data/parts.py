"""What trains and what is held out: files' conversations, encoded and divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.documents import Document, OverLength, documents, documents_hash
from eagle3_lab.data.held_out import Candidates, candidates, without
from eagle3_lab.data.overlap import Overlap, unmeasured

NOT_THERE = "asked for, but not there"
BEYOND = "beyond data.share"


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
        UserError: none that can be held out.
    """
    train = Report("train")

    def encoded(some: Iterable[Conversation], report: Report, wanted: int | None) -> Iterator[Document]:
        return documents(some, chat, report, max_length=max_length, over_length=over_length, wanted=wanted)

    split = candidates(read[0], held_out)
    kept, held = _held_out(split, encoded)
    taken = [one.conversation for one in kept]
    if isinstance(held_out, int) and held.kept < held_out:
        held.noted[NOT_THERE] = held_out - held.kept
    on_done(held.kept)
    found: list[Document] = []
    for some, wanted in ((split.train, limit), *((more, None) for more in read[1:])):
        left = without(some, taken, train)
        before = train.seen
        rest = _told(left, on_done)
        rest = rest if measured is None else unmeasured(rest, measured, train)
        found += encoded(rest, train, wanted)
        if beyond := len(left) - (train.seen - before):
            train.left_out["beyond data.limit"] += beyond
    return Parts.of(found, kept, (train, held))


def _held_out(
    split: Candidates, encoded: Callable[[Iterable[Conversation], Report, int | None], Iterator[Document]]
) -> tuple[list[Document], Report]:
    """The documents that validate, and what became of every conversation that is not left to training."""
    tried = Report("held out")
    kept = list(encoded(split.held_out, tried, split.wanted))
    if not split.marked:  # what is not held out may train, and is counted there
        return kept, Report("held out", tried.kept, tried.shortened, noted=tried.noted)
    if beyond := len(split.held_out) - tried.seen:
        tried.left_out["beyond data.held_out"] += beyond
    tried.dropped.update(split.unfit)
    return kept, tried


def first_share(parts: Parts, share: float) -> Parts:
    """Return the same parts with the first ``share`` of the conversations that train, at least one. They stand in one
    fixed order, so the conversations of a smaller share are the first ones of a larger share."""
    talks = list({id(one.conversation): None for one in parts.train})
    chosen = set(talks[: max(1, round(share * len(talks)))])
    train, held = parts.reports
    left_out = train.left_out + Counter({BEYOND: len(talks) - len(chosen)})
    train = replace(train, kept=len(chosen), left_out=left_out)
    return Parts.of([one for one in parts.train if id(one.conversation) in chosen], parts.held_out, (train, held))


def _told(some: Iterable[Conversation], on_done: Callable[[int], None]) -> Iterator[Conversation]:
    """``some``, telling of each once it is done with."""
    for one in some:
        yield one
        on_done(1)
