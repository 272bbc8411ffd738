"""`fit` from a feature store: the same training as beside the target, the target run once for all of them."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from tiny_runs import Bench, Ran

from eagle3_lab import load
from eagle3_lab.data.feature_store.rows import KeptBatch
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs, train_head
from eagle3_lab.pipeline.context import TrainingContext, open_training
from eagle3_lab.pipeline.train_head import store_features
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.run import store_uri

TRAIN_ONLY = ("--evaluate", "null", "--trainer.max_steps", "4", "--trainer.val_check_interval", "2")
STORED = ("--features.dtype", "float32")


def curve(bench: Bench, ran: Ran, metric: str) -> list[float]:
    """A run's values of a metric, by step."""
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    run_id = ran.out.partition("\nrun: ")[2].partition("\n")[0]
    points = client.get_metric_history(run_id, metric)
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def opened(bench: Bench, *words: str) -> TrainingContext:
    """An experiment as `fit` has it before training."""
    return open_training(load(str(bench.yaml), *words), "fit")


def stores(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "features").glob("*"))


# ---- the same training


def test_a_float32_store_trains_as_the_target_does_to_1e_6(bench: Bench) -> None:
    online = bench.run("fit", *TRAIN_ONLY)
    stored = bench.run("fit", *TRAIN_ONLY, *STORED, "--features.threads", "2")
    assert (online.code, stored.code) == (0, 0), stored.err
    assert stored.complaints == []
    for metric in ("train/loss", "train/step_2/loss", "train/step_1/overlap", "val/loss", "val/step_0/accuracy"):
        told = curve(bench, online, metric)
        assert len(told) == (2 if metric.startswith("val") else 4)
        assert curve(bench, stored, metric) == pytest.approx(told, rel=1e-6, abs=1e-6), metric
    last = [line for line in online.out.splitlines() if line.startswith("one pass")]
    assert last and last == [line for line in stored.out.splitlines() if line.startswith("one pass")]


def test_a_bfloat16_store_gives_the_same_readings_up_to_rounding(bench: Bench) -> None:
    lab = opened(bench, "features.dtype=bfloat16")
    target, data, module = lab.target, lab.data, lab.module
    kept = store_features(lab)
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad(), train_head.reading(module, data, kept):
        stored = next(iter(data.train_dataloader()))
        assert isinstance(stored, KeptBatch) and torch.equal(stored.ids, batch.ids)
        out, _ = module.run(stored)
    assert module.read == target.features
    assert not isinstance(next(iter(data.train_dataloader())), KeptBatch)
    told, _ = module.run(batch)
    torch.testing.assert_close(out.total, told.total.detach(), rtol=5e-3, atol=0)
    torch.testing.assert_close(out.overlap, told.overlap, rtol=0, atol=0.05)
    assert (out.hit == told.hit).float().mean() > 0.98


# ---- the target run once


@pytest.mark.parametrize("depth", [1, 5])
def test_beside_the_target_it_is_run_once_a_batch_however_deep_the_unroll(bench: Bench, depth: int) -> None:
    context = opened(bench, f"model.unroll.depth={depth}")
    target, data, module = context.target, context.data, context.module
    forwards: list[int] = []
    target.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    _, steps = module.run(next(iter(data.train_dataloader())))
    assert (len(forwards), len(steps)) == (1, depth)


def test_other_trainings_of_an_ablation_read_the_store_and_never_run_the_target(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--evaluate", "null", *STORED, "--data.held_out", "0", "--trainer.limit_val_batches", "0")
    words += ("--trainer.max_steps", "2", "--trainer.val_check_interval", "1")
    first = bench.run("fit", *words)
    assert first.code == 0, first.err
    assert "features: " in first.err and "features: reused" not in first.err
    load_target = inputs.load_target

    def without_features(experiment: Experiment) -> HFTarget:
        target = load_target(experiment)
        monkeypatch.setattr(target, "features", None)  # loading itself has tried the target's forward
        return target

    monkeypatch.setattr(inputs, "load_target", without_features)
    for change in (
        ("--optimizer.lr", "1.0e-3"),
        ("--model.unroll.depth", "1", "--data.row_length", "200"),
        ("--model.features", "TopFeature", "--data.seed", "1"),
    ):
        ran = bench.run("fit", *words, *change)
        assert ran.code == 0, ran.err
        assert "features: reused (unchanged)" in ran.err
    assert len(stores(tmp_path)) == 1


# ---- before it begins


def test_a_dry_run_tells_the_stores_bytes_and_makes_none(bench: Bench, tmp_path: Path) -> None:
    ran = bench.run("fit", "--dry-run", "--features.dtype", "bfloat16")
    assert ran.code == 0
    (line,) = [line for line in ran.out.splitlines() if line.startswith("features: ")]
    assert " tokens of 4 states in bfloat16, of which " in line
    assert stores(tmp_path) == []


def test_a_store_of_other_contents_costs_one_line_before_training(bench: Bench, tmp_path: Path) -> None:
    named = f"features.folder={tmp_path / 'store'}"
    assert store_features(opened(bench, "features.dtype=float32", named))
    words = (*STORED, "--features.folder", str(tmp_path / "store"), "--dry-run")
    fused = "{class_path: FusedFeature, init_args: {layers: [0, 1, 2]}}"
    for change, fault in (
        (("--model.features", fused), "holds hidden states 1, 2, 3, 4, needed is also 0"),
        (("--features.dtype", "bfloat16"), "holds states kept in float32, needed is bfloat16"),
        (("--target.dtype", "bfloat16"), "holds states of a target run in float32, needed is bfloat16"),
        (("--data.limit", "20"), "holds states of data with hash"),
    ):
        ran = bench.run("fit", *words, *change)
        assert (ran.code, ran.out) == (2, "")
        (line,) = ran.complaints
        assert line.startswith(f"features.folder: {tmp_path / 'store'} {fault}")


def test_what_cannot_be_kept_is_told_before_training(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, fault in (
        (("--features.layers", "[9]"), "features.layers: 9, but "),
        (("--features.threads", "-1"), "features.threads must be within 0 .. 64, got -1"),
        (("--features.threads", "65"), "features.threads must be within 0 .. 64, got 65"),
        (("--features.layers", "[1, 1]"), "features.layers must differ from each other, got [1, 1]"),
        (("--features.dtype", "int8"), "features.dtype"),
        ((*STORED, "--model.mask", "official", "--model.edge", "counted"), "features: model.edge 'counted' needs rows"),
    ):
        ran = bench.run("fit", "--dry-run", *words)
        assert (ran.code, ran.out) == (2, "")
        assert fault in ran.complaints[0] and len(ran.complaints) == 1
    usage = namedtuple("usage", "total used free")
    lab = opened(bench, "features.dtype=bfloat16")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(UserError, match="needed for features of .* set features.folder to another disk"):
        store_features(lab)


# ---- what a training is known by


def test_of_kept_features_the_dtype_alone_makes_another_training(bench: Bench) -> None:
    def key(*words: str) -> str:
        return load(str(bench.yaml), *words).training_key({})

    online = key()
    assert key("features=null") == online
    narrow = key("features.dtype=bfloat16")
    assert key("features.layers=[0]", "features.threads=3", "features.folder=elsewhere") == narrow
    assert len({online, narrow, key("features.dtype=float32")}) == 3
