from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from eagle3_lab.data.tasks import TASKS, Prompt, Task
from eagle3_lab.errors import UserError


def write(folder: Path, *records: object) -> str:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_local_file_gives_its_turns_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]},
        {"turns": ["three"], "category": None},
    )
    assert Task("mine", path).prompts() == [Prompt("81", ("one", "two"), "writing"), Prompt("1", ("three",))]
    assert len(Task("mt_bench", path, limit=1).prompts()) == 1


def test_a_prompt_becomes_the_conversation_up_to_the_next_open_turn() -> None:
    prompt = Prompt("x", ("one", "two"), system="s")
    system = {"role": "system", "content": "s"}
    assert prompt.messages() == [system, {"role": "user", "content": "one"}]
    assert prompt.messages(["a"]) == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turn": ["x"]}, r"p.jsonl:2: no turns; a list of the user's turns is needed"),
        ({"turns": []}, r"p.jsonl:2: turns is a list of 0"),
        ({"turns": "x"}, r'p.jsonl:2: turns is "x"'),
        ({"turns": ["x", None]}, r"p.jsonl:2: turns\[1\] is null; a text is needed"),
        ({"turns": [" "]}, r"turns\[0\] is"),
        ({"turns": ["x"], "question_id": 1}, r"p.jsonl:2: question_id 1 a second time"),
    ],
)
def test_a_broken_prompt_is_named_with_its_line(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Task("mine", write(tmp_path, {"question_id": 1, "turns": ["x"]}, record)).prompts()


def test_a_broken_prompt_is_told_with_the_folder_that_tells_its_file_from_others(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": []})
    with pytest.raises(UserError) as told:
        Task("mine", path).prompts()
    assert str(told.value).startswith(f"{path}:1: turns is a list of 0")


def test_an_unknown_task_is_told_the_nearest_name_and_a_bad_limit_its_range() -> None:
    with pytest.raises(UserError, match="unknown name 'mtbench'.*did you mean 'mt_bench'"):
        Task("mtbench")
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        Task("gsm8k", limit=0)
    with pytest.raises(ValueError, match="path must name a .jsonl, .jsonl.gz or .json file, or be null, got ''"):
        Task("mine", "")


def test_held_out_prompts_come_from_the_data() -> None:
    prompts = [Prompt("a", ("q",)), Prompt("b", ("r",))]
    assert Task("held_out", limit=1).prompts(prompts) == prompts[:1]
    with pytest.raises(UserError, match="needs the experiment's data section"):
        Task("held_out").prompts()
    with pytest.raises(UserError, match="no prompts"):
        Task("held_out").prompts([])


ROWS = {
    "mt_bench": ({"prompt": ["one", "two"], "category": "math", "prompt_id": 5}, Prompt("0", ("one", "two"), "math")),
    "humaneval": ({"prompt": "def f():"}, Prompt("0", ("Complete the code I provided.\n\ndef f():",), "code")),
    "gsm8k": ({"question": "2+2?", "answer": "4"}, Prompt("0", ("2+2?",), "math")),
    "alpaca": ({"instruction": "Add.", "input": "1, 2", "output": "3"}, Prompt("0", ("Add.\n1, 2",), "instruction")),
    "cnn_dm": ({"article": "News.", "highlights": ""}, Prompt("0", ("Summarize: News.",), "summarization")),
}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_hub_row_becomes_a_prompt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row, expected = ROWS[name]
    asked: list[tuple[object, ...]] = []

    def load(*args: object, split: str) -> list[dict[str, object]]:
        asked.append((*args, split))
        return [row, row]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert Task(name, limit=1).prompts() == [expected]
    assert asked == [(TASKS[name].name, TASKS[name].config, TASKS[name].split)]


def test_an_empty_alpaca_input_adds_no_line() -> None:
    assert TASKS["alpaca"].turns({"instruction": "Add.", "input": ""}) == ("Add.",)


def test_a_hub_that_cannot_be_reached_says_that_a_file_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, split: str) -> object:
        raise ConnectionError("Couldn't reach the Hub\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"gsm8k cannot be loaded \(Couldn't reach the Hub at all\); give a local file"):
        Task("gsm8k").prompts()


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_handed_evaluation_files_load(data_dir: Path, name: str) -> None:
    prompts = Task(name, str(data_dir / "eval" / f"{name}.jsonl")).prompts()
    assert len(prompts) == 40
    assert {len(one.turns) for one in prompts} == ({2} if name == "mt_bench" else {1})
