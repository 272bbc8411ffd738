"""Cells on the tiny target: what a result holds, what is reused, and what a kill changes: nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ablation_toys import Toy, make_toy
from mlflow.tracking import MlflowClient
from tiny import TinyLab

import eagle3_lab
from eagle3_lab.ablation import results
from eagle3_lab.tracking.run import store_uri


def result_of(toy: Toy, title: str) -> results.Result:
    return results.read(toy.folder / "results" / f"{title}.json")


def decided(result: results.Result) -> tuple:
    """What a second run gives again; seconds and dates are the machine's."""
    return result.key, result.values, result.conversations, result.settings


def test_a_result_holds_counts_by_conversation_and_the_readings_made_of_them(done: Toy) -> None:
    result = result_of(done, "deep-0")
    assert (result.cell, result.seed, result.scale, result.depth) == ("deep", 0, 1, 7)
    visited, every = result.tau(results.VISITED), result.tau(results.ALL)
    assert len(visited.above) == len(result.conversations) == result.facts["held_out"]
    assert result.values["tau_visited"]["value"] == pytest.approx(sum(visited.above) / sum(visited.below), abs=1e-6)
    assert result.values["tau_all"]["value"] == pytest.approx(sum(every.above) / sum(every.below), abs=1e-6)
    first = result.n_alpha(results.VISITED, 0)
    assert sum(first.below) <= sum(visited.below), "a round judges its first draft, unless its answer ends"
    assert {"data", "steps", "tokens", "torch", "machine.cpu", "weights", "date"} <= result.facts.keys()
    assert {"train_loss", "val_loss"} <= result.values.keys()
    lines = (done.folder / "results" / "deep-0.json").read_text().splitlines()
    assert ' "conversations": {' in lines, "a line for each, so that changes can be read"


def test_the_counts_are_those_of_the_whole_reading(done: Toy) -> None:
    """The table that `fit` closes with pools the same anchors and rounds."""
    result = result_of(done, "flat-1")
    client = MlflowClient(store_uri(done.runs), store_uri(done.runs))
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (run,) = [one for one in runs if one.info.run_name == "flat-1"]
    assert run.data.metrics["tau"] == pytest.approx(result.values["tau_visited"]["value"])
    assert run.data.tags["model.unroll.depth"] == "1"
    parent = [one for one in runs if one.info.run_id == run.data.tags["mlflow.parentRunId"]]
    assert [one.info.run_name for one in parent] == ["depth"]
    kinds = [one.data.tags.get("kind") for one in runs]
    assert (kinds.count("cell"), kinds.count("ablation")) == (4, 1)


def test_what_is_done_is_done_once(done: Toy) -> None:
    files = {path: path.stat().st_mtime_ns for path in (done.folder / "results").iterdir()}
    ran = done.run("ablate")
    assert ran.code == 0 and ran.out.count("done: tau") == 4
    assert {path: path.stat().st_mtime_ns for path in (done.folder / "results").iterdir()} == files
    assert "training" not in ran.err


def test_a_fresh_store_shows_results_that_were_committed(done: Toy, tmp_path: Path) -> None:
    ran = done.run("ablate", "--tracking.folder", str(tmp_path / "fresh"))
    assert ran.code == 0 and "training" not in ran.err
    client = MlflowClient(store_uri(tmp_path / "fresh"), store_uri(tmp_path / "fresh"))
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert sorted(str(one.info.run_name) for one in runs) == ["deep-0", "deep-1", "depth", "flat-0", "flat-1"]
    assert {one.info.status for one in runs} == {"FINISHED"}


def test_a_cell_of_another_folder_with_the_same_configuration_serves_too(done: Toy, tiny: TinyLab) -> None:
    other = make_toy(tiny, done.folder.parents[1], "again") if not (done.folder.parent / "again").exists() else None
    assert other is not None
    other.change("  flat: {model: {unroll: {depth: 1}}}\n", "")
    assert "left, and done in an ablation beside this one" in other.run("ablate", "--list").out
    ran = other.run("ablate", "--cell", "deep")
    assert ran.code == 0 and "training" not in ran.err
    mine, theirs = result_of(other, "deep-0"), result_of(done, "deep-0")
    assert mine.conversations == theirs.conversations
    assert mine.facts["reused_from"] == "depth/results/deep-0.json"
    shutil.rmtree(other.folder)


def test_a_result_of_another_configuration_is_refused_in_one_line(done: Toy, tiny: TinyLab, tmp_path: Path) -> None:
    toy = make_toy(tiny, tmp_path)
    shutil.copytree(done.folder / "results", toy.folder / "results")
    toy.change("depth: 1", "depth: 3")
    ran = toy.run("ablate")
    assert (ran.code, ran.out) == (2, "")
    assert "flat-0.json: is of another configuration (model.unroll.depth 1 there, 3 here); remove it" in ran.err
    assert "deep-1.json: belongs to no cell of depth" in ran.err
    file = toy.folder / "results" / "flat-0.json"
    file.write_text("{}")
    assert "flat-0.json: is no result" in toy.run("ablate").err
    file.write_text(json.dumps({"format": 99}))
    assert "is of format 99, this version reads 1; update it" in toy.run("ablate").err


def test_a_dry_run_tells_hours_and_disk_and_makes_nothing(toy: Toy) -> None:
    ran = toy.run("ablate", "--dry-run")
    assert ran.code == 0
    assert [line.partition(":")[0] for line in ran.out.splitlines()] == ["deep", "flat", "features", "in all"]
    assert "1 cells, 6 steps of" in ran.out and "2 cells" in ran.out
    assert not (toy.folder / "results").exists() and not toy.runs.exists()


@pytest.mark.slow
def test_killing_it_at_any_moment_and_starting_again_ends_in_the_same_results(done: Toy, toy: Toy) -> None:
    words = ["--trainer.save_every_minutes", "1.0e-9"]
    command = [sys.executable, "-m", "eagle3_lab", "ablate", str(toy.folder), *words]
    for moment in ("features", "checkpoint", "result"):
        process = subprocess.Popen(command, cwd=Path(eagle3_lab.__file__).parents[1], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        wanted = {
            "features": "../cache/features/*",
            "checkpoint": "work/*/last.ckpt",
            "result": "../ablations/depth/results/*",
        }
        while not list(toy.runs.glob(wanted[moment])) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    ran = subprocess.run(command, cwd=Path(eagle3_lab.__file__).parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for title in ("deep-0", "flat-0"):
        assert decided(result_of(toy, title))[:3] == decided(result_of(done, title))[:3]
