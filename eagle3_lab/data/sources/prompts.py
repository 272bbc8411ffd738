"""Where user turns come from, as parts named in YAML: local files, public sets, the target itself, and mixtures.

A source gives whole conversations as they lie there, answers included where it has any; whether those stay or the
target answers anew is not its business. Sources know no tokenizer, but for the one that lets the target write.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_lab.data.conversations import Report
from eagle3_lab.data.records import Names
from eagle3_lab.data.turns import UNUSABLE, Message, Tools
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.system.jsonl_log import AppendLog

NOT_STATED = "not stated"


@dataclass(frozen=True)
class Talk:
    """One conversation as a source has it: any turns, answered or not. ``id`` is the source's own, ``source`` says
    whose licence holds, ``tools`` are the definitions beside the turns."""

    id: str
    messages: tuple[Message, ...]
    source: str
    tools: Tools = ()


@dataclass(frozen=True)
class Desk:
    """What a source may use that writes its prompts first: the target, and the journal of what it wrote already; and
    where a source counts what it has and does not give."""

    target: Target
    journal: AppendLog
    report: Report = field(default_factory=lambda: Report("prompts"))

    def stop_at(self, limit: int, source: str) -> None:
        """Note that a source gives only its first ``limit`` conversations: what stands behind them is not read."""
        self.report.noted[f"limit {limit} of {source} reached, what follows was not read"] += 1


class Prompts(ABC):
    """A source of conversations."""

    @abstractmethod
    def talks(self, desk: Desk) -> Iterator[Talk]:
        """Every conversation, in an order that never changes.

        Raises:
            UserError: a source that cannot be read, with the file and line where there is one.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the conversations, as JSON: equal identities, equal conversations. Raises UserError."""

    @abstractmethod
    def licences(self) -> dict[str, str]:
        """The terms of each source's texts, by the name that its conversations carry."""


def questions(turns: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """The system turn and the user turns that can be put to a target one after another, and why these are not all.

    The source's own answers need not be usable. Where it has none at all, every user turn is a question. Behind a
    tool's result nothing can be asked anew, because the target's own call would have been another.
    """
    unanswered = all(turn["role"] != "assistant" for turn in turns)
    kept: list[Message] = []
    before, reason = "", "" if turns else "no turns"
    for turn in turns:
        reason = turn.get(UNUSABLE, "") if turn["role"] != "assistant" else ""  # its answers are not used
        if reason := reason or _fault(turn, before, unanswered=unanswered):
            break
        before = turn["role"]
        if before != "assistant":
            kept.append(turn)
    if not any(turn["role"] == "user" for turn in kept):
        return (), reason or "no question"
    return tuple(kept), reason


def _fault(turn: Message, before: str, *, unanswered: bool) -> str:
    """Why nothing from ``turn`` on can be asked, behind a turn of the role ``before``; "" where it can."""
    role = turn["role"]
    if role == "user":
        if before == "user" and not unanswered:
            return "two questions in a row"
        return "" if turn["content"].strip() else "empty question"
    if role == "assistant":
        wrong = {"assistant": "two answers in a row", "user": ""}
        return wrong.get(before, "begins with an answer")
    if role == "system":
        return "system turn inside" if before else ""
    return "tool turn" if role == "tool" else "turn without a known role or without text"


def in_order_of(seed: int, names: Sequence[str]) -> list[int]:
    """Indices shuffled by the names' hashes: the first n are a fair sample, and a part of the first n + 1."""
    keys = [hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogatepass")).digest() for name in names]
    return sorted(range(len(names)), key=lambda i: (keys[i], i))


def _distinct(called: Sequence[str]) -> list[str]:
    """Each name once, so that none of them decides for many conversations."""
    names = Names()
    return [names.once(name) for name in called]


@dataclass(frozen=True)
class Share:
    """One source of a mixture, and how much of it: weights count against each other.

    Args:
        prompts: the source.
        weight: its part of the whole, relative to the other shares'.

    Raises:
        ValueError: a weight that is not positive.
    """

    prompts: Prompts
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight must be > 0, got {self.weight}")


class Mixture(Prompts):
    """Several sources in fixed proportions, shuffled together.

    Which conversations of a source are taken depends on their ids and the seed alone: a smaller mixture's are among a
    larger one's. Nothing is taken twice.

    Args:
        parts: the sources and their weights.
        total: conversations in all; null: as many as the proportions allow before a source runs out.
        seed: of the choice and the order.

    Raises:
        ValueError: no parts, or a total below 1.
    """

    def __init__(self, parts: list[Share], total: int | None = None, seed: int = 0) -> None:
        if not parts:
            raise ValueError("parts must name at least one source, got none")
        if total is not None and total < 1:
            raise ValueError(f"total must be >= 1 or null, got {total}")
        self.parts, self.total, self.seed = parts, total, seed

    def talks(self, desk: Desk) -> Iterator[Talk]:
        found = [list(part.prompts.talks(desk)) for part in self.parts]
        taken: list[Talk] = []
        for some, count in zip(found, self._counts([len(some) for some in found]), strict=True):
            taken += [some[i] for i in in_order_of(self.seed, _distinct([talk.id for talk in some]))[:count]]
        if left := sum(map(len, found)) - len(taken):
            desk.report.left_out["of a source that has more than the mixture takes"] += left
        for i in in_order_of(self.seed, _distinct([f"{talk.source} {talk.id}" for talk in taken])):
            yield taken[i]

    def _counts(self, sizes: list[int]) -> list[int]:
        """How many of each: the largest remainders get what is left over, the first of equal ones."""
        heaviest = max(part.weight for part in self.parts)  # a sum of huge weights is no number
        scaled = [part.weight / heaviest for part in self.parts]
        weights = [max(weight / sum(scaled), 1e-12) for weight in scaled]
        total = self.total
        if total is None:
            total = int(min(size / weight for size, weight in zip(sizes, weights, strict=True)) + 1e-9)
        wanted = [total * weight for weight in weights]
        counts = [int(want + 1e-9) for want in wanted]
        left = sorted(range(len(wanted)), key=lambda i: (round(counts[i] - wanted[i], 9), i))
        for i in left[: total - sum(counts)]:
            counts[i] += 1
        for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            if count > size and self.total is None:
                counts[i] = size  # a remainder too many
            elif count > size:
                raise UserError(
                    f"Mixture.parts[{i}]: has {size} conversations, its share of total {total} is {count}; a smaller "
                    "total or weight is needed"
                )
        return counts

    def identity(self) -> dict[str, Any]:
        parts = [{"prompts": part.prompts.identity(), "weight": part.weight} for part in self.parts]
        return {"mixture": parts, "total": self.total, "seed": self.seed}

    def licences(self) -> dict[str, str]:
        """All terms of sources of one name, where parts state different ones."""
        found: dict[str, dict[str, None]] = {}
        for part in self.parts:
            for name, terms in part.prompts.licences().items():
                found.setdefault(name, {})[terms] = None
        return {name: "; ".join(terms) for name, terms in found.items()}
