from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import Journal, journal

STEPS = {"a": ["größer\u2028", 1], "b": [], "c": {"x": None}}


def fill(kept: Journal) -> list[str]:
    """Go through all steps; which of them had to be made."""
    made: list[str] = []

    def make(name: str) -> object:
        made.append(name)
        return STEPS[name]

    for name, value in STEPS.items():
        assert kept.step(name, lambda name=name: make(name)) == value
    return made


def test_a_job_killed_at_any_byte_makes_the_missing_steps_again_and_ends_in_the_same_file(tmp_path: Path) -> None:
    with journal(tmp_path / "whole") as kept:
        assert fill(kept) == list(STEPS)
    whole = (tmp_path / "whole").read_bytes()
    for size in range(len(whole) + 1):
        place = tmp_path / "killed"
        place.write_bytes(whole[:size])
        with journal(place) as kept:
            assert fill(kept) == list(STEPS)[whole[:size].count(b"\n") :]
        assert place.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path: Path) -> None:
    line = json.dumps({"step": "a", "value": STEPS["a"]}).encode() + b"\n"
    (tmp_path / "j").write_bytes(line + b"\0" * 50 + b"\n" + line)
    with journal(tmp_path / "j") as kept:
        assert fill(kept) == ["b", "c"]


def test_steps_are_known_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    with journal(tmp_path / "j") as kept:
        fill(kept)
        assert kept.known("b") == [[]] and len(kept.known("")) == 3


def test_two_jobs_on_one_journal_are_refused(tmp_path: Path) -> None:
    again = pytest.raises(UserError, match=r"j: another process is at the same work")
    with journal(tmp_path / "j"), again, journal(tmp_path / "j"):
        pass
    with journal(tmp_path / "j"):
        pass


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/j: cannot be written"), journal(tmp_path / "file" / "j"):
        pass


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"step": 1, "value": 2}', '{"step": "b"}'])
def test_a_line_that_no_journal_wrote_and_all_behind_it_are_dropped(line: str, tmp_path: Path) -> None:
    first = json.dumps({"step": "a", "value": STEPS["a"]})
    (tmp_path / "j").write_text(f"{first}\n{line}\n{first}\n")
    with journal(tmp_path / "j") as kept:
        assert fill(kept) == ["b", "c"]


def test_a_job_that_another_process_has_just_finished_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "j"

    def flock(descriptor: int, how: int) -> None:
        place.unlink()  # the other one's last act, before it lets go

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match="another process has just finished the same work; run again"), journal(place):
        pass
