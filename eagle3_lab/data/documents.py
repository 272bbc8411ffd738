"""Conversations as documents to train on: token ids and mask, no longer than allowed, nothing that teaches nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_lab.data.chat import Chat, Encoded, Refused
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.repetition import is_looping

OverLength = Literal["cut", "drop"]


@dataclass(frozen=True)
class Document:
    """One conversation's L token ids (int32), and for each whether the target wrote it. Under a thinking template a
    conversation may be several documents, which then follow each other."""

    conversation: Conversation
    ids: Int[Tensor, " L"]
    supervised: Bool[Tensor, " L"]

    def __len__(self) -> int:
        return self.ids.shape[0]


def documents(
    conversations: Iterable[Conversation],
    chat: Chat,
    report: Report,
    *,
    max_length: int,
    over_length: OverLength = "cut",
    wanted: int | None = None,
) -> Iterator[Document]:
    """Encode conversations one by one, and count in ``report`` what is kept, shortened and dropped. ``wanted``: stop
    behind so many that are kept.

    Dropped: answers that loop (`is_looping`) or hold the end-of-turn marker as text, since the target would have
    stopped there; what the template refuses, changes or does not render, by name; answers that cannot stand behind its
    prompts;
    conversations of which nothing supervised is left within ``max_length`` tokens. A longer one is cut behind its first
    ``max_length`` tokens or dropped as a whole; the part of an answer that is kept stays supervised. Noted: a text of
    the user's, the system's or a tool's that holds a special token's text; it is read as the token, as a server does;
    and answers whose text reads back as other tokens than were written.
    """
    before = report.kept
    for conversation in conversations:
        if report.kept - before == wanted:
            return
        if reason := _unmaskable(conversation, chat):
            report.dropped[reason] += 1
            continue
        try:
            encoded = chat.encode_each(conversation.messages, cut=conversation.cut, tools=conversation.tools)
        except Refused as error:
            report.drop(error.reason, conversation.id)
            continue
        kept = [Encoded(one.ids[:max_length], one.supervised[:max_length]) for one in encoded]
        kept = [one for one in kept if any(one.supervised)]
        long = any(len(one.ids) > max_length for one in encoded)
        if reason := _unfit(conversation, encoded, chat.end_of_turn) or _too_long(long, kept, over_length):
            report.dropped[reason] += 1
            continue
        report.kept += 1
        if long:
            report.shortened["longer than max_length"] += 1
        if chat.imitates(conversation.messages):
            report.noted["a template marker in a text that is not the target's"] += 1
        if not conversation.exact:
            report.noted["answers that read back as other tokens than were written"] += 1
        for one in kept:
            yield Document(conversation, torch.tensor(one.ids, dtype=torch.int32), torch.tensor(one.supervised))


def documents_hash(found: Iterable[Document]) -> str:
    """Identity of documents in their order: ids and masks, so file, tokenizer, template and length rule alike."""
    digest = hashlib.sha256()
    for document in found:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.ids.numpy().tobytes())
        digest.update(document.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]


def _unmaskable(conversation: Conversation, chat: Chat) -> str:
    """Why a conversation cannot be encoded under this template, or ""."""
    if not chat.takes_tools and any(turn["role"] == "tool" for turn in conversation.messages):
        return "tool turns, which the template does not render"
    return chat.misfit(conversation.messages, cut=conversation.cut)


def _unfit(conversation: Conversation, encoded: Sequence[Encoded], end_of_turn: int) -> str:
    """Why a conversation must not be trained on, or ""."""
    answers = [answer for one in encoded for answer in _answers(one)]
    if conversation.looping or any(map(is_looping, answers)):
        return "looping answer"
    ends = sum(answer.count(end_of_turn) for answer in answers)
    return "end-of-turn marker inside an answer" if ends != len(answers) - conversation.cut else ""


def _too_long(long: bool, kept: Sequence[Encoded], over_length: OverLength) -> str:
    """Why nothing within ``max_length`` is trained on, or ""."""
    if long and over_length == "drop":
        return "longer than max_length"
    return "" if kept else "no answer within max_length"


def _answers(encoded: Encoded) -> list[list[int]]:
    """The runs of supervised tokens."""
    answers: list[list[int]] = []
    previous = False
    for token, mine in zip(encoded.ids, encoded.supervised, strict=True):
        if mine:
            if not previous:
                answers.append([])
            answers[-1].append(token)
        previous = mine
    return answers
