from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.overlap import Overlap, measured_on, normalised, unmeasured
from eagle3_lab.data.parts import divide
from eagle3_lab.data.tasks import Task

WORDS = [f"w{i}" for i in range(30)]


def text(start: int, stop: int) -> str:
    return " ".join(WORDS[start:stop])


def test_case_punctuation_space_and_width_do_not_tell_texts_apart() -> None:
    assert normalised("  What’s\n2+2 ?") == normalised("ＷＨＡＴ'S 2 2") == "what s 2 2"
    assert normalised("?!") == ""


def test_thirteen_shared_words_in_a_row_overlap_and_twelve_do_not() -> None:
    found = Overlap([("long", text(0, 30))])
    assert found([f"x {text(5, 18)} y"]) == "long"
    assert found([f"x {text(5, 17)} y"]) == ""
    assert found([f"{text(0, 12)} x {text(12, 24)}"]) == ""


def test_a_prompt_of_six_to_twelve_words_overlaps_where_it_stands_as_a_whole() -> None:
    found = Overlap([("six", text(0, 6)), ("twelve", text(10, 22)), ("five", text(25, 30))])
    assert found([f"x {text(0, 6)} y"]) == "six"
    assert found([f"x {text(0, 5)} y"]) == ""
    assert found([f"x {text(10, 22)} y"]) == "twelve"
    assert found([f"x {text(25, 30)} y"]) == "", "five words stand in many texts"
    assert found([text(25, 30).upper() + "?"]) == "five", "but an equal text is the same prompt"


def test_any_turn_may_overlap_and_nothing_overlaps_with_nothing() -> None:
    found = Overlap([("six", text(0, 6)), ("empty", "?!")])
    assert found(["x", text(0, 6)]) == "six"
    assert found(["?!", ""]) == ""
    assert Overlap([])([text(0, 30)]) == ""


def test_tasks_are_looked_up_and_overlapping_conversations_counted_by_set(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"turns": ["first", text(0, 14)]}) + "\n")
    overlap = measured_on([Task("mine", str(file)), Task("held_out")])
    talks = [
        Conversation(str(i), ({"role": "user", "content": asked}, {"role": "assistant", "content": text(0, 14)}))
        for i, asked in enumerate(["other", text(0, 13), "FIRST!"])
    ]
    report = Report("train")
    assert [one.id for one in unmeasured(talks, overlap, report)] == ["0"], "answers are not compared"
    assert report.dropped == {"overlaps with mine": 2}


def test_progress_counts_the_conversations_that_overlap_as_they_are_found(chatml: PreTrainedTokenizerFast) -> None:
    """On a long list the search is most of the work: it must not be over before anything is shown."""
    seen: list[str] = []

    class Watching(Overlap):
        def __call__(self, texts: Iterable[str]) -> str:
            seen.append("looked")
            return super().__call__(texts)

    talks = [
        Conversation(
            str(i), ({"role": "user", "content": asked}, {"role": "assistant", "content": "a"}), temperature=0.0
        )
        for i, asked in enumerate([text(0, 14), "one", text(0, 13), "two"])
    ]
    parts = divide(
        [talks],
        Chat(chatml),
        max_length=100,
        over_length="drop",
        held_out=0,
        limit=None,
        measured=Watching([("set", text(0, 13))]),
        on_done=lambda count: seen.extend(["done"] * count),
    )
    assert {one.conversation.id for one in parts.train} == {"1", "3"}
    assert parts.reports[0].dropped == {"overlaps with set": 2}
    assert seen == ["looked", "done"] * 4


def test_the_handed_prompts_are_free_of_the_handed_evaluation_sets(data_dir: Path) -> None:
    """Their notice says that they were cleaned; and one that is put in is found."""
    tasks = [Task(file.stem, str(file)) for file in sorted((data_dir / "eval").glob("*.jsonl"))]
    overlap = measured_on(tasks)
    for file in sorted((data_dir / "train_prompts").glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            turns = [turn["content"] for turn in json.loads(line)["messages"]]
            assert overlap(turns) == "", (file.name, turns)
    for task in tasks:
        for prompt in task.prompts()[:5]:
            assert overlap([f"Please: {prompt.turns[0]}"]) or len(normalised(prompt.turns[0]).split()) < 6


@pytest.mark.parametrize("size", [0, 1])
def test_a_text_shorter_than_a_gram_has_none(size: int) -> None:
    assert Overlap([("long", text(0, 20))])([text(0, size)]) == ""
