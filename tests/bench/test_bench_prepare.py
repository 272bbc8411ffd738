"""`bench prepare` on the tiny lab: both sides answer the same prompts alike, and are told apart honestly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import Bench

PROMPTS = [{"turns": ["why" * (i % 5 + 1)]} for i in range(9)]


@pytest.fixture
def asked(tmp_path: Path) -> str:
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))
    return str(tmp_path / "asked.jsonl")


def measured(bench: Bench, asked: str, folder: Path, *words: str) -> tuple[dict, str]:
    common = ("--prompts", asked, "--count", "9", "--rows", "4", "--tokens", "5", "--pairs", "2")
    ran = bench.run("bench prepare", *common, "--json", str(folder / "x.json"), *words)
    assert ran.code == 0, ran.err
    return json.loads((folder / "x.json").read_text()), ran.out


@pytest.mark.parametrize("pack", ["true", "false"])
def test_both_sides_make_the_same_answers_of_the_same_lengths(
    pack: str, bench: Bench, asked: str, tmp_path: Path
) -> None:
    found, out = measured(bench, asked, tmp_path, "--target.pack", pack)
    ours, *theirs = found["sides"].values()
    assert len(theirs) == (2 if pack == "true" else 1)
    for side in (ours, *theirs):
        assert side["tokens"] == 9 * 5 and len(side["all_seconds"]) == 2
        assert side["tokens_per_s"] == pytest.approx(45 / side["seconds"])
    for name, side in list(found["sides"].items())[1:]:
        assert side["equal_answers"] == 1.0, "greedy, and the tiny target leaves no near ties"
        value, low, high = (side["ours_times_as_fast"][key] for key in ("value", "low", "high"))
        assert value == pytest.approx(sum(side["all_seconds"]) / sum(ours["all_seconds"])) and low <= value <= high
        assert name in out and "100% of answers equal" in out


def test_answers_may_end_before_and_may_be_drawn(bench: Bench, asked: str, tmp_path: Path) -> None:
    found, _ = measured(bench, asked, tmp_path, "--ends", "true", "--tokens", "40")
    lengths = {side["tokens"] for side in found["sides"].values()}
    assert len(lengths) == 1 and 9 <= lengths.pop() < 9 * 40
    found, out = measured(bench, asked, tmp_path, "--temperature", "0.9", "--top_p", "0.8")
    assert {side["tokens"] for side in found["sides"].values()} == {45} and "temperature 0.9, top-p 0.8" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pairs", "0"), "--pairs: must be >= 1, got 0"),
        (("--count", "10"), "--count: 10, but ASKED has 9 prompts; a smaller number"),
        (("--tokens", "300"), "--tokens: 300 behind a prompt of "),
        (("--top_p", "1.5"), "--top-p: must lie in (0, 1], got 1.5"),
        (("--temperature", "1e-45"), "--temperature: must be 0 or at least 1e-06, got 1e-45"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    words: tuple[str, ...], said: str, bench: Bench, asked: str
) -> None:
    ran = bench.run("bench prepare", "--prompts", asked, "--count", "9", *words)
    assert ran.code == 2
    (line,) = ran.complaints
    assert line.startswith(said.replace("ASKED", asked))
