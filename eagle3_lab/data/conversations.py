"""Conversations as they lie in files: what is read, what is refused, what is left out and why.

Two forms, told apart record by record: ``{"messages": [{"role", "content"}, ...]}``, ours, in which a fault is an
error with its line; and ShareGPT's ``{"conversations": [{"from", "value"}, ...]}``, in which oddities are common, so
the usable beginning of a conversation is kept and the rest counted.

Knows no tokenizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_lab.data.records import Names, name_of, names, records, say, whole_characters, without_folders
from eagle3_lab.data.turns import (
    UNREADABLE,
    UNUSABLE,
    Message,
    Tools,
    carried,
    definitions,
    other_fields,
    unusable,
    with_record,
)
from eagle3_lab.errors import UserError, near

ROLES = ("system", "user", "assistant", "tool")
SPLITS = ("train", "held_out")
NAMED = 5  # conversations of one reason whose names a report holds
SHAREGPT_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """One conversation that ends with an answer: an optional system turn, then user and assistant in turn; between two
    answers there may be a tool's results instead of a question.

    ``temperature`` the answers were drawn at (0 greedy, None unknown); ``cut`` the last answer ran out of tokens;
    ``looping`` an answer repeats itself, says the file; ``exact`` False: the answers' text reads back as other tokens
    than were written, says the file; ``split`` is ``held_out``, or ``train`` or "", which are the same. ``tools``: the
    definitions of tools that the target read.
    """

    id: str
    messages: tuple[Message, ...]
    source: str = ""
    temperature: float | None = None
    cut: bool = False
    looping: bool = False
    exact: bool = True
    split: str = ""
    tools: Tools = ()


@dataclass
class Report:
    """How many conversations a stage kept, shortened (kept all the same) and dropped, by reason; ``noted`` are kept as
    they are, and worth knowing. ``left_out``: not taken because an option asks for fewer. ``named``: by reason, the
    first conversations of it, where a reason is of these conversations and not of an option."""

    stage: str
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def of(counts: Mapping[str, Any]) -> Report:
        """Return the report that `counts` was made of. Raises KeyError, TypeError or ValueError for anything else."""
        reasons = {name: Counter(counts.get(name, {})) for name in ("shortened", "dropped", "noted", "left_out")}
        named = {why: list(some) for why, some in counts.get("named", {}).items()}
        return Report(counts["stage"], counts["kept"], **reasons, named=named)

    @property
    def seen(self) -> int:
        """How many conversations came to this stage."""
        return self.kept + self.dropped.total() + self.left_out.total()

    def drop(self, why: str, name: str) -> None:
        """Count a conversation as dropped, and hold its name."""
        self.dropped[why] += 1
        if len(self.named.setdefault(why, [])) < NAMED:
            self.named[why].append(name)

    def counts(self) -> dict[str, Any]:
        """As JSON, reasons in order."""
        reasons = {"shortened": self.shortened, "dropped": self.dropped, "noted": self.noted}
        found: dict[str, Any] = {"stage": self.stage, "kept": self.kept}
        found |= {name: dict(sorted(one.items())) for name, one in reasons.items()}
        if self.left_out:
            found["left_out"] = dict(sorted(self.left_out.items()))
        return found | ({"named": dict(sorted(self.named.items()))} if self.named else {})

    def __str__(self) -> str:
        text = f"{self.stage}: {self.kept} " + (f"of {self.seen} " if self.seen > self.kept else "") + "conversations"
        for word, reasons in (
            ("dropped", self.dropped),
            ("left out", self.left_out),
            ("shortened", self.shortened),
            ("noted", self.noted),
        ):
            if reasons:
                counts = [f"{count} ({why}{self._names(why, count)})" for why, count in sorted(reasons.items())]
                text += f"; {word} " + ", ".join(counts)
        return text

    def _names(self, why: str, count: int) -> str:
        named = self.named.get(why, [])
        return ": " + ", ".join([*named, "..."] if count > len(named) else named) if named else ""


def read_conversations(path: str) -> tuple[list[Conversation], Report]:
    """Read every usable conversation of a file, in its order.

    Raises:
        UserError: ``path:line: what is wrong; what would be right``, or nothing usable in the whole file.
    """
    report, given = Report("read"), Names()
    found: list[Conversation] = []
    for place, record in records(path):
        turns = read_turns(record, place)
        usable, reason = usable_beginning(turns)
        if usable:
            report.kept += 1
            found.append(_conversation(record, place, usable, given, whole=len(usable) == len(turns)))
            report.noted.update(f"turns with {names([key])}, which is not read" for key in other_fields(record))
        if reason:
            (report.shortened if usable else report.dropped)[reason] += 1
    if not found:
        raise UserError(f"{path}: no usable conversation ({report})")
    return found, report


def usable_beginning(turns: Sequence[Message]) -> tuple[tuple[Message, ...], str]:
    """The longest beginning of the form [system], user, assistant, user, assistant, ... in which tool turns may stand
    between two answers; and why it is not all."""
    end = 0
    before = ""
    for i, turn in enumerate(turns):
        if reason := _fault(turn, before):
            return tuple(turns[:end]), reason
        before = turn["role"]
        end = i + 1 if before == "assistant" else end
    if not turns:
        return (), "no turns"
    return tuple(turns[:end]), "" if end == len(turns) else "last turn not answered"


def _fault(turn: Message, before: str) -> str:
    """Why ``turn`` cannot follow a turn of the role ``before`` ("" at the beginning); "" where it can."""
    role, empty = turn["role"], not turn["content"].strip() and "tool_calls" not in turn
    if UNUSABLE in turn:
        return turn[UNUSABLE]
    if role == "assistant":
        if before not in ("user", "tool"):
            return "two answers in a row" if before == "assistant" else "begins with an answer"
        return "empty answer" if empty else ""
    if role == "user":
        followed = {"user": "two questions in a row", "tool": "tool turn not answered"}
        return followed.get(before, "empty question" if empty else "")
    if role == "system":
        return "system turn inside" if before else ""
    if role == "tool":
        return "" if before in ("assistant", "tool") else "tool turn without a call"
    raise AssertionError(f"a turn of the role {role}")


def read_turns(record: dict[str, Any], place: str) -> list[Message]:
    """All turns of a record of either form, whether they follow each other rightly or not; what the record says beside
    them is a turn too (`turns.with_record`).

    Raises:
        UserError: a record of neither form, or a fault in our own.
    """
    if "messages" in record:
        return with_record(record, _strict(record["messages"], place))
    if "conversations" in record:
        return with_record(record, read_sharegpt(record["conversations"], place))
    fault = f"neither 'messages' nor 'conversations' among the keys ({names(record)})"
    raise UserError(f"{place}: {fault}; one of them is needed")


def _strict(messages: object, place: str) -> list[Message]:
    """Our own form: every fault is an error."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: messages is {say(messages)}; a list of objects with 'role' and 'content' is needed")
    turns: list[Message] = []
    for i, message in enumerate(messages):
        where = f"{place}: messages[{i}]"
        if not isinstance(message, dict):
            raise UserError(f"{where} is {say(message)}; an object with 'role' and 'content' is needed")
        if message.get("content") is None and message.get("role") == "assistant" and message.get("tool_calls"):
            message = message | {"content": ""}  # as OpenAI's own
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                fault = f"{key} is {say(message[key])}" if key in message else f"no {key}"
                raise UserError(f"{where}: {fault}; a string is needed")
        if message["role"] not in ROLES:
            raise UserError(f"{where}: unknown role {message['role']!r}{near(message['role'], ROLES)}")
        if not whole_characters(message["content"]):
            raise UserError(f"{where}: content holds half a surrogate pair; whole characters are needed")
        turns.append(_turn(message, message["role"], message["content"]))
    return turns


def _turn(message: Mapping[str, Any], role: str, content: str) -> Message:
    """A turn with all that it carries; one that cannot be used says why."""
    fields, fault = carried(message, role)
    return {"role": role, "content": content} | fields | ({UNUSABLE: fault} if fault else {})


def read_sharegpt(listed: object, place: str, key: str = "conversations") -> list[Message]:
    """ShareGPT: what cannot be read becomes a turn that ends the usable beginning. ``key`` is where ``listed`` stood.

    Raises:
        UserError: something else than a list.
    """
    if not isinstance(listed, list):
        raise UserError(f"{place}: {key} is {say(listed)}; a list of objects with 'from' and 'value' is needed")
    turns: list[Message] = []
    for turn in listed:
        said = turn if isinstance(turn, dict) else {}
        role, value = said.get("from", said.get("role")), said.get("value", said.get("content"))
        role = SHAREGPT_ROLES.get(role.lower(), UNREADABLE) if isinstance(role, str) else UNREADABLE
        value = "" if value is None and role == "assistant" and said.get("tool_calls") else value
        if role != UNREADABLE and isinstance(value, str) and whole_characters(value):
            turns.append(_turn(said, role, value))
        else:
            turns.append(unusable("turn without a known role or without text"))
    return turns


def _conversation(
    record: dict[str, Any], place: str, messages: tuple[Message, ...], given: Names, *, whole: bool
) -> Conversation:
    """The record with its messages' usable beginning; ``whole`` False: its last answer is not the record's last."""
    kinds = {"source": (str,), "temperature": (int, float), "split": (str,)}
    kinds |= dict.fromkeys(("cut", "looping", "exact"), (bool,))
    said: dict[str, Any] = {}
    for key, kind in kinds.items():
        value = record.get(key)
        if value is None:
            continue
        if type(value) not in kind:  # not isinstance: True is no temperature
            raise UserError(f"{place}: {key} is {say(value)}; {' or '.join(k.__name__ for k in kind)} is needed")
        said[key] = value
    if not 0 <= said.get("temperature", 0) < math.inf:
        raise UserError(f"{place}: temperature is {said['temperature']}; a number from 0 is needed")
    name = name_of([record.get("id")], without_folders(place))
    for key, value in (("id", name), ("source", said.get("source", ""))):
        if not whole_characters(value):
            raise UserError(f"{place}: {key} holds half a surrogate pair; whole characters are needed")
    if said.get("split", "train") not in SPLITS:
        raise UserError(f"{place}: split is {said['split']!r}{near(said['split'], SPLITS)}")
    said["cut"] = said.get("cut", False) and whole
    return Conversation(given.once(name), messages, **said, tools=definitions(record)[0])
