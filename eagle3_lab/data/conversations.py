"""Conversations as they lie in files: what is read, what is refused, what is left out and why.

Two forms, told apart record by record: ``{"messages": [{"role", "content"}, ...]}``, ours, in which a fault is an
error with its line; and ShareGPT's ``{"conversations": [{"from", "value"}, ...]}``, in which oddities are common, so
the usable beginning of a conversation is kept and the rest counted.

Knows no tokenizer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_lab.data.chat import Message
from eagle3_lab.data.records import names, records, say, whole_characters, without_folders
from eagle3_lab.errors import UserError, near

ROLES = ("system", "user", "assistant", "tool")
SPLITS = ("train", "held_out")
UNREADABLE = "unreadable"
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
    than were written, says the file; ``split`` is ``held_out``, or ``train`` or "", which are the same.
    """

    id: str
    messages: tuple[Message, ...]
    source: str = ""
    temperature: float | None = None
    cut: bool = False
    looping: bool = False
    exact: bool = True
    split: str = ""


@dataclass
class Report:
    """How many conversations a stage kept, shortened (kept all the same) and dropped, by reason; ``noted`` are kept as
    they are, and worth knowing."""

    stage: str
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        """As JSON, reasons in order."""
        reasons = {"shortened": self.shortened, "dropped": self.dropped, "noted": self.noted}
        return {"stage": self.stage, "kept": self.kept} | {
            name: dict(sorted(one.items())) for name, one in reasons.items()
        }

    def __str__(self) -> str:
        text = f"{self.stage}: {self.kept} conversations"
        for word, reasons in (("dropped", self.dropped), ("shortened", self.shortened), ("noted", self.noted)):
            if reasons:
                text += f"; {word} " + ", ".join(f"{count} ({why})" for why, count in sorted(reasons.items()))
        return text


def read_conversations(path: str) -> tuple[list[Conversation], Report]:
    """Read every usable conversation of a file, in its order.

    Raises:
        UserError: ``path:line: what is wrong; what would be right``, or nothing usable in the whole file.
    """
    report = Report("read")
    found: list[Conversation] = []
    for place, record in records(path):
        turns = read_turns(record, place)
        usable, reason = usable_beginning(turns)
        if usable:
            report.kept += 1
            found.append(_conversation(record, place, usable, whole=len(usable) == len(turns)))
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
    role, empty = turn["role"], not turn["content"].strip()
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
    return "turn without a known role or without text"


def read_turns(record: dict[str, Any], place: str) -> list[Message]:
    """All turns of a record of either form, whether they follow each other rightly or not.

    Raises:
        UserError: a record of neither form, or a fault in our own.
    """
    if "messages" in record:
        return _strict(record["messages"], place)
    if "conversations" in record:
        return read_sharegpt(record["conversations"], record.get("system"), place)
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
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                fault = f"{key} is {say(message[key])}" if key in message else f"no {key}"
                raise UserError(f"{where}: {fault}; a string is needed")
        if message["role"] not in ROLES:
            raise UserError(f"{where}: unknown role {message['role']!r}{near(message['role'], ROLES)}")
        if not whole_characters(message["content"]):
            raise UserError(f"{where}: content holds half a surrogate pair; whole characters are needed")
        turns.append({"role": message["role"], "content": message["content"]})
    return turns


def read_sharegpt(listed: object, system: object, place: str, key: str = "conversations") -> list[Message]:
    """ShareGPT: what cannot be read becomes a turn that ends the usable beginning. ``key`` is where ``listed`` stood.

    Raises:
        UserError: something else than a list.
    """
    if not isinstance(listed, list):
        raise UserError(f"{place}: {key} is {say(listed)}; a list of objects with 'from' and 'value' is needed")
    turns: list[Message] = []
    if isinstance(system, str) and system.strip() and whole_characters(system):
        turns.append({"role": "system", "content": system})
    for turn in listed:
        said = turn if isinstance(turn, dict) else {}
        role, value = said.get("from", said.get("role")), said.get("value", said.get("content"))
        if isinstance(role, str) and isinstance(value, str) and whole_characters(value):
            turns.append({"role": SHAREGPT_ROLES.get(role.lower(), UNREADABLE), "content": value})
        else:
            turns.append({"role": UNREADABLE, "content": ""})
    return turns


def _conversation(record: dict[str, Any], place: str, messages: tuple[Message, ...], *, whole: bool) -> Conversation:
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
    name = str(record.get("id", without_folders(place)))
    for key, value in (("id", name), ("source", said.get("source", ""))):
        if not whole_characters(value):
            raise UserError(f"{place}: {key} holds half a surrogate pair; whole characters are needed")
    if said.get("split", "train") not in SPLITS:
        raise UserError(f"{place}: split is {said['split']!r}{near(said['split'], SPLITS)}")
    said["cut"] = said.get("cut", False) and whole
    return Conversation(name, messages, **said)
