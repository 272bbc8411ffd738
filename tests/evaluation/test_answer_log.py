"""The append log of an evaluation: read back complete, an incomplete line removed, a foreign one refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.answer_log import AnswerLog, Place, Turn
from eagle3_lab.types import Decoded, Round

FIRST, SECOND = Place("T0", "chat", 0), Place("T1", "chat", 0)


def turn(place: Place, number: int = 0) -> Turn:
    decoded = Decoded((5, 6, 7), (Round(2, 1, 2), Round(1, 0, 1, 3)), "length", {"draft": 0.25, "verify": 0.5})
    return Turn(place, number, decoded, 0.875)


def begun(path: Path) -> AnswerLog:
    """One prompt of two turns answered by two contestants."""
    log = AnswerLog(path)
    log.begin("run0")
    log.add(FIRST, {"vanilla": [turn(FIRST), turn(FIRST, 1)], "lookup": [turn(FIRST), turn(FIRST, 1)]})
    return log


def test_an_empty_place_knows_nothing_and_writes_nothing(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "work" / "answers.jsonl")
    assert (log.run_id, log.known, log.processes) == (None, {}, 0)
    assert list(tmp_path.iterdir()) == []
    log.remove()


def test_what_was_answered_is_read_back_as_it_was(tmp_path: Path) -> None:
    begun(tmp_path / "work" / "answers.jsonl")
    again = AnswerLog(tmp_path / "work" / "answers.jsonl")
    turns = [turn(FIRST), turn(FIRST, 1)]
    assert again.known == {FIRST: {"vanilla": turns, "lookup": turns}}
    assert (again.run_id, again.processes) == ("run0", 1)
    again.begin("run0")
    again.add(SECOND, {"vanilla": [turn(SECOND)], "lookup": [turn(SECOND)]})
    third = AnswerLog(again.path)
    assert (list(third.known), third.processes) == ([FIRST, SECOND], 2)
    third.remove()
    assert not third.path.exists()


def test_a_line_torn_at_any_byte_costs_that_line_alone(tmp_path: Path) -> None:
    path = begun(tmp_path / "answers.jsonl").path
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for cut in range(begin, len(whole)):
        path.write_bytes(whole[:cut])
        torn = AnswerLog(path)
        assert (torn.known, torn.run_id) == ({}, "run0")
        assert path.read_bytes() == whole[:begin]
    torn.add(FIRST, {"vanilla": [turn(FIRST)]})
    assert list(AnswerLog(path).known) == [FIRST]


@pytest.mark.parametrize(
    "line", ["no JSON", "[]", "{}", '{"law": "T0", "task": "chat", "prompt": 0, "answers": {"a": [{}]}}']
)
def test_a_whole_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    path = begun(tmp_path / "answers.jsonl").path
    damaged = path.read_text() + line + "\n"
    path.write_text(damaged)
    with pytest.raises(
        UserError, match=r"answers\.jsonl:3: is not a response of an evaluation; remove the file"
    ) as told:
        AnswerLog(path)
    assert "\n" not in str(told.value)
    assert path.read_text() == damaged, "no response that is there is removed"


def test_a_place_that_cannot_be_written_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written \(.*\); free space, and run again to continue"):
        AnswerLog(tmp_path / "taken" / "answers.jsonl").begin("run0")
