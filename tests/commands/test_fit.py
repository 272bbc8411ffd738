"""`fit` on the tiny target: what one command leaves behind, what a second one takes from it, and what training does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from mlflow.entities import Run as StoredRun
from mlflow.tracking import MlflowClient
from tiny import TinyLab
from tiny_runs import Bench, Ran, make_bench

from eagle3_lab import load
from eagle3_lab.commands.fit import fit
from eagle3_lab.errors import UserError
from eagle3_lab.pipeline import train_head
from eagle3_lab.pipeline.context import open_training
from eagle3_lab.pipeline.run_folder import RunFolder
from eagle3_lab.tracking.run import open_run, store_uri
from eagle3_lab.training.module import DraftModule

# --------------------------------------------------------------------------------------------------------- what it says


def test_the_closing_table_says_what_was_measured_and_where_it_lies(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    assert ran.code == 0
    for word in ("tau [95 %]", "0-alpha", "one pass, visited anchors", "tokens/s [95 %]", "dynamic, float32"):
        assert word in ran.out
    run = stored(bench, ran)
    assert run.info.status == "FINISHED"
    assert f"checkpoint: {bench.work() / 'draft.ckpt'}" in ran.out
    assert f"mlflow ui --backend-store-uri {store_uri(bench.folder)}" in ran.out


def test_nothing_but_its_stages_reaches_the_terminal(finished: tuple[Bench, Ran]) -> None:
    _, ran = finished
    assert ran.complaints == []
    for stage in ("target: ", "training: 6 steps in", "hit table:", "evaluation: 8 answers in"):
        assert stage in ran.err
    assert "training: products in 32-true (trainer.products: float32)" in ran.err


def test_the_table_is_kept_for_machines(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    table = json.loads(bench.yaml.with_name("table.json").read_text())
    tokens = {row["name"]: row["tokens"] for row in table["methods"]}
    assert set(tokens) == {"vanilla", "chain", "static", "dynamic"}
    assert len(set(tokens.values())) == 1, "every greedy answer is vanilla's"
    assert all(row["tau"]["value"] >= 1 for row in table["methods"])
    assert len(table["one_pass"]["n_alpha_all"]) == 7, "judged_depth, though trained for 3 steps"
    assert table["run_id"] == stored(bench, ran).info.run_id


# ------------------------------------------------------------------------------------------------- what it refuses


class Stops(Callback):
    """Ends a training before its first step."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.should_stop = True


def test_a_training_of_no_step_leaves_no_head(bench: Bench) -> None:
    experiment = load(bench.yaml, "evaluate=null")
    assert experiment.trainer is not None
    experiment.trainer.callbacks.append(Stops())
    with pytest.raises(UserError, match="^training: ended before its first step, so there is no head"):
        fit(experiment)
    assert not (bench.work() / "draft.ckpt").exists()


def test_a_folder_that_another_process_holds_is_left_alone(bench: Bench) -> None:
    words = ("--evaluate", "null", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1")
    ran = bench.run("fit", *words)
    run = stored(bench, ran)
    with RunFolder(bench.work(), "another").lock():
        second = bench.run("fit", *words)
    assert (second.code, second.out) == (2, "")
    assert second.complaints == [
        f"{bench.work()}: is being trained by another process; wait for its end, or end it and run this again"
    ]
    after = stored(bench, ran)
    assert (after.info.status, after.info.end_time) == ("FINISHED", run.info.end_time), "its run is not touched"
    assert bench.run("fit", *words).code == 0


# ------------------------------------------------------------------------------------------------------- what it leaves


def test_the_run_holds_what_was_asked_for(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    run = stored(bench, ran)
    asked = run.data.params
    assert (asked["model.unroll.depth"], asked["trainer.max_steps"]) == ("3", "6")
    assert asked["model.draft"] == "Eagle3"
    assert not [key for key in asked if key.startswith(("tracking", "budgets", "name"))]
    assert run.data.tags["resumed"] == "false"
    assert run.data.tags["products"] == "32-true"


def test_the_run_holds_a_curve_point_for_every_step_and_all_results(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    assert [step for step, _ in curve(bench, ran, "train/loss")] == [0, 1, 2, 3, 4, 5]
    assert len(curve(bench, ran, "val/tau_walked")) == 2
    found = stored(bench, ran).data.metrics
    for name in ("train/step_2/overlap", "val/loss", "eval/tau/chain", "eval/tokens_per_s/vanilla_float32"):
        assert name in found
    assert found["eval/tau/vanilla_float32"] == 1.0
    assert found["eval/one_pass/tau_expected"] >= 1.0


def test_the_logged_configuration_runs_again_as_itself(bench: Bench, tmp_path: Path) -> None:
    ran = bench.run("fit")
    config = artifact(bench, ran, "config.yaml", tmp_path)
    again = Bench(config, bench.folder).run("fit")
    assert again.code == 0
    assert again.out == ran.out
    assert "training: reused (unchanged)" in again.err


def test_the_run_says_which_data_it_saw(finished: tuple[Bench, Ran], tmp_path: Path, tiny: TinyLab) -> None:
    bench, ran = finished
    told = json.loads(artifact(bench, ran, "data.json", tmp_path).read_text())
    assert told["hash"] == stored(bench, ran).data.tags["data"]
    assert told["path"] == str(tiny.data)
    assert told["held_out"]["conversations"] == 8
    assert told["train"]["supervised"] > 100


def test_the_checkpoint_holds_the_draft_and_nothing_of_the_target(
    finished: tuple[Bench, Ran], tmp_path: Path, tiny: TinyLab
) -> None:
    bench, ran = finished
    kept = torch.load(bench.work() / "draft.ckpt", weights_only=True)
    assert {name.partition(".")[0] for name in kept["state_dict"]} == {"source", "draft"}
    assert "optimizer_states" not in kept
    target = load(str(bench.yaml)).target.load()
    learned = [tensor for tensor in kept["state_dict"].values() if tensor.is_floating_point()]
    for parameter in target.model.parameters():
        assert not any(tensor.shape == parameter.shape and torch.equal(tensor, parameter) for tensor in learned)
    copy = artifact(bench, ran, "checkpoint/draft.ckpt", tmp_path)
    assert copy.read_bytes() == (bench.work() / "draft.ckpt").read_bytes()


# ------------------------------------------------------------------------------------------------------ the second time


def test_a_second_run_reuses_training_and_evaluation_and_takes_no_step(
    finished: tuple[Bench, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, ran = finished
    monkeypatch.setattr(DraftModule, "training_step", None)
    again = bench.run("fit")
    assert (again.code, again.out) == (0, ran.out)
    assert "training: reused (unchanged)" in again.err
    assert "evaluation: reused (unchanged)" in again.err
    assert len(curve(bench, ran, "train/loss")) == 6
    assert len(curve(bench, ran, "eval/tau/chain")) == 1


def test_what_only_names_or_shows_a_run_makes_no_other_one(finished: tuple[Bench, Ran]) -> None:
    bench, ran = finished
    again = bench.run("fit", "--budgets.training", "5", "--tracking.run_name", "other")
    assert (again.code, again.out) == (0, ran.out)
    assert "training: reused (unchanged)" in again.err


def test_another_evaluation_keeps_the_training_and_is_shown_by_a_run_of_its_own(
    finished: tuple[Bench, Ran], tmp_path: Path
) -> None:
    bench, ran = finished
    shutil.copytree(bench.folder, tmp_path / "mlruns")
    copy = Bench(bench.yaml, tmp_path / "mlruns")
    other = copy.run("fit", "--tracking.folder", str(copy.folder), "--evaluate.max_new_tokens", "4")
    assert other.code == 0
    assert "training: reused (unchanged)" in other.err
    assert "evaluation: 8 answers in" in other.err
    assert stored(copy, other).data.tags["continues"] == stored(copy, ran).info.run_id
    assert stored(copy, other).data.params["evaluate.max_new_tokens"] == "4"
    assert stored(copy, ran).data.params["evaluate.max_new_tokens"] == "8"


def test_a_run_that_was_deleted_is_named_with_the_way_out(finished: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, ran = finished
    shutil.copytree(bench.folder, tmp_path / "mlruns")
    copy = Bench(bench.yaml, tmp_path / "mlruns")
    words = ("fit", "--tracking.folder", str(copy.folder))
    MlflowClient(store_uri(copy.folder), store_uri(copy.folder)).delete_run(stored(bench, ran).info.run_id)
    refused = copy.run(*words)
    assert refused.code == 2
    (line,) = refused.complaints
    assert line.endswith(f"restore it, or remove {copy.work() / 'state.json'} for a new run")
    (copy.work() / "state.json").unlink()
    assert copy.run(*words).code == 0


# ----------------------------------------------------------------------------------------------------- before it begins


def test_the_printed_configuration_reads_back_as_itself(bench: Bench, tmp_path: Path) -> None:
    first = bench.run("fit", "--print_config")
    (tmp_path / "printed.yaml").write_text(first.out)
    again = Bench(tmp_path / "printed.yaml", bench.folder).run("fit", "--print_config")
    assert first.code == again.code == 0
    assert again.out == first.out
    assert "max_steps: 6" in first.out


def test_a_dry_run_estimates_and_writes_and_trains_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}\n')
    monkeypatch.setattr(lightning.Trainer, "fit", None)
    ran = bench.run("fit", "--dry-run", "--answers.prompts", str(tmp_path / "prompts.jsonl"))
    assert ran.code == 0
    assert "training: 6 steps of 1 batches" in ran.out
    half = bench.run("fit", "--dry-run", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "3")
    assert "training: 3 steps of 1 batches" in half.out, "the pass ends before the sixth step"
    for line in ("data: ", "training: ", "head: ", "disk: "):
        assert f"\n{line}" in f"\n{ran.out}"
    assert not bench.folder.exists()
    assert not (tmp_path / "cache").exists(), "answers are not made for an estimate"


def test_fresh_answers_are_made_once_and_trained_on(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}\n{"turns": ["good day"]}\n')
    words = ["--answers.prompts", str(tmp_path / "prompts.jsonl"), "--answers.max_new_tokens", "12"]
    words += ["--evaluate", "null", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    first, again = bench.run("fit", *words), bench.run("fit", *words)
    assert first.code == again.code == 0
    assert "answers: 2 prompts in" in first.err
    assert "answers: reused (unchanged)" in again.err
    assert again.out == first.out


# --------------------------------------------------------------------------------------------------------- what it does


def test_training_lowers_the_loss_and_leaves_the_target_as_it_was(bench: Bench) -> None:
    experiment = load(str(bench.yaml), "trainer.max_steps=30", "optimizer.lr=1.0e-2", "evaluate=null")
    context = open_training(experiment, "fit")
    target = context.target
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with open_run(experiment.tracking) as run:
        context.folder.remember(run.id)
        train_head.train_head(replace(context, tracker=run))
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    losses = [point.value for point in client.get_metric_history(run.id, "train/loss")]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = target.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_one_seed_gives_one_head_to_the_bit_and_another_seed_another(
    finished: tuple[Bench, Ran], tiny: TinyLab, tmp_path: Path
) -> None:
    bench, _ = finished
    first = weights(bench.work())
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    same, other = make_bench(tiny, tmp_path / "same"), make_bench(tiny, tmp_path / "other")
    assert same.run("fit", "--evaluate", "null").code == 0
    assert other.run("fit", "--evaluate", "null", "--seed", "1").code == 0
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights(same.work()).items())
    assert not all(torch.equal(tensor, first[name]) for name, tensor in weights(other.work()).items())


# -------------------------------------------------------------------------------------------------------------- helpers


def stored(bench: Bench, ran: Ran) -> StoredRun:
    """The run that a closing table names."""
    run_id = ran.out.partition("\nrun: ")[2].partition("\n")[0]
    return MlflowClient(store_uri(bench.folder), store_uri(bench.folder)).get_run(run_id)


def curve(bench: Bench, ran: Ran, metric: str) -> list[tuple[int, float]]:
    """Step and value of every point, in order."""
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    points = client.get_metric_history(stored(bench, ran).info.run_id, metric)
    return sorted((point.step, point.value) for point in points)


def artifact(bench: Bench, ran: Ran, path: str, into: Path) -> Path:
    """A copy of a run's file."""
    client = MlflowClient(store_uri(bench.folder), store_uri(bench.folder))
    return Path(client.download_artifacts(stored(bench, ran).info.run_id, path, str(into)))


def weights(work: Path) -> dict[str, torch.Tensor]:
    """What a training ended with."""
    return torch.load(work / "draft.ckpt", weights_only=True)["state_dict"]
