"""What a user can get wrong, and the one line that it costs. Nothing that was made before is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from tiny import TinyLab, write_target
from tiny_runs import Bench, Ran
from torch._inductor import config as inductor

from eagle3_lab.system.files import require_place
from eagle3_lab.training.callbacks import Interrupts
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.trainer import Training


def refused(bench: Bench, *words: str, verb: str = "fit") -> str:
    """The one line of a command line that is refused."""
    ran = bench.run(verb, *words)
    assert (ran.code, ran.out) == (2, ""), ran.err
    (line,) = ran.complaints
    return line


# ------------------------------------------------------------------------------------------------------------- the YAML


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("model.unrol.depth", "3", "command line: model.unrol: unknown key; did you mean 'unroll'?"),
        ("model.draft", "Eagle9", "command line: model.draft: 'Eagle9' is no DraftModel; did you mean 'Eagle3'?"),
        ("trainer.max_steps", "many", "command line: trainer.max_steps: expected int, got 'many'"),
        ("model.unroll.depth", "0", "model.unroll: unroll.depth must be >= 1, got 0"),
        ("model.draft_vocab", "0", "model: draft_vocab must be >= 1, or null for every token, got 0"),
        ("judged_depth", "0", "judged_depth must be >= 1, got 0"),
        ("model.features.width", "0", "features.width must be >= 1, or null for the target's, got 0"),
        ("model.losses.0.weight", "-1", "losses.SoftCE.weight must be >= 0, got -1.0"),
        ("optimizer.lr", "0", "optimizer.lr must be > 0 and at most 1000, got 0.0"),
        ("optimizer.betas", "[1.0, 0.9]", "optimizer.betas must be two numbers in [0, 1), got [1.0, 0.9]"),
        ("optimizer.weight_decay", "-1", "optimizer.weight_decay must be >= 0, got -1.0"),
        ("trainer.save_every_minutes", "0", "trainer.save_every_minutes must be > 0 and at most 1000000, got 0.0"),
        ("trainer.accumulate_grad_batches", "0", "trainer.accumulate_grad_batches must be >= 1, got 0"),
        ("trainer.fast_dev_run", "true", "command line: trainer: trainer.fast_dev_run is True, which saves no head"),
        ("trainer.max_time", "00:00:00:00", "command line: trainer: trainer.max_time is 00:00:00:00, which would "),
        ("target.dtype", "int8", "target.dtype must be one of float16, bfloat16, float32, float64, got int8"),
        ("evaluate.other_dtype", "float8_e4m3fn", "evaluate.other_dtype must be one of float16, bfloat16, float32, "),
        ("data.seed", "-1", "command line: data: seed must be within 0 .. 2**63 - 1, got -1"),
        ("data.path", '""', "command line: data: path must name a .jsonl, .jsonl.gz or .json file, got ''"),
        ("evaluate.tasks", '[{name: mine, path: ""}]', "command line: evaluate.tasks.0: path must name a .jsonl, "),
        ("trainer.precision", "bf16-mixed", "trainer.products is 'float32' and trainer.precision 'bf16-mixed'"),
        ("evaluate.tasks.0.name", "gsm9k", "task: unknown name 'gsm9k' without a path; did you mean 'gsm8k'?"),
        ("evaluate.tasks", "[]", "evaluate.tasks must be at least one, each of a name of its own, got []"),
        ("evaluate.max_new_tokens", "0", "evaluate.max_new_tokens must be >= 1, got 0"),
        ("evaluate.methods.dynamic.grow.budget", "99", "budget must lie in 2 .. 22 with levels 3 and width 3, got 99"),
        ("evaluate.methods.chain.grow.length", "1000000000", "chain.grow: length must be at most 1024, got 1000000000"),
    ],
)
def test_a_wrong_value_is_told_with_its_key(bench: Bench, key: str, value: str, line: str) -> None:
    assert line in refused(bench, f"--{key}", value)


def test_a_training_without_an_end_is_refused(bench: Bench) -> None:
    line = refused(bench, "--trainer.max_steps", "-1", "--trainer.max_epochs", "-1")
    assert line.endswith("trainer.max_steps or trainer.max_epochs must be >= 1: the schedule needs a last step")


def test_a_mistake_in_the_file_is_told_with_its_line(bench: Bench) -> None:
    text = bench.yaml.read_text()
    bench.yaml.write_text(text.replace("optimizer:", "optimiser:"))
    number = text[: text.index("optimizer:")].count("\n") + 1
    assert refused(bench).startswith(f"{bench.yaml}:{number}: optimiser: unknown key; did you mean 'optimizer'?")


# ------------------------------------------------------------------------------------------------------------- the data


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ": empty; one JSON object a line is needed"),
        ('{"messages": []}\n', ":1: messages is a list of 0"),
        ('{"id": 1,\n', ":1: broken JSON"),
        (None, "no file "),
    ],
    ids=["empty", "no messages", "broken", "missing"],
)
def test_data_that_cannot_be_read_is_named_with_its_line(
    bench: Bench, tmp_path: Path, text: str | None, fault: str
) -> None:
    path = tmp_path / "mine.jsonl"
    if text is not None:
        path.write_text(text)
    line = refused(bench, "--data.path", str(path))
    assert fault in line
    assert str(path) in line


def test_data_of_which_no_answer_is_left_is_refused_with_the_reason(bench: Bench) -> None:
    line = refused(bench, "--data.max_length", "20")
    assert "nothing to train on within max_length 20 (train: 0 of " in line and "conversations; dropped" in line
    assert "no answer within max_length" in line


def test_answers_too_short_to_draft_from_are_refused(bench: Bench, tmp_path: Path, tiny: TinyLab) -> None:
    record = json.loads(tiny.data.read_text().splitlines()[0])
    record["messages"][1]["content"] = "a"  # with its end two tokens: the second can be drafted, unless it is cut off
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    whole.write_text(json.dumps(record | {"cut": False}))
    cut.write_text(json.dumps(record | {"cut": True}))
    words = (
        "--data.held_out",
        "0",
        "--evaluate",
        "null",
        "--dry-run",
        "--trainer.val_check_interval",
        "1",
        "--data.path",
    )
    assert "no row can be trained on with mask 'drafted'" in refused(bench, *words, str(cut))
    assert bench.run("fit", *words, str(whole)).code == 0


def test_a_target_without_a_chat_template_is_refused(bench: Bench, tmp_path: Path) -> None:
    line = refused(bench, "--target.model", str(write_target(tmp_path / "bare", template=None)))
    assert line.startswith("chat template: the tokenizer has none; use a chat (instruct) model")


# ----------------------------------------------------------------------------------------------------------- the target


def test_a_target_that_cannot_be_loaded_is_named(bench: Bench, tmp_path: Path, tiny: TinyLab) -> None:
    (tmp_path / "empty").mkdir()
    torn = tmp_path / "torn"
    shutil.copytree(tiny.target, torn)
    (torn / "model.safetensors").write_bytes(b"no weights")
    for folder, fault in (("empty", "cannot load"), ("torn", "cannot load"), ("nowhere", "no folder")):
        line = refused(bench, "--target.model", str(tmp_path / folder))
        assert line.startswith("target.model: ")
        assert fault in line
        assert str(tmp_path / folder) in line


def test_a_device_that_is_not_there_is_named(bench: Bench) -> None:
    assert "target.device" in refused(bench, "--target.device", "cuda:99")
    assert "target.device" in refused(bench, "--target.device", "abacus")


# ------------------------------------------------------------------------------------------------------------- the head


def test_a_draft_vocabulary_beyond_the_tokenizer_is_refused_with_the_range(bench: Bench) -> None:
    line = refused(bench, "--model.draft_vocab", "5000")
    assert line == "model: draft vocabulary size must be within 1..259 (or 300: every row), got 5000"


def test_a_draft_vocabulary_beyond_the_tokens_seen_is_filled(bench: Bench) -> None:
    assert bench.run("fit", "--dry-run", "--model.draft_vocab", "250").code == 0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("--model.losses", "[SmoothL1]"),
            (
                "model: losses: SmoothL1 needs the target's own feature to compare with, but FusedFeature projects "
                "it; use TopFeature, or drop the term"
            ),
        ),
        (
            ("--model.features", "TopFeature", "--model.draft", "Eagle1"),
            "model: draft_vocab must be null for Eagle1, which speaks through the target's own head of 300 ids, got 64",
        ),
        (
            ("--model.unroll.attention", "MultiplicativeUnrolled"),
            "unroll.attention: MultiplicativeUnrolled depends on a row's whole length, so it needs one document a row",
        ),
        (("--model.features.layers", "[1, 1]"), "features.layers must be ascending ids within 0..4, got [1, 1]"),
        (("--model.features.layers", "[1, 5]"), "features.layers must be ascending ids within 0..4, got [1, 5]"),
        (
            ("--model.features.width", "16"),
            "model: draft.head must be random for a draft of width 16: the rows of the target's head are 32 wide",
        ),
    ],
    ids=["feature loss", "frozen head", "packed", "repeated layer", "no such layer", "width"],
)
def test_parts_that_do_not_go_together_are_refused_before_training(
    bench: Bench, words: tuple[str, ...], fault: str
) -> None:
    assert fault in refused(bench, *words)
    assert not (bench.folder / "work").exists()


def test_losses_that_all_weigh_nothing_are_refused(bench: Bench) -> None:
    line = refused(bench, "--model.losses.0.weight", "0")
    assert line == "model: losses must hold a term with a positive weight, got ['SoftCE']"


@pytest.mark.parametrize("verb", ["fit", "bench train"])
def test_a_loss_that_cannot_be_compiled_is_told_before_the_target_is_loaded(bench: Bench, verb: str) -> None:
    with inductor.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        ran = bench.run(verb, "--model.compile", "true", "--target.device", "cpu")
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("model.compile: true, but torch could not compile on this machine (No working C++")


# ----------------------------------------------------------------------------------------------------- the measurements


def test_what_cannot_be_measured_is_told_before_training(bench: Bench, tmp_path: Path) -> None:
    long, none = tmp_path / "long.jsonl", tmp_path / "none.jsonl"
    long.write_text(json.dumps({"question_id": "q7", "turns": ["x" * 300]}))
    wide = ("--model.draft_vocab", "8", "--evaluate.methods.static.grow", "{class_path: Chain, init_args: {length: 2}}")
    tree = "{class_path: DynamicTree, init_args: {levels: 2, width: 9, budget: 8}}"
    for words, fault in (
        (("--evaluate.tasks", f"[{{name: mine, path: {long}}}]"), "task mine: turn 0 of prompt q7 has"),
        (("--evaluate.tasks", f"[{{name: mine, path: {none}}}]"), "no file"),
        (("--data.held_out", "0"), "task held_out: no prompts"),
        ((*wide, "--evaluate.methods.dynamic.grow", tree), "evaluate.methods.dynamic: width is 9"),
    ):
        assert fault in refused(bench, *words)
    assert not (bench.folder / "work").exists()


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({"hidden": 64}, "hidden size is 32"),
        ({"vocab": 320}, "vocabulary is 300"),
        ({"special": "<|x|>"}, "tokenizer hash"),
    ],
    ids=["width", "vocabulary", "tokenizer"],
)
def test_a_head_of_another_target_is_refused_with_what_differs(
    finished: tuple[Bench, Ran], bench: Bench, tmp_path: Path, sizes: dict[str, Any], fault: str
) -> None:
    other, head = write_target(tmp_path / "other", **sizes), finished[0].work() / "draft.ckpt"
    line = refused(bench, "--target.model", str(other), "--checkpoint-path", str(head), verb="evaluate")
    assert line.startswith(f"{head}: trained for a target whose {fault}")


def test_a_head_of_other_parts_is_refused(finished: tuple[Bench, Ran], bench: Bench) -> None:
    head = finished[0].work() / "draft.ckpt"
    deeper = "{class_path: Eagle3, init_args: {num_layers: 2}}"
    line = refused(bench, "--model.draft", deeper, "--checkpoint-path", str(head), verb="evaluate")
    assert line.startswith(f"{head}: was trained with model.draft.num_layers 1, the experiment has 2; ")


def test_a_file_that_is_no_checkpoint_is_refused(finished: tuple[Bench, Ran], bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("a shopping list")
    whole = (finished[0].work() / "draft.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    torch.save(torch.ones(3), tmp_path / "tensor.ckpt")
    torch.save({"weights": torch.ones(3)}, tmp_path / "other.ckpt")
    for name, fault in (
        ("text", "cannot be read as a checkpoint"),
        ("half", "cannot be read as a checkpoint"),
        ("tensor", "holds a Tensor, no checkpoint"),
        ("other", "not a checkpoint of eagle3_lab"),
        ("missing", "checkpoint: no file"),
    ):
        path = tmp_path / f"{name}.ckpt"
        line = refused(bench, "--checkpoint-path", str(path), verb="evaluate")
        assert fault in line
        assert str(path) in line


# ------------------------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_folder_for_runs_that_cannot_be_written_is_named_at_once(bench: Bench, tmp_path: Path, verb: str) -> None:
    (tmp_path / "taken").write_text("a file")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        ran = bench.run(verb, "--tracking.folder", str(folder))
        assert (ran.code, ran.out) == (2, "")
        (line,) = ran.err.splitlines()
        assert line.startswith(f"tracking.folder: {folder} cannot be written (")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_disk_too_small_for_checkpoints_is_told_before_training(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    line = refused(bench)
    assert "B free" in line
    assert "needed for checkpoints; free some, or set tracking.folder to another disk" in line


def test_a_training_that_comes_to_nothing_is_ended_and_leaves_no_head(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(UnrolledLoss, "_row_losses", lambda self, log_q, law, acceptance: log_q.sum(-1) * float("nan"))
        line = refused(bench)
    assert re.match(r"training: the loss is nan at step \d; lower optimizer.lr", line)
    assert not (bench.work() / "draft.ckpt").exists()


@pytest.mark.parametrize(
    ("every", "line"),
    [
        ("1", r"training: the loss is nan at step 4; lower optimizer\.lr, or set trainer\.gradient_clip_val$"),
        (
            "100",
            r"training: \w+\.\S+ is not finite after step 4, and \S*last\.ckpt is not written; lower optimizer\.lr",
        ),
    ],
    ids=["seen in the loss", "seen in a weight"],
)
def test_a_training_that_diverges_leaves_the_checkpoint_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, every: str, line: str
) -> None:
    losses, steps = UnrolledLoss._row_losses, list[int]()
    words = ("--evaluate", "null", "--trainer.save_every_minutes", "1.0e-9", "--trainer.log_every_n_steps", every)

    def diverging(self: UnrolledLoss, *given: Any) -> torch.Tensor:
        return losses(self, *given) * (float("nan") if steps else 1.0)

    class Fourth(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            steps[:] = [1] if trainer.global_step >= 3 else []

        on_validation_start = on_validation_end = lambda self, *_: steps.clear()

    make = Training.make
    with monkeypatch.context() as patch:
        patch.setattr(UnrolledLoss, "_row_losses", diverging)
        patch.setattr(Training, "make", lambda self, log, calls, *rest: make(self, log, [*calls, Fourth()], *rest))
        for _ in range(2):
            assert re.match(line, refused(bench, *words))
            assert torch.load(bench.work() / "last.ckpt", weights_only=True)["global_step"] == 3
    assert bench.run("fit", *words).code == 0, "what it goes on from is finite"


def test_a_checkpoint_to_go_on_from_that_is_not_finite_is_named_with_the_way_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote them."""
    words = ("--evaluate", "null", "--trainer.save_every_minutes", "1.0e-9")
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "on_train_batch_end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert bench.run("fit", *words).code == 130
    last = bench.work() / "last.ckpt"
    content = torch.load(last, weights_only=True)
    content["optimizer_states"][0]["state"][0]["exp_avg"][0] = float("inf")
    torch.save(content, last)
    line = refused(bench, *words)
    assert line.startswith(
        f"{last}: optimizer_states.0.state.0.exp_avg is not finite; remove it, and lower optimizer.lr"
    )


def test_a_disk_that_fills_up_costs_one_line_and_no_step_that_was_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def fsync(handle: int) -> None:
        if "last.ckpt" not in os.readlink(f"/proc/self/fd/{handle}"):
            return
        written.append(handle)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = ("--evaluate", "null", "--trainer.save_every_minutes", "1.0e-9")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        line = refused(bench, *words)
    assert line.startswith(f"{bench.work() / 'last.ckpt'}: checkpoint not written (No space left on device)")
    assert torch.load(bench.work() / "last.ckpt", weights_only=True)["global_step"] == 3
    assert not list(bench.work().glob(".last.ckpt-*"))
    assert bench.run("fit", *words).code == 0
    assert torch.load(bench.work() / "draft.ckpt", weights_only=True)["global_step"] == 6


def test_a_store_that_fills_up_costs_one_line_and_no_step_that_was_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = MlflowClient.log_batch

    def log_batch(client: MlflowClient, run_id: str, metrics: Sequence[Metric] = (), **more: Any) -> None:
        if any(metric.key == "train/loss" and metric.step == 4 for metric in metrics):
            full = sqlite3.OperationalError("database or disk is full")
            raise MlflowException("(sqlite3.OperationalError) database or disk is full\n(Background: a page)") from full
        written(client, run_id, metrics, **more)

    words = ("--evaluate", "null", "--trainer.save_every_minutes", "1.0e-9")
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", log_batch)
        line = refused(bench, *words)
    assert line.startswith(f"{bench.folder}: run ")
    assert line.endswith("(database or disk is full); make room and run again")
    assert torch.load(bench.work() / "last.ckpt", weights_only=True)["global_step"] == 4, "a step is logged, then saved"
    assert bench.run("fit", *words).code == 0


def test_a_checkpoint_to_go_on_from_that_is_damaged_is_named_and_not_overwritten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    words = ("--evaluate", "null", "--trainer.save_every_minutes", "1.0e-9")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        refused(bench, *words)
    last = bench.work() / "last.ckpt"
    last.write_text("half a checkpoint")
    assert refused(bench, *words).startswith(f"{last}: cannot be read as a checkpoint")
    assert last.read_text() == "half a checkpoint"


def test_a_table_that_cannot_be_written_is_told_after_everything_is_kept(
    finished: tuple[Bench, Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, fitted = finished
    place, move = tmp_path / "table.json", os.replace

    def full(source: Path, destination: Path) -> None:
        if destination == place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        move(source, destination)

    monkeypatch.setattr(os, "replace", full)
    ran = bench.run("fit", "--json", str(place))
    assert (ran.code, ran.out) == (2, fitted.out)
    assert ran.complaints == [f"{place}: cannot be written (No space left on device); name a file that can be written"]


@pytest.mark.parametrize("verb", ["fit", "evaluate", "bench decode", "bench train", "bench prepare"])
def test_a_place_that_cannot_be_written_is_told_at_once(bench: Bench, tmp_path: Path, verb: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "link").symlink_to(tmp_path / "taken" / "below.json")
    for name in ("taken/table.json", "taken/below/table.json", "link", "circle", "x" * 300 + "/table.json"):
        line = refused(bench, "--json", str(tmp_path / name), verb=verb)
        assert line.startswith(f"--json: {tmp_path / name} cannot be written ("), line
        assert line.endswith("); name a file that can be written")
    line = refused(bench, "--json", str(tmp_path), verb=verb)
    assert line == f"--json: {tmp_path} cannot be written; name a file that can be written"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["circle", "link", "taken", "tiny.yaml"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc here, where not even root makes a file")
def test_a_folder_that_takes_no_files_is_told_at_once_whoever_asks(bench: Bench) -> None:
    line = refused(bench, "--json", "/proc/x/table.json", verb="evaluate")
    assert line.startswith("--json: /proc/x/table.json cannot be written (")


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("before")
    for place in (old, tmp_path / "new.json", tmp_path / "a" / "b" / "new.json", Path("/dev/null")):
        require_place(place, "--json")
    assert [one.name for one in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "before"


# ---------------------------------------------------------------------------------------------------------- the trainer


def test_options_that_lightning_refuses_cost_one_line(bench: Bench) -> None:
    line = refused(bench, "--trainer.val_check_interval", "500")
    assert line.startswith("trainer.val_check_interval: 500 steps, but a pass over the data has ")
    line = refused(bench, "--evaluate", "null", "--trainer.devices", "abc")
    assert line.startswith("trainer.devices: 'abc': ")
    line = refused(bench, "--trainer.strategy", "telepathy")
    assert line.startswith("trainer: You selected an invalid strategy name")
    assert "trainer.max_steps must be within 1 .. 1000000000, or -1" in refused(bench, "--trainer.max_steps", "-7")
