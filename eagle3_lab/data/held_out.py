"""Which conversations are never trained on: greedy ones, the same for every seed, with nothing of them in training."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.errors import UserError

DEFAULT_SHARE = 0.05


@dataclass(frozen=True)
class Candidates:
    """Greedy conversations in the order in which they are held out, how many are wanted, and all that may train.

    ``marked``: the file marks them, so that those which are not held out do not train either. ``unfit``: how many
    marked ones can be neither, by reason.
    """

    held_out: list[Conversation]
    wanted: int
    train: list[Conversation]
    marked: bool = False
    unfit: Counter[str] = field(default_factory=Counter)


def candidates(conversations: Sequence[Conversation], held_out: int | float | None) -> Candidates:
    """Who may be held out, and who may train.

    Held out are greedy conversations only (temperature 0, read back as the tokens that were written), since only on
    greedy text do teacher-forced hits mean what a decoder does at temperature 0. Where the file marks a ``held_out``
    split, they come from it, and the rest of it is not trained on either; elsewhere from all.

    Args:
        held_out: a number, a share of the greedy ones, or None: all that are marked, else a share of 0.05.

    Raises:
        UserError: conversations are wanted but none is greedy.
    """
    marked = [one for one in conversations if one.split == "held_out"]
    greedy = [one for one in marked or conversations if not _unfit(one)]
    if held_out is None:
        held_out = len(greedy) if marked else DEFAULT_SHARE
    wanted = held_out if isinstance(held_out, int) else max(1, round(held_out * len(greedy))) if held_out else 0
    if wanted and not greedy:
        raise UserError(
            'data.held_out: no conversation is known to be greedy ("temperature": 0.0), so none can be held out; '
            "say which are, or set held_out: 0 and go without validation"
        )
    train = [one for one in conversations if one.split != "held_out"]
    unfit = Counter(why for one in marked if (why := _unfit(one)))
    return Candidates(in_fixed_order(greedy), wanted, in_fixed_order(train), bool(marked), unfit)


def _unfit(conversation: Conversation) -> str:
    """Why a conversation cannot validate, or ""."""
    if conversation.temperature != 0:
        return "marked as held out, but not known to be greedy"
    return "" if conversation.exact else "marked as held out, but its text reads back as other tokens than were written"


def in_fixed_order(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Shuffled by their ids: the first n are a fair sample, and a part of the first n + 1."""
    return sorted(conversations, key=lambda one: hashlib.sha256(one.id.encode()).digest())


def without(conversations: Sequence[Conversation], held: Sequence[Conversation], report: Report) -> list[Conversation]:
    """Those of ``conversations`` whose first question no held-out conversation asks; the others are counted."""
    asked = {first_question(one) for one in held}
    themselves = {id(one) for one in held}
    kept: list[Conversation] = []
    for one in conversations:
        if first_question(one) not in asked:
            kept.append(one)
        elif id(one) not in themselves:
            report.dropped["asks a held-out question"] += 1
    return kept


def first_question(conversation: Conversation) -> str:
    """The first user turn's text, without the space around it."""
    return next(turn["content"].strip() for turn in conversation.messages if turn["role"] == "user")
