"""Methods that propose with heads of other experiments, measured beside one another in one process."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tiny import TinyLab
from tiny_runs import Bench, Ran

from eagle3_lab.tracking.run import store_uri

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


def test_a_named_head_draws_where_it_is_told_to(headless: Bench, tmp_path: Path) -> None:
    told = tmp_path / "table.json"
    law = "{class_path: SamplingLaw, init_args: {temperature: 1.0}}"
    ran = headless.run(
        "evaluate",
        "--json",
        str(told),
        "--evaluate.laws",
        f"{{T0: SamplingLaw, T1: {law}}}",
        "--evaluate.methods",
        f"{{drawn: {{class_path: HeadTree, init_args: {{head: {named(headless)}, grow: McSim7b63, law: {law}}}}}}}",
    )
    assert (ran.code, ran.complaints) == (0, [])
    rows = [row for row in json.loads(told.read_text())["methods"] if row["name"] == "drawn"]
    assert len(rows) == 2 and all(sum(row["histogram"]) > 0 for row in rows)


def named(bench: Bench) -> str:
    """What its methods call the head."""
    return bench.yaml.read_text().partition("head: ")[2].partition(",")[0]


def test_a_named_head_is_found_in_its_own_experiments_store_too(headless: Bench, tmp_path: Path) -> None:
    ran = headless.run("evaluate", "--tracking.folder", str(tmp_path / "other"), "--evaluate.tasks.0.limit", "1")
    assert (ran.code, ran.complaints) == (0, [])


def test_what_a_named_head_is_stands_in_the_table_and_in_the_methods_runs(
    headless: Bench, finished: tuple[Bench, Ran]
) -> None:
    trained, _ = finished
    ran = headless.run("evaluate")
    path = trained.work() / "draft.ckpt"
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"note: head of {named(headless)}: {path}, sha256 {sha[:16]}" in ran.out
    client = MlflowClient(store_uri(trained.folder), store_uri(trained.folder))
    run = ran.out.partition("run: ")[2].partition("\n")[0]
    children = client.search_runs([client.get_run(run).info.experiment_id], f"tags.`mlflow.parentRunId` = '{run}'")
    heads = {child.info.run_name: child.data.tags.get("sha256") for child in children}
    assert heads == {"chain": sha, "static": sha, "pld": None, "vanilla float32": None}


def test_all_heads_that_are_not_there_yet_are_named_with_the_command_that_makes_them(
    headless: Bench, finished: tuple[Bench, Ran], tmp_path: Path
) -> None:
    trained, _ = finished
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for seed, file in enumerate(files, start=1):
        file.write_text(f"seed: {seed}\n{trained.yaml.read_text()}")
    text = headless.yaml.read_text()
    headless.yaml.write_text(text.replace(named(headless), str(files[0])))
    line = headless.run("evaluate").complaints[-1]
    assert line.endswith(
        f"{files[0]}: no head of it, as it is written, is in {trained.folder} yet; run `python -m eagle3_lab fit "
        f"{files[0]}` first"
    )
    headless.yaml.write_text(
        text.replace(f"head: {trained.yaml.with_suffix('')}", f"head: {files[0]}", 1).replace(
            f"head: {trained.yaml.with_suffix('')}", f"head: {files[1].with_suffix('')}"
        )
    )
    line = headless.run("evaluate").complaints[-1]
    assert f"no heads of {files[0]}, {files[1]}, as they are written, are in {trained.folder} yet" in line
    assert line.endswith("run `python -m eagle3_lab fit FILE` for each first")


@pytest.mark.slow
def test_a_named_head_that_was_trained_anew_is_measured_anew(
    finished: tuple[Bench, Ran], tiny: TinyLab, tmp_path: Path
) -> None:
    """Beside an own head, whose closing table is otherwise reused."""
    trained, _ = finished
    other, own = tmp_path / "other.yaml", tmp_path / "own.yaml"
    store = f"tracking: {{folder: {tmp_path / 'runs'}}}\n"
    written = re.sub(r"tracking: .*\n", store, trained.yaml.read_text())
    other.write_text(re.sub(r"evaluate:(\n .*)*\n", "", written))
    methods = written.replace("{grow: {class_path: Chain", f"{{head: {other}, grow: {{class_path: Chain")
    own.write_text(f"name: own\n{methods.partition('name: tiny')[2].lstrip()}")
    benches = Bench(other, tmp_path / "runs"), Bench(own, tmp_path / "runs")
    assert benches[0].run("fit").code == 0
    assert benches[1].run("fit").code == 0
    assert "evaluation: reused (unchanged)" in benches[1].run("fit").err
    other.write_text(other.read_text().replace("max_steps: 6", "max_steps: 9"))
    assert benches[0].run("fit").code == 0
    again = benches[1].run("fit")
    assert "training: reused (unchanged)" in again.err
    assert "evaluation: reused (unchanged)" not in again.err


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("experiments/eagel", "chain.head: no experiment 'experiments/eagel'; did you mean 'experiments/eagle.yaml'?"),
        (
            "experiments/evaluate/no_head",
            "no_head.yaml: the experiment has no data, no model, no optimizer, no trainer",
        ),
        ("experiments/eagle.yaml", "eagle.yaml: trains for target 'embedded', this is "),
        ("experiments", "no experiment 'experiments'; it is a folder"),
        ("a" * 300, "no experiment 'aaaa"),
        ("headless", "headless.yaml: leads back to itself; name another experiment, or a draft.ckpt"),
        ("' '", "head must name an experiment, such as experiments/eagle, or be null, got ' '"),
    ],
)
def test_a_name_that_is_no_trained_experiment_is_refused(headless: Bench, head: str, said: str) -> None:
    headless.yaml.write_text(headless.yaml.read_text().replace(named(headless), head))
    ran = headless.run("evaluate")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.complaints[-1]


def test_without_a_head_of_its_own_a_method_must_name_one(headless: Bench) -> None:
    headless.yaml.write_text(headless.yaml.read_text().replace(named(headless), "null", 1))
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
