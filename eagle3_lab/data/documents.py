"""Conversations as documents to train on: token ids and mask, no longer than allowed, nothing that teaches nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_lab.data.chat import Chat, Encoded
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.errors import UserError
from eagle3_lab.loops import is_looping

OverLength = Literal["cut", "drop"]


@dataclass(frozen=True)
class Document:
    """One conversation's L token ids (int32), and for each whether the target wrote it."""

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
) -> Iterator[Document]:
    """Encode conversations one by one, and count in ``report`` what is kept, shortened and dropped.

    Dropped: answers that loop (`is_looping`) or hold the end-of-turn marker as text, since the target would have
    stopped there; conversations of which nothing supervised is left within ``max_length`` tokens. A longer one is cut
    behind its first ``max_length`` tokens or dropped as a whole; the part of an answer that is kept stays supervised.

    Raises:
        UserError: a conversation that the chat template cannot render or mask, with its id.
    """
    for conversation in conversations:
        try:
            encoded = chat.encode(conversation.messages, cut=conversation.cut)
        except UserError as error:
            raise UserError(f"conversation {conversation.id}: {error}") from None
        long = len(encoded.ids) > max_length
        kept = Encoded(encoded.ids[:max_length], encoded.supervised[:max_length]) if long else encoded
        if reason := _unfit(conversation, encoded, chat.end_of_turn):
            report.dropped[reason] += 1
        elif long and over_length == "drop":
            report.dropped["longer than max_length"] += 1
        elif not any(kept.supervised):
            report.dropped["no answer within max_length"] += 1
        else:
            report.kept += 1
            if long:
                report.shortened["longer than max_length"] += 1
            yield Document(conversation, torch.tensor(kept.ids, dtype=torch.int32), torch.tensor(kept.supervised))


def documents_hash(found: Iterable[Document]) -> str:
    """Identity of documents in their order: ids and masks, so file, tokenizer, template and length rule alike."""
    digest = hashlib.sha256()
    for document in found:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.ids.numpy().tobytes())
        digest.update(document.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]


def _unfit(conversation: Conversation, encoded: Encoded, end_of_turn: int) -> str:
    """Why a conversation must not be trained on, or ""."""
    answers = _answers(encoded)
    if conversation.looping or any(map(is_looping, answers)):
        return "looping answer"
    ends = sum(answer.count(end_of_turn) for answer in answers)
    return "end-of-turn marker inside an answer" if ends != len(answers) - conversation.cut else ""


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
