"""`evaluate` over tasks x laws x methods on the tiny target, with and without a head, in one piece and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run as StoredRun
from mlflow.tracking import MlflowClient
from tiny import TinyLab
from tiny_runs import Bench, Ran

import eagle3_lab
from eagle3_lab import load
from eagle3_lab.data.tasks import Prompt
from eagle3_lab.evaluation.answer_log import Place, Turn
from eagle3_lab.evaluation.runner import _Player
from eagle3_lab.pipeline.context import RunContext, open_evaluation, tracked, with_heads
from eagle3_lab.pipeline.log_results import log_closing
from eagle3_lab.pipeline.measure import measure, open_answer_log
from eagle3_lab.tracking.run import store_uri

EXPERIMENT = """\
# Nothing is trained: plain decoding, prompt lookup, and the target as its own draft.
name: plain
target: {{model: {target}}}
evaluate:
  tasks:
    - {{name: short, path: {folder}/short.jsonl}}
    - {{name: turns, path: {folder}/turns.jsonl}}
  max_new_tokens: 10
  laws:
    T0: SamplingLaw
    T1: {{class_path: SamplingLaw, init_args: {{temperature: 1.0}}}}
  methods:
    pld: {{class_path: PromptLookup, init_args: {{length: 3, full: false}}}}
    itself: {{class_path: DraftLM, init_args: {{target: {{model: {target}}}, length: 2, adaptive: false}}}}
tracking: {{folder: {folder}/mlruns}}
"""
ANSWERS = (2 + 2 * 2) * 2 * 3  # turns, laws, methods


@pytest.fixture
def plain(tiny: TinyLab, tmp_path: Path) -> Bench:
    return make_plain(tiny, tmp_path)


@pytest.fixture(scope="module")
def measured(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Ran, dict[str, Any]]:
    """The evaluation run once to its end: what it said, and its table for machines."""
    bench = make_plain(tiny, tmp_path_factory.mktemp("measured"))
    ran = bench.run("evaluate", "--json", str(bench.yaml.with_name("table.json")))
    assert ran.code == 0, ran.err
    return bench, ran, json.loads(bench.yaml.with_name("table.json").read_text())


def make_plain(tiny: TinyLab, folder: Path) -> Bench:
    """Two prompts of one turn, and two of two turns."""
    (folder / "short.jsonl").write_text('{"turns": ["abc abc"]}\n{"turns": ["dd ee dd"]}\n')
    (folder / "turns.jsonl").write_text('{"turns": ["a", "and then"]}\n{"turns": ["e f", "g"]}\n')
    yaml = folder / "plain.yaml"
    yaml.write_text(EXPERIMENT.format(target=tiny.target, folder=folder))
    return Bench(yaml, folder / "mlruns")


def client(bench: Bench) -> MlflowClient:
    return MlflowClient(store_uri(bench.folder), store_uri(bench.folder))


def runs(bench: Bench) -> tuple[list[StoredRun], list[StoredRun]]:
    """Runs of their own, and runs below them by name."""
    ids = [experiment.experiment_id for experiment in client(bench).search_experiments()]
    found = client(bench).search_runs(ids)
    children = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    return [run for run in found if run not in children], sorted(children, key=lambda run: run.info.run_name)


# ---------------------------------------------------------------------------------------------------------- the table


def test_every_method_is_measured_on_every_task_under_every_law(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    _, ran, table = measured
    assert ran.complaints == []
    assert f"evaluation: {ANSWERS} answers in" in ran.err
    places = {(row["law"], row["task"], row["name"]) for row in table["methods"]}
    names = ("vanilla", "pld", "itself")
    assert places == {(law, task, name) for law in ("T0", "T1") for task in ("short", "turns") for name in names}
    assert {(o["law"], o["name"]) for o in table["overall"]} == {(law, n) for law in ("T0", "T1") for n in names}
    assert table["one_pass"] is None and table["notes"] == []


def test_greedy_answers_are_vanillas_and_drawn_ones_are_drawn(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    bench, _, _ = measured
    ((parent,), _) = runs(bench)
    file = client(bench).download_artifacts(parent.info.run_id, "answers.jsonl", str(bench.yaml.parent))
    told = [json.loads(line) for line in Path(file).read_text().splitlines()][1:]
    said = {(t["law"], t["task"], t["prompt"]): t["answers"] for t in told}
    assert len(said) == 4 * 2
    for (law, _, _), answers in said.items():
        texts = {name: [turn["tokens"] for turn in turns] for name, turns in answers.items()}
        if law == "T0":
            assert texts["pld"] == texts["itself"] == texts["vanilla"]
    assert said["T0", "short", 0]["vanilla"] != said["T1", "short", 0]["vanilla"]


def test_the_target_as_its_own_draft_accepts_every_greedy_draft(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    _, _, table = measured
    (row,) = [r for r in table["methods"] if (r["law"], r["task"], r["name"]) == ("T0", "short", "itself")]
    assert row["n_alpha"][0] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert row["tau"]["value"] > 2


def test_a_mean_is_that_of_its_tasks_and_vanilla_is_the_baseline(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    _, _, table = measured
    for overall in table["overall"]:
        own = [r for r in table["methods"] if (r["law"], r["name"]) == (overall["law"], overall["name"])]
        for key in ("tau", "speedup", "tokens_per_s"):
            mean = sum(row[key]["value"] for row in own) / 2
            assert overall[key]["value"] == pytest.approx(mean)
            assert overall[key]["low"] <= overall[key]["value"] <= overall[key]["high"]
        assert overall["pooled"]["tokens"] == sum(row["tokens"] for row in own)
        if overall["name"] == "vanilla":
            assert overall["speedup"]["value"] == overall["tau"]["value"] == 1


def test_the_text_has_a_column_a_task_and_their_mean(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    _, ran, _ = measured
    blocks = [block.splitlines() for block in ran.out.split("\n\n")]
    for law in ("T0", "T1"):
        for what in ("speed-up [95 %]", "tau [95 %]"):
            (block,) = [b for b in blocks if b[0].startswith(f"{law}: {what}")]
            assert block[0].removeprefix(f"{law}: {what}").split() == ["short", "turns", "mean"]
            assert [line.split(",")[0] for line in block[2:]] == ["vanilla", "pld", "itself"]
        (tidy,) = [b for b in blocks if b[0].startswith(f"{law}: tau without loops (their share)")]
        assert all(line.count("%)") == 3 for line in tidy[2:])
    assert "T0: greedy; T1: temperature 1; short, turns: at most 10 tokens an answer" in blocks[0][0]
    assert "checkpoint: none" in ran.out


def test_one_task_under_one_law_closes_as_plainly_as_ever(plain: Bench) -> None:
    words = ("--evaluate.laws", "null", "--evaluate.tasks", f"[{{name: one, path: {plain.yaml.parent}/short.jsonl}}]")
    ran = plain.run("evaluate", *words)
    assert (ran.code, ran.complaints) == (0, [])
    heads = [block.splitlines()[0].split("  ")[0] for block in ran.out.split("\n\n")[1:5]]
    assert heads == ["method", "n-alpha", "rounds by accepted drafts", "time"]
    ((run,), children) = runs(plain)
    assert run.data.metrics["eval/tau/itself"] > 1
    assert children[0].data.metrics["T0/one/tau"] == run.data.metrics["eval/tau/itself"]


def test_who_answers_first_changes_from_prompt_to_prompt_and_from_law_to_law(
    plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: dict[Place, list[str]] = {}
    answer = _Player.answer

    def seen(player: _Player, place: Place, prompt: Prompt) -> Iterator[Turn]:
        order.setdefault(place, []).append(player.name)
        return answer(player, place, prompt)

    monkeypatch.setattr(_Player, "answer", seen)
    ran = plain.run("evaluate", "--evaluate.methods", "{pld: PromptLookup}", "--evaluate.max_new_tokens", "2")
    assert ran.code == 0, ran.err
    first, second = ["vanilla", "pld"], ["pld", "vanilla"]
    assert list(order.values()) == [first, second, second, first] * 2, "two laws, and four prompts"


def test_plain_decoding_under_a_name_of_its_own_is_a_method_like_any_other(plain: Bench) -> None:
    words = ("--evaluate.laws", "null", "--evaluate.methods", "{again: Vanilla}", "--evaluate.other_dtype", "float64")
    ran = plain.run("evaluate", *words, "--json", str(plain.yaml.with_name("table.json")))
    assert (ran.code, ran.complaints) == (0, [])
    table = json.loads(plain.yaml.with_name("table.json").read_text())
    rows = [(row["name"], row["dtype"]) for row in table["methods"] if row["task"] == "short"]
    assert rows == [("vanilla", "float32"), ("vanilla", "float64"), ("again", "float32")]
    (again,) = [o for o in table["overall"] if o["name"] == "again"]
    assert again["tau"]["value"] == 1 and again["speedup"]["value"] != 1
    assert [o["speedup"]["value"] for o in table["overall"] if o["name"] == "vanilla"] == [1, 1], "each over itself"
    best = [o["speedup_fastest"]["value"] for o in table["overall"] if o["name"] == "vanilla"]
    assert 1 in best, "the fastest vanilla is a vanilla, however fast the method"


# ----------------------------------------------------------------------------------------------------------- the store


def test_each_method_has_a_run_below_the_evaluations(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    bench, _, table = measured
    ((parent,), children) = runs(bench)
    assert [run.info.run_name for run in children] == ["itself", "pld", "vanilla float32"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    pld = children[1]
    assert (pld.data.params["method"], pld.data.params["method.length"]) == ("PromptLookup", "3")
    assert pld.data.params["dtype"] == "float32"
    names = [set(run.data.metrics) - {m for m in run.data.metrics if "n_alpha" in m} for run in children]
    assert names[0] == names[1] == names[2], "so that the UI compares them"
    (row,) = [r for r in table["methods"] if (r["law"], r["task"], r["name"]) == ("T1", "turns", "pld")]
    assert pld.data.metrics["T1/turns/tau"] == row["tau"]["value"]
    assert pld.data.metrics["T1/turns/looping"] == row["looping"]["value"]
    (mean,) = [o for o in table["overall"] if (o["law"], o["name"]) == ("T0", "pld")]
    assert pld.data.metrics["T0/mean/speedup_low"] == mean["speedup"]["low"]
    assert parent.data.metrics["eval/T0/mean/speedup/pld"] == mean["speedup"]["value"]
    assert parent.data.tags["evaluation_resumed"] == "false"
    assert parent.data.tags["data"] == "none"


def test_figures_lie_in_the_run_with_what_they_show_beside_them(measured: tuple[Bench, Ran, dict[str, Any]]) -> None:
    bench, _, table = measured
    ((parent,), _) = runs(bench)
    files = {Path(f.path).name: f.file_size for f in client(bench).list_artifacts(parent.info.run_id, "figures")}
    names = ("accepted", "n_alpha", "speedups", "times")
    assert set(files) == {f"{name}.{ending}" for name in names for ending in ("png", "json")}
    assert all(files[f"{name}.png"] > 5000 for name in names)
    file = client(bench).download_artifacts(parent.info.run_id, "figures/speedups.json", str(bench.yaml.parent))
    shown = json.loads(Path(file).read_text())
    (row,) = [r for r in table["methods"] if (r["law"], r["task"], r["name"]) == ("T0", "turns", "itself")]
    place = ("T0", "turns", "itself, float32", "over vanilla, same dtype")
    (record,) = [r for r in shown if (r["law"], r["task"], r["method"], r["baseline"]) == place]
    assert (record["value"], record["high"]) == (row["speedup"]["value"], row["speedup"]["high"])


# ------------------------------------------------------------------------------------------------------------- a kill


def interrupted(after: int) -> Callable[..., Any]:
    """A player's answer that is interrupted in its answer number ``after``, counted from 0."""
    whole, made = _Player.answer, []

    def answer(self: _Player, *arguments: Any) -> Any:
        made.append(self.name)
        if len(made) > after:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    return answer


def test_an_interrupted_evaluation_goes_on_in_its_run_with_answers_and_seconds_kept(
    plain: Bench, measured: tuple[Bench, Ran, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_Player, "answer", interrupted(after=7))  # in the third prompt's second answer
        assert plain.run("evaluate").code == 130
    (journal,) = (plain.folder / "work").iterdir()
    kept = journal.read_text()
    assert len(kept.splitlines()) == 1 + 2
    with journal.open("a") as file:
        file.write('{"law": "T0", "ta')  # as a kill in the middle of a line would leave it

    words = ("--json", str(plain.yaml.with_name("table.json")))
    again = plain.run("evaluate", *words)
    assert again.code == 0
    note = "resumed: 2 of 8 prompts were answered and timed by an earlier process"
    assert f"evaluation: {note}" in again.err
    assert f"note: {note}" in again.out
    assert f"evaluation: {ANSWERS - 2 * 3} answers in" in again.err
    ((run,), children) = runs(plain)
    assert (run.info.status, run.data.tags["evaluation_resumed"], len(children)) == ("FINISHED", "2 of 8 prompts", 3)
    file = client(plain).download_artifacts(run.info.run_id, "answers.jsonl", str(plain.yaml.parent))
    lines = Path(file).read_text().splitlines()
    assert lines[:3] == kept.splitlines(), "earlier answers and seconds are kept as they were"
    assert len(lines) == 3 + 1 + 6
    assert not list((plain.folder / "work").iterdir()), "an evaluation that is over leaves nothing to go on from"

    table = json.loads(plain.yaml.with_name("table.json").read_text())
    counted = ("law", "task", "name", "tokens", "histogram", "n_alpha", "tau")
    assert [[row[key] for key in counted] for row in table["methods"]] == [
        [row[key] for key in counted] for row in measured[2]["methods"]
    ], "drawn answers too are those of an evaluation in one piece"


def test_an_evaluation_goes_on_from_its_own_answers_alone(plain: Bench) -> None:
    def place(*overrides: str, verb: str = "evaluate") -> Path:
        experiment = load(str(plain.yaml), *overrides)
        context = RunContext(experiment=experiment, target=experiment.target.load())
        return open_answer_log(context, verb).path

    own = place()
    assert place("tracking.run_name=other", "budgets.evaluation=5") == own, "what only names or shows decides nothing"
    others = [
        place("evaluate.max_new_tokens=4"),
        place("evaluate.seed=1"),
        place("evaluate.methods.pld.init_args.length=2"),
        place("evaluate.laws.T1.init_args.temperature=0.5"),
        place("target.dtype=float64"),
        place(verb="fit"),
    ]
    (plain.yaml.parent / "turns.jsonl").write_text('{"turns": ["b", "and then"]}\n{"turns": ["e f", "g"]}\n')
    assert len({own, *others, place()}) == 1 + len(others) + 1


def test_results_that_are_logged_again_after_a_kill_are_in_the_store_once(plain: Bench) -> None:
    context = with_heads(open_evaluation(load(str(plain.yaml)), None))
    log = open_answer_log(context, "evaluate")
    with tracked(context, log.run_id, log.path, {}) as context:
        table = measure(context, log)
        log_closing(context, table, log)
    client = MlflowClient(store_uri(plain.folder), store_uri(plain.folder))
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    counts = {name: len(client.get_metric_history(run.info.run_id, name)) for run in runs for name in run.data.metrics}
    assert len(counts) > 5 and set(counts.values()) == {1}


def test_a_run_that_was_deleted_is_named_with_the_way_out(plain: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_Player, "answer", interrupted(after=7))
        assert plain.run("evaluate").code == 130
    ((run,), _) = runs(plain)
    client(plain).delete_run(run.info.run_id)
    (journal,) = (plain.folder / "work").iterdir()
    refused = plain.run("evaluate")
    assert refused.code == 2
    (line,) = refused.complaints
    assert line.endswith(f"restore it, or remove {journal} for a new run")


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_behind_its_last_whole_prompt(plain: Bench) -> None:
    many = plain.yaml.parent / "many.jsonl"
    many.write_text("".join(json.dumps({"turns": [f"{i} abc abc"]}) + "\n" for i in range(60)))
    words = ["--evaluate.tasks", f"[{{name: many, path: {many}}}]", "--evaluate.max_new_tokens", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle3_lab", "evaluate", str(plain.yaml), *words],
        cwd=Path(eagle3_lab.__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 300
    while len(kept := [line for p in plain.folder.glob("work/*.jsonl") for line in p.read_text().splitlines()]) < 4:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no answer in time"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ran = subprocess.run(
        [sys.executable, "-m", "eagle3_lab", "evaluate", str(plain.yaml), *words],
        cwd=Path(eagle3_lab.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    resumed = int(ran.stderr.partition("evaluation: resumed: ")[2].partition(" of 120 prompts")[0])
    assert len(kept) - 1 <= resumed < 120
    ((run,), _) = runs(plain)
    assert run.info.status == "FINISHED"


# ------------------------------------------------------------------------------------------------------ without a head


def test_what_is_not_there_costs_one_line(plain: Bench, tmp_path: Path) -> None:
    chain = "{chain: {class_path: HeadTree, init_args: {grow: {class_path: Chain, init_args: {length: 3}}}}}"
    for verb, words, line in (
        (
            "fit",
            (),
            "fit: the experiment has no data, no model, no optimizer, no trainer, and without there is nothing",
        ),
        ("evaluate", ("--evaluate.methods", chain), "evaluate.methods.chain: needs a trained head, and the experiment"),
        ("evaluate", ("--checkpoint-path", "x.ckpt"), "--checkpoint-path: x.ckpt holds a head, and the experiment has"),
        ("evaluate", ("--evaluate.tasks", "[{name: held_out}]"), "task held_out: needs the experiment's data section"),
        ("evaluate", ("--evaluate.tasks.0.path", str(tmp_path / "none.jsonl")), "no file"),
        ("evaluate", ("--evaluate.laws", "{}"), "evaluate.laws must be at least one, by name, or null, got none"),
        ("evaluate", ("--evaluate.laws", "{T=0: SamplingLaw}"), "evaluate.laws: a name is letters, digits"),
        ("evaluate", ("--evaluate.tasks.0.name", "mean"), "evaluate.tasks: 'mean' is the mean over tasks"),
        ("evaluate", ("--evaluate.methods", "{vanilla: Vanilla}"), "evaluate.methods: 'vanilla': vanilla always runs"),
        ("evaluate", ("--evaluate.laws.T1.temperature", "-1"), "temperature must be finite and >= 0, got -1.0"),
        ("generate", ("hi", "--evaluate.methods", chain), "evaluate.methods.chain: needs a trained head, and the"),
    ):
        ran = plain.run(verb, *words)
        assert (ran.code, ran.out) == (2, ""), (words, ran.err)
        (told,) = ran.complaints
        assert line in told
    assert not (plain.folder / "mlflow.db").exists()


def test_generate_answers_without_a_head(plain: Bench) -> None:
    said = [plain.run("generate", "abc abc", "--max-new-tokens", "6", "--method", m).out for m in ("vanilla", "pld")]
    assert said[0] == said[1] != ""


def test_held_out_prompts_need_the_data_alone(plain: Bench, tiny: TinyLab) -> None:
    words = ("--evaluate.tasks", "[{name: held_out, limit: 1}]", "--evaluate.laws", "null")
    ran = plain.run("evaluate", "--data", f"{{path: {tiny.data}, max_length: 96, row_length: 128}}", *words)
    assert (ran.code, ran.complaints) == (0, [])
    ((run,), _) = runs(plain)
    assert len(run.data.tags["data"]) > 10
