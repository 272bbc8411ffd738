"""Methods that propose with heads of other experiments, measured beside one another in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import Bench, Ran
from tiny import TinyLab

ASKED = """
evaluate:
  tasks: [{{name: held_out, limit: 2}}]
  max_new_tokens: 8
  methods:
    chain: {{class_path: HeadTree, init_args: {{head: {head}, grow: {{class_path: Chain, init_args: {{length: 3}}}}}}}}
    static: {{class_path: HeadTree, init_args: {{head: {head}, grow: McSim7b63}}}}
    pld: PromptLookup
"""


@pytest.fixture
def headless(finished: tuple[Bench, Ran], tiny: TinyLab, tmp_path: Path) -> Bench:
    """An experiment that trains nothing and names the head of the one that is finished."""
    trained, _ = finished
    yaml = tmp_path / "headless.yaml"
    begins = f"name: headless\ntarget: {{model: {tiny.target}}}\n"
    data = f"data: {{path: {tiny.data}, max_length: 96, row_length: 128}}\n"
    store = f"tracking: {{folder: {trained.folder}}}\n"
    yaml.write_text(begins + data + store + ASKED.format(head=trained.yaml.with_suffix("")))
    return Bench(yaml, trained.folder)


def test_a_named_head_answers_as_in_its_own_experiment(
    headless: Bench, finished: tuple[Bench, Ran], tmp_path: Path
) -> None:
    trained, _ = finished
    told = tmp_path / "table.json"
    ran = headless.run("evaluate", "--json", str(told))
    assert (ran.code, ran.complaints) == (0, [])
    words = (
        "--evaluate.methods",
        "{chain: {class_path: HeadTree, init_args: {grow: {class_path: Chain, init_args: {length: 3}}}}}",
    )
    own = tmp_path / "own.json"
    assert (
        trained.run(
            "evaluate", "--json", str(own), "--evaluate.max_new_tokens", "8", "--evaluate.tasks.0.limit", "2", *words
        ).code
        == 0
    )
    here, there = ({row["name"]: row for row in json.loads(file.read_text())["methods"]} for file in (told, own))
    assert here["chain"]["histogram"] == there["chain"]["histogram"]
    assert sum(here["chain"]["histogram"]) > 0


def test_a_head_that_is_not_there_yet_is_named_with_the_command_that_makes_it(headless: Bench, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    ran = headless.run("evaluate", "--tracking.folder", str(empty))
    head = headless.yaml.read_text().partition("head: ")[2].partition(",")[0]
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaints[-1] == (
        f"evaluate.methods.chain.head: {head}.yaml: no head of it is in {empty} yet; run `python -m eagle3_lab fit "
        f"{head}.yaml` first"
    )


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("experiments/eagel3", "evaluate.methods.chain.head: no file experiments/eagel3.yaml; did you mean"),
        ("experiments/no_head", "the experiment has no data, no model, no optimizer, no trainer"),
        ("' '", "head must name an experiment, such as experiments/eagle, or be null, got ' '"),
    ],
)
def test_a_name_that_is_no_trained_experiment_is_refused(headless: Bench, head: str, said: str) -> None:
    text = headless.yaml.read_text()
    named = text.partition("head: ")[2].partition(",")[0]
    headless.yaml.write_text(text.replace(named, head))
    ran = headless.run("evaluate")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.complaints[-1]


def test_without_a_head_of_its_own_a_method_must_name_one(headless: Bench) -> None:
    text = headless.yaml.read_text()
    named = text.partition("head: ")[2].partition(",")[0]
    headless.yaml.write_text(text.replace(named, "null", 1))
    ran = headless.run("evaluate")
    assert ran.code == 2
    assert ran.complaints[-1].startswith(
        "evaluate.methods.chain: needs a trained head, and the experiment has no model"
    )


def test_a_draft_model_is_chosen_or_named_not_both(headless: Bench) -> None:
    text = headless.yaml.read_text()
    both = "{class_path: DraftLM, init_args: {target: {model: x}, head: experiments/sps}}"
    headless.yaml.write_text(text.replace("PromptLookup", both))
    ran = headless.run("evaluate")
    assert ran.code == 2
    assert (
        "head 'experiments/sps' names who trained the draft model, and target another one; give one"
        in ran.complaints[-1]
    )
