"""`fit` that is killed or interrupted, in a process of its own: what is kept, and how the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from tiny_runs import Bench

import eagle3_lab
from eagle3_lab.tracking.run import store_uri

STEPS = 40
WAIT = 300  # seconds, on a machine that is busy with other things


def words(steps: int, *more: str) -> list[str]:
    """Overrides of a training that saves at every step and is not evaluated."""
    said = {"trainer.max_steps": str(steps), "trainer.save_every_minutes": "1.0e-9", "evaluate": "null"}
    said["trainer.log_every_n_steps"] = "1"
    return [word for key, value in said.items() for word in (f"--{key}", value)] + list(more)


def start(bench: Bench, steps: int) -> subprocess.Popen[str]:
    """The command line as a user gives it."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3_lab", "fit", str(bench.yaml), *words(steps)],
        cwd=Path(eagle3_lab.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def wait_for_checkpoint(bench: Bench, process: subprocess.Popen[str]) -> Path:
    """The last checkpoint, as soon as it is of the third step or a later one."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        for path in bench.folder.glob("work/*/last.ckpt"):
            if step_of(path) >= 3:
                return path
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    process.kill()
    pytest.fail("no checkpoint in time")


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


def test_a_killed_training_goes_on_in_its_run_and_ends_as_if_it_had_not_been(bench: Bench, tmp_path: Path) -> None:
    process = start(bench, STEPS)
    last = wait_for_checkpoint(bench, process)
    process.send_signal(signal.SIGSTOP)
    second = bench.run("fit", *words(STEPS))
    assert (second.code, second.out) == (2, "")
    assert second.complaints[-1].startswith(f"{bench.work()}: is being trained by another process; wait for its end")
    process.kill()
    process.communicate()
    work, done = bench.work(), step_of(last)
    assert done < STEPS
    assert not (work / "draft.ckpt").exists()

    for half in (".last.ckpt-7", ".last.ckpt-x1y2", ".state.json-7"):  # as a kill within a write leaves them
        (work / half).write_text("half")
    ran = bench.run("fit", *words(STEPS))
    assert ran.code == 0
    assert bench.work() == work
    assert not list(work.glob(".*"))
    assert step_of(work / "draft.ckpt") == STEPS
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert f"run: {run.info.run_id}" in ran.out
    assert (run.info.status, run.data.tags["resumed"]) == ("FINISHED", "true")
    points = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(points) == list(range(STEPS)), "each step once"

    unbroken = Bench(bench.yaml, tmp_path / "unbroken")
    assert unbroken.run("fit", *words(STEPS, "--tracking.folder", str(unbroken.folder))).code == 0
    resumed, straight = (torch.load(b.work() / "draft.ckpt", weights_only=True) for b in (bench, unbroken))
    for name, tensor in straight["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupted_training_saves_a_whole_step_and_says_so_in_one_line(
    bench: Bench, number: signal.Signals, code: int, word: str
) -> None:
    process = start(bench, 100_000)
    last = wait_for_checkpoint(bench, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == code
    assert "Traceback" not in err
    assert err.splitlines()[-1] == word
    assert "Warning" not in err
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "KILLED"
    assert not list(last.parent.glob(".last.ckpt-*")), "no half-written file stays behind"
    points = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert points == list(range(step_of(last))), "what is saved is logged, and nothing behind it"
