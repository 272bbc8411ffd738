"""Which keys of a record, or columns of a set, become a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_lab.data.conversations import read_sharegpt, read_turns
from eagle3_lab.data.records import name_of, names, say, whole_characters
from eagle3_lab.data.turns import Message, Tools, definitions, with_record
from eagle3_lab.errors import UserError, near

NAMED_BY_THEMSELVES = ("messages", "conversations", "turns")


@dataclass(frozen=True)
class Fields:
    """A field map. With nothing named, a record says it itself: ``messages``, ``conversations`` or ``turns``, and
    beside them ``system`` and ``tools``. Where ``question`` is named, only the columns that are named are read.

    Args:
        messages: the column of a list of turns, each with ``role`` and ``content`` or ``from`` and ``value``.
        question: instead, the columns whose non-empty texts, a line each, are the one question; a column that holds
            a list of texts is several questions.
        answer: the column of the answer to that question; only read where answers are taken as they stand.
        system: the column of a system turn.
        id: the column of a conversation's name; null: its place.
        before: is put before the question.

    Raises:
        ValueError: a map that contradicts itself.
    """

    messages: str | None = None
    question: tuple[str, ...] = ()
    answer: str | None = None
    system: str | None = None
    id: str | None = None
    before: str = ""

    def __post_init__(self) -> None:
        if self.messages is not None and (self.question or self.answer or self.before):
            raise ValueError(f"fields.messages is {self.messages!r}: question, answer and before must be left out")
        if not self.question and (self.answer or self.before):
            raise ValueError("fields.question must name a column where answer or before is given, got none")

    def name(self, record: Mapping[str, Any], place: str, called: str) -> str:
        """The conversation's id; ``called``, where the record says none."""
        if self.id is not None:
            values = [_value(record, self.id, "id", place)]
        else:
            values = [record.get("id"), record.get("question_id")]
        name = name_of(values, called)
        if not whole_characters(name):
            raise UserError(f"{place}: its id holds half a surrogate pair; whole characters are needed")
        return name

    def turns(self, record: Mapping[str, Any], place: str) -> list[Message]:
        """All turns of a record; what cannot be read is a turn without text.

        Raises:
            UserError: a map that does not fit, or a record that says nothing by itself.
        """
        system = None if self.system is None else _value(record, self.system, "system", place) or ""
        if self.messages is not None:
            turns = read_sharegpt(_value(record, self.messages, "messages", place), place, self.messages)
            return with_record(record, turns, system)
        if self.question:
            return self._asked(record, place)
        for column in ("messages", "conversations"):
            if column in record and system is not None:
                return with_record(record, read_sharegpt(record[column], place, column), system)
        if "messages" in record or "conversations" in record:
            return read_turns(dict(record), place)
        if "turns" in record:
            return with_record(record, _questions(record["turns"], place), system)
        raise UserError(
            f"{place}: none of {', '.join(NAMED_BY_THEMSELVES)} among the keys ({names(record)}); one of them, or a "
            "field map (fields: {question: [KEY]}) is needed"
        )

    def tools(self, record: Mapping[str, Any]) -> Tools:
        """The definitions of tools beside a record's turns; none where ``question`` names the columns that are read."""
        return () if self.question else definitions(record)[0]

    def _system(self, record: Mapping[str, Any], place: str) -> list[Message]:
        """The system turn, where a column is named and holds one."""
        if self.system is None or not (system := _value(record, self.system, "system", place)):
            return []
        return [{"role": "system", "content": _text(system, f"{place}: {self.system}")}]

    def _asked(self, record: Mapping[str, Any], place: str) -> list[Message]:
        values = [_value(record, column, "question", place) for column in self.question]
        turns = self._system(record, place)
        if isinstance(values[0], list):
            texts = [_text(value, f"{place}: {self.question[0]}[{i}]") for i, value in enumerate(values[0])]
        else:
            pairs = zip(values, self.question, strict=True)
            texts = ["\n".join(_text(value, f"{place}: {column}") for value, column in pairs if value)]
        turns += [{"role": "user", "content": self.before + text if text else ""} for text in texts]
        if self.answer is not None:
            answer = _value(record, self.answer, "answer", place)
            turns.append({"role": "assistant", "content": _text(answer, f"{place}: {self.answer}") if answer else ""})
        return turns


def _questions(listed: object, place: str) -> list[Message]:
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{place}: turns is {say(listed)}; a list of the user's turns is needed")
    return [{"role": "user", "content": _text(turn, f"{place}: turns[{i}]")} for i, turn in enumerate(listed)]


def _value(record: Mapping[str, Any], column: str, key: str, place: str) -> Any:  # noqa: ANN401
    if column not in record:
        raise UserError(f"{place}: fields.{key}: no column {column!r}{near(column, map(str, record))}")
    return record[column]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not whole_characters(value):
        raise UserError(f"{where} is {say(value)}; a text is needed")
    return value
