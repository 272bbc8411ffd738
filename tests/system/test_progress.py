"""What a stage says, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from eagle3_lab.system.progress import duration, rate, stage


class Clock:
    """Seconds that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_at_the_start_every_five_seconds_and_at_the_end() -> None:
    out, clock = io.StringIO(), Clock()
    with stage("answers", "prompts", total=32, budget_s=60, out=out, clock=clock) as s:
        for _ in range(32):
            clock.now += 1.5
            s.advance(1, tokens=48)
    lines = out.getvalue().splitlines()
    assert lines[0] == "answers: 0/32 prompts, budget 60 s"
    assert lines[1] == "answers: 4/32 prompts, 32 tokens/s, 42 s left, budget 60 s"
    assert lines[-1] == "answers: 32 prompts in 48 s (budget 60 s), 32 tokens/s"
    assert len(lines) == 2 + 32 // 4


def test_a_terminal_gets_one_line_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out, clock = Terminal(), Clock()
    with stage("features", "rows", total=4, out=out, clock=clock) as s:
        for seconds in (0.05, 0.06, 2.0):
            clock.now += seconds
            s.advance()
    shown = out.getvalue().split("\r\x1b[K")[1:]
    # The first advance comes too soon to be shown; lines are cut to the terminal, the last one is not.
    assert shown == [
        "features: 0/4 rows",
        "features: 2/4 rows,",
        "features: 3/4 rows,",
        "features: 3 rows in 2.1 s, 1.4 rows/s\n",
    ]


def test_a_stage_over_its_budget_says_so() -> None:
    out, clock = io.StringIO(), Clock()
    with stage("train", total=10, budget_s=120, out=out, clock=clock) as s:
        clock.now += 130
        s.advance(10)
    assert out.getvalue().splitlines()[-1] == "train: 10 steps in 2 min 10 s (over its budget 2 min 0 s), 0.077 steps/s"


def test_a_reused_stage_says_so() -> None:
    out = io.StringIO()
    with stage("answers", "prompts", total=32, budget_s=120, out=out) as s:
        s.reused()
    assert out.getvalue().splitlines()[-1] == "answers: reused (unchanged)"


def test_a_stage_that_breaks_says_how_far_it_came_and_lets_the_error_through() -> None:
    out, clock = io.StringIO(), Clock()
    with pytest.raises(KeyboardInterrupt), stage("answers", "prompts", total=32, out=out, clock=clock) as s:
        s.advance(3)
        clock.now += 14
        raise KeyboardInterrupt
    assert out.getvalue().splitlines()[-1] == "answers: stopped at 3 of 32 prompts after 14 s"


def test_an_instant_stage_has_no_rate_and_no_division_error() -> None:
    out = io.StringIO()
    with stage("nothing", out=out, clock=Clock()) as s:
        s.advance(5)
    assert out.getvalue().splitlines()[-1] == "nothing: 5 steps in 0.0 s"


def test_it_goes_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("x"):
        pass
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("x: 0 steps\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (48, "48 s"), (99.6, "1 min 40 s"), (3599.7, "1 h 0 min"), (5000, "1 h 23 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(42, "0.42"), (310, "3.1"), (3100, "31"), (123456, "1235")])
def test_rates_have_three_digits_or_the_whole_number(count: int, text: str) -> None:
    assert rate(count, 100.0) == text
