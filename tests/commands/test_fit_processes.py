"""`fit` by two processes: the same losses, metrics and weights as by one, logged and saved once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tiny_runs import Bench

import eagle3_lab
from eagle3_lab.tracking.run import store_uri

STEPS = 7
OPTIONS = {
    "trainer.max_steps": str(STEPS),
    "trainer.val_check_interval": "2",
    "trainer.limit_val_batches": "100",
    "trainer.log_every_n_steps": "1",
    "data.row_length": "96",
    "evaluate": "null",
}
TWO = {"trainer.accelerator": "cpu", "trainer.devices": "2", "trainer.strategy": "ddp"}


def words(more: dict[str, str]) -> list[str]:
    return [word for key, value in (OPTIONS | more).items() for word in (f"--{key}", value)]


def by_processes(bench: Bench, more: dict[str, str], *, torchrun: bool) -> subprocess.CompletedProcess[str]:
    """The command line as a user gives it, by torchrun or by Lightning's own launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "eagle3_lab", "fit", str(bench.yaml), *words(TWO | more)],
        cwd=Path(eagle3_lab.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=clean | {"OMP_NUM_THREADS": "1", "MASTER_PORT": port} if not torchrun else clean | {"OMP_NUM_THREADS": "1"},
    )


def the_run(bench: Bench) -> tuple[MlflowClient, Run]:
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, run


def curves(bench: Bench) -> dict[str, list[tuple[int, float]]]:
    """Every curve of the one run, but for clocks."""
    client, run = the_run(bench)
    names = [name for name in run.data.metrics if "per_second" not in name and not name.startswith("system/")]
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in names
    }


def weights(bench: Bench) -> dict[str, torch.Tensor]:
    return torch.load(bench.work() / "draft.ckpt", weights_only=True)["state_dict"]


SHARDED = {"trainer.strategy": "{class_path: Sharded}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torchrun", "strategy"),
    [(False, {}), (True, {}), (False, SHARDED)],
    ids=["lightning's launcher", "torchrun", "sharded"],
)
def test_two_processes_train_as_one_does(
    torchrun: bool, strategy: dict[str, str], bench: Bench, tmp_path: Path
) -> None:
    """Rows are uneven, and their number is odd: the last batch of a pass leaves the second process a row of padding."""
    ran = by_processes(bench, strategy, torchrun=torchrun)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("tau") and ran.stdout.count("run: ") == 1, "measured and told once"

    alone = Bench(bench.yaml, tmp_path / "alone")
    one = alone.run("fit", *words({"data.rows_per_batch": "2", "tracking.folder": str(alone.folder)}))
    assert one.code == 0, one.err

    together, single = curves(bench), curves(alone)
    assert {"train/loss", "train/step_2/overlap", "val/loss", "val/tau_walked", "val/rounds"} <= together.keys()
    assert len(together["train/loss"]) == STEPS
    assert together.keys() == single.keys()
    for name, points in single.items():
        assert [step for step, _ in together[name]] == [step for step, _ in points], name
        values = [value for _, value in points]
        assert [value for _, value in together[name]] == pytest.approx(values, abs=1e-5, nan_ok=True), name
    ours, theirs = weights(bench), weights(alone)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5, msg=name)
    assert not list(bench.work().glob(".*")), "no process left half a file"


@pytest.mark.slow
def test_more_processes_than_rows_is_one_line(bench: Bench) -> None:
    ran = by_processes(bench, {"trainer.devices": "64"}, torchrun=False)
    assert ran.returncode == 2
    told = [line for line in ran.stderr.splitlines() if "trainer.devices" in line]
    assert len(told) == 1 and "64 processes, but the training data fills" in told[0]
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_sharded_training_goes_on_from_its_last_checkpoint(bench: Bench) -> None:
    often = SHARDED | {"trainer.save_every_minutes": "1.0e-6"}
    assert by_processes(bench, often, torchrun=False).returncode == 0
    before = weights(bench)
    (bench.work() / "draft.ckpt").unlink()
    again = by_processes(bench, often, torchrun=False)
    assert again.returncode == 0, again.stderr
    assert "training: goes on from" in again.stderr
    after = weights(bench)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


@pytest.mark.slow
def test_a_strategy_that_would_scatter_the_head_is_one_line(bench: Bench) -> None:
    plain = "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: {tensor_parallel_size: 1}}"
    ran = by_processes(
        bench, {"trainer.strategy": plain.replace("{tensor", "{data_parallel_size: 2, tensor")}, torchrun=False
    )
    assert ran.returncode == 2
    told = [line for line in ran.stderr.splitlines() if "trainer.strategy" in line]
    assert len(told) == 1 and told[0].endswith("class_path: Sharded")
    assert "Traceback" not in ran.stderr
