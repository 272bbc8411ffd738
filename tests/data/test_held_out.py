from __future__ import annotations

import pytest

from eagle3_lab.data.chat import Message
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.held_out import candidates, in_fixed_order, without
from eagle3_lab.errors import UserError


def conversation(
    name: str, temperature: float | None = 0.0, split: str = "", question: str = "", exact: bool = True
) -> Conversation:
    messages: tuple[Message, ...] = (
        {"role": "user", "content": question or name},
        {"role": "assistant", "content": "a"},
    )
    return Conversation(name, messages, temperature=temperature, split=split, exact=exact)


def names(some: list[Conversation]) -> set[str]:
    return {one.id for one in some}


MARKED = [
    conversation("g1", split="held_out"),
    conversation("g2", split="held_out"),
    conversation("warm", 0.8, split="held_out"),
    conversation("reads otherwise", split="held_out", exact=False),
    conversation("t1", split="train"),
    conversation("t2", 0.8),
]


def test_marked_greedy_conversations_are_held_out_and_nothing_marked_is_trained_on() -> None:
    found = candidates(MARKED, None)
    assert names(found.held_out) == {"g1", "g2"} and found.wanted == 2
    assert names(found.train) == {"t1", "t2"}
    assert candidates(MARKED, 1).wanted == 1
    assert candidates(MARKED, 0).wanted == 0 and names(candidates(MARKED, 0).train) == {"t1", "t2"}


def test_marked_conversations_that_cannot_validate_are_counted_by_reason() -> None:
    assert candidates(MARKED, None).unfit == {
        "marked as held out, but not known to be greedy": 1,
        "marked as held out, but its text reads back as other tokens than were written": 1,
    }
    assert not candidates([conversation("a"), conversation("b", 0.8)], None).unfit


def test_without_marks_a_share_of_the_greedy_ones_is_held_out() -> None:
    some = [conversation(f"g{i}") for i in range(40)] + [conversation(f"w{i}", 0.8) for i in range(40)]
    assert candidates(some, None).wanted == 2
    assert candidates(some, 0.25).wanted == 10
    assert candidates(some, 7).wanted == 7
    assert candidates(some, 0.001).wanted == 1
    assert all(one.temperature == 0 for one in candidates(some, None).held_out)
    assert len(candidates(some, None).train) == 80


def test_where_nothing_is_greedy_holding_out_is_an_error_unless_declined() -> None:
    some = [conversation("a", None), conversation("b", 0.8)]
    with pytest.raises(UserError, match="held_out: no conversation is known to be greedy"):
        candidates(some, None)
    assert len(candidates(some, 0).train) == 2


def test_the_order_is_fixed_by_ids_and_not_by_the_file() -> None:
    some = [conversation(f"c{i}") for i in range(20)]
    order = [one.id for one in in_fixed_order(some)]
    assert order == [one.id for one in in_fixed_order(some[::-1])]
    assert order != [one.id for one in some]


def test_no_held_out_question_is_trained_on_under_another_id() -> None:
    some = [conversation("a", question="Why?"), conversation("b", 0.8, question="  Why? "), conversation("c")]
    report = Report("train")
    assert names(without(some, some[:1], report)) == {"c"}
    assert report.dropped == {"asks a held-out question": 1}, "the held-out one itself is not a loss"
