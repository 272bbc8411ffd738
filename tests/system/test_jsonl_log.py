from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import AppendLog, open_append_log

STEPS = {"a": ["größer\u2028", 1], "b": [], "c": {"x": None}}


def fill(log: AppendLog) -> list[str]:
    """Go through all steps and return those that were computed."""
    computed: list[str] = []

    def compute(name: str) -> object:
        computed.append(name)
        return STEPS[name]

    for name, value in STEPS.items():
        assert log.step(name, lambda name=name: compute(name)) == value
    return computed


def test_a_job_killed_at_any_byte_makes_the_missing_steps_again_and_ends_in_the_same_file(tmp_path: Path) -> None:
    with open_append_log(tmp_path / "whole") as log:
        assert fill(log) == list(STEPS)
    whole = (tmp_path / "whole").read_bytes()
    for size in range(len(whole) + 1):
        place = tmp_path / "killed"
        place.write_bytes(whole[:size])
        with open_append_log(place) as log:
            assert fill(log) == list(STEPS)[whole[:size].count(b"\n") :]
        assert place.read_bytes() == whole


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path: Path) -> None:
    line = json.dumps({"step": "a", "value": STEPS["a"]}).encode() + b"\n"
    (tmp_path / "j").write_bytes(line + b"\0" * 50 + b"\n" + line)
    with open_append_log(tmp_path / "j") as log:
        assert fill(log) == ["b", "c"]


def test_values_are_found_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    with open_append_log(tmp_path / "j") as log:
        fill(log)
        assert log.values("b") == [[]] and len(log.values("")) == 3


def test_two_jobs_on_one_log_are_refused_and_its_lock_is_removed(tmp_path: Path) -> None:
    again = pytest.raises(UserError, match=r"j: another process is at the same work")
    with open_append_log(tmp_path / "j"), again, open_append_log(tmp_path / "j"):
        pass
    with open_append_log(tmp_path / "j"):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["j"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/j: cannot be written"), open_append_log(tmp_path / "file" / "j"):
        pass


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"step": 1, "value": 2}', '{"step": "b"}'])
def test_a_line_that_no_log_wrote_and_all_behind_it_are_dropped(line: str, tmp_path: Path) -> None:
    first = json.dumps({"step": "a", "value": STEPS["a"]})
    (tmp_path / "j").write_text(f"{first}\n{line}\n{first}\n")
    with open_append_log(tmp_path / "j") as log:
        assert fill(log) == ["b", "c"]


def test_a_job_that_another_process_has_just_finished_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "j"
    place.touch()
    acquire = FileLock.acquire

    def acquire_late(lock: FileLock, **options: float) -> object:
        place.unlink()  # the other process's last act, before it unlocks
        return acquire(lock, **options)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    just_finished = pytest.raises(UserError, match="another process has just finished the same work; run again")
    with just_finished, open_append_log(place):
        pass
