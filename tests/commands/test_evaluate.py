"""`evaluate` on the tiny target: the same numbers as at the end of `fit`, in a run of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from tiny_runs import Bench, Ran

from eagle3_lab.tracking.run import store_uri


def counters(table: dict[str, Any]) -> dict[str, Any]:
    """What greedy decoding decides, whatever the clock says."""
    kept = ("name", "dtype", "tokens", "histogram", "n_alpha", "engine_tau")
    return {"methods": [{key: row[key] for key in kept} for row in table["methods"]], "one_pass": table["one_pass"]}


def test_it_measures_the_head_that_fit_made_as_fit_did(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, fitted = finished
    ran = bench.run("evaluate", "--json", str(tmp_path / "table.json"))
    assert (ran.code, ran.complaints) == (0, [])
    table = json.loads((tmp_path / "table.json").read_text())
    assert counters(table) == counters(json.loads(bench.yaml.with_name("table.json").read_text()))
    assert f"run: {table['run_id']}" in ran.out
    assert table["run_id"] not in fitted.out
    run = MlflowClient(store_uri(bench.folder), store_uri(bench.folder)).get_run(table["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["checkpoint"] == str(bench.work() / "draft.ckpt")
    assert run.data.metrics["eval/tau/dynamic"] >= 1
    assert run.data.params["model.draft"] == "Eagle3"


def test_a_head_is_judged_as_deep_as_asked_without_being_trained_again(
    finished: tuple[Bench, Ran], tmp_path: Path
) -> None:
    bench, _ = finished
    words = ("--judged_depth", "2", "--evaluate.tasks.0.limit", "1", "--json", str(tmp_path / "table.json"))
    ran = bench.run("evaluate", *words)
    assert (ran.code, ran.complaints) == (0, [])
    shallow = json.loads((tmp_path / "table.json").read_text())["one_pass"]
    deep = json.loads(bench.yaml.with_name("table.json").read_text())["one_pass"]
    assert (len(shallow["n_alpha_all"]), len(deep["n_alpha_all"])) == (2, 7)
    assert shallow["n_alpha_all"] == deep["n_alpha_all"][:2]
    assert shallow["tau_walked"]["value"] <= deep["tau_walked"]["value"]


def test_it_measures_a_head_that_was_moved_elsewhere(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, _ = finished
    head = tmp_path / "head.ckpt"
    shutil.copyfile(bench.work() / "draft.ckpt", head)
    words = ("--checkpoint-path", str(head), "--tracking.folder", str(tmp_path / "mlruns"))
    ran = bench.run("evaluate", *words, "--evaluate.tasks.0.limit", "1")
    assert (ran.code, ran.complaints) == (0, [])
    assert f"checkpoint: {head}" in ran.out


def test_without_a_head_it_says_how_to_get_one(bench: Bench) -> None:
    ran = bench.run("evaluate")
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.complaints
    assert line.endswith("this experiment has no trained head yet; run `fit`, or give --checkpoint-path")


def test_without_its_section_it_says_what_is_missing(bench: Bench) -> None:
    ran = bench.run("evaluate", "--evaluate", "null")
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaints == ["evaluate: the experiment has no such section; add it, with its tasks and methods"]
