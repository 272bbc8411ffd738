"""What a second command takes from the first: all that its results do not depend on may change, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from tiny import TinyLab
from tiny_runs import Bench, Ran, make_bench

from eagle3_lab.tracking.run import store_uri
from eagle3_lab.training.module import DraftModule

TRAINED, MEASURED = "training: reused (unchanged)", "evaluation: reused (unchanged)"


@pytest.fixture
def done(finished: tuple[Bench, Ran], tmp_path: Path) -> tuple[Bench, Ran]:
    """A copy of the finished experiment, to be changed."""
    bench, ran = finished
    shutil.copytree(bench.folder, tmp_path / "mlruns")
    yaml = tmp_path / "tiny.yaml"
    yaml.write_text(bench.yaml.read_text().replace(str(bench.folder), str(tmp_path / "mlruns")))
    return Bench(yaml, tmp_path / "mlruns"), ran


def table(bench: Bench) -> dict[str, Any]:
    return json.loads((bench.work() / "closing.json").read_text())


# ------------------------------------------------------------------------------------------------------------


def test_what_decides_no_result_may_change_and_all_is_reused(
    done: tuple[Bench, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, ran = done
    monkeypatch.setattr(DraftModule, "training_step", None)
    words = ("--trainer.enable_progress_bar", "true", "--trainer.save_every_minutes", "5", "--model.budget_mib", "64")
    again = bench.run("fit", *words)
    assert (again.code, again.complaints) == (0, [])
    assert TRAINED in again.err and MEASURED in again.err
    run_id = table(bench)["run_id"]
    run = MlflowClient(store_uri(bench.folder), store_uri(bench.folder)).get_run(run_id)
    assert run_id in ran.out and run.data.params["model.budget_mib"] == "256"
    assert run.data.tags["changed"].startswith("model.budget_mib: 64; trainer.")


def test_which_layers_a_store_keeps_decides_nothing(bench: Bench) -> None:
    words = ("--evaluate", "null", "--trainer.max_steps", "2", "--trainer.val_check_interval", "1")
    first = bench.run("fit", *words, "--features.layers", "[1]")
    again = bench.run("fit", *words, "--features.layers", "[4]")
    assert (first.code, again.code, again.complaints) == (0, 0, [])
    assert TRAINED in again.err and again.out == first.out


def test_an_interrupted_training_goes_on_though_its_memory_is_bounded_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--evaluate", "null", "--trainer.val_check_interval", "6")
    step = DraftModule.training_step

    def interrupted(self: DraftModule, batch: Any, index: int) -> Any:
        if self.trainer.global_step == 4:
            raise RuntimeError("power cut")
        return step(self, batch, index)

    monkeypatch.setattr(DraftModule, "training_step", interrupted)
    with pytest.raises(RuntimeError, match="power cut"):
        bench.run("fit", *words, "--trainer.save_every_minutes", "0.00001")
    monkeypatch.setattr(DraftModule, "training_step", step)
    again = bench.run("fit", *words, "--model.budget_mib", "32", "--trainer.save_every_minutes", "3")
    assert again.code == 0 and "training: goes on from" in again.err
    assert "begins anew" not in again.err
    assert len([*(bench.folder / "work").iterdir()]) == 1


def test_moved_files_make_nothing_anew(done: tuple[Bench, Ran], tiny: TinyLab, tmp_path: Path) -> None:
    bench, _ = done
    shutil.copy(tiny.data, tmp_path / "moved.jsonl")
    again = bench.run("fit", "--data.path", str(tmp_path / "moved.jsonl"))
    assert (again.code, again.complaints) == (0, [])
    assert TRAINED in again.err and MEASURED in again.err


# ------------------------------------------------------------------------------------------------------ is made anew


def test_a_training_that_begins_anew_says_which_option_differs(done: tuple[Bench, Ran]) -> None:
    bench, _ = done
    name = bench.work().name
    words = ("--evaluate", "null", "--trainer.max_steps", "2", "--trainer.val_check_interval", "1")
    one = bench.run("fit", *words)
    assert f"training: begins anew: trainer.max_steps is 2, in {name} 6\n" in one.err
    two = bench.run("fit", *words, "--model.unroll.depth", "2", "--model.draft", "{class_path: Eagle3}")
    assert "training: begins anew: model.unroll.depth is 2, in tiny-" in two.err and " 3\n" in two.err
    three = bench.run("fit", *words, "--data.limit", "20")
    assert "training: begins anew: data.limit is 20, in tiny-" in three.err
    assert " null (and 1 more: data's conversations)\n" in three.err


def test_conversations_of_other_content_are_trained_on_anew(
    done: tuple[Bench, Ran], tiny: TinyLab, tmp_path: Path
) -> None:
    bench, _ = done
    lines = tiny.data.read_text().splitlines(keepends=True)
    (tmp_path / "talks.jsonl").write_text("".join(lines[1:]))
    words = ("--evaluate", "null", "--data.path", str(tmp_path / "talks.jsonl"))
    ran = bench.run("fit", *words)
    assert "training: begins anew: data.path is" in ran.err and "(and 1 more: data's conversations)" in ran.err
    assert TRAINED not in ran.err


def test_prompts_of_other_content_are_asked_anew(done: tuple[Bench, Ran], tmp_path: Path) -> None:
    bench, _ = done
    file = tmp_path / "prompts.jsonl"
    words = ("--evaluate.tasks", f"[{{name: mine, path: {file}}}]")
    file.write_text('{"turns": ["abc"]}\n')
    assert "evaluation: 4 answers in" in bench.run("fit", *words).err
    assert MEASURED in bench.run("fit", *words).err
    file.write_text('{"turns": ["xyz"]}\n{"turns": ["uvw"]}\n')
    again = bench.run("fit", *words)
    assert TRAINED in again.err and "evaluation: 8 answers in" in again.err
    assert {row["prompts"] for row in table(bench)["methods"]} == {2}


def test_a_head_that_was_trained_again_in_its_folder_is_measured_again(done: tuple[Bench, Ran]) -> None:
    bench, _ = done
    draft = bench.work() / "draft.ckpt"
    content = torch.load(draft, weights_only=True)
    content["state_dict"]["draft.lm_head.weight"] += 1.0
    torch.save(content, draft)
    again = bench.run("fit")
    assert TRAINED in again.err and "evaluation: 8 answers in" in again.err


def test_a_target_of_other_settings_is_another_target(tiny: TinyLab, tmp_path: Path) -> None:
    for file in tiny.target.iterdir():
        (tmp_path / "target").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "target")
    bench = make_bench(TinyLab(tmp_path / "target", tiny.data), tmp_path)
    words = ("--evaluate", "null", "--trainer.max_steps", "1", "--trainer.val_check_interval", "1")
    assert bench.run("fit", *words).code == 0
    head = bench.work() / "draft.ckpt"
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    again = bench.run("fit", *words)
    assert "training: begins anew: target's settings is" in again.err and TRAINED not in again.err
    refused = bench.run("evaluate", "--checkpoint-path", str(head))
    assert refused.code == 2 and "trained for a target whose config.json hash is" in refused.complaints[-1]


# ----------------------------------------------------------------------------------------- a checkpoint's own options


@pytest.mark.parametrize(
    "words, told",
    [
        (("--model.features", "{class_path: FusedFeature, init_args: {layers: [0, 2, 4]}}"),
         "model.features.layers [1, 2, 3], the experiment has [0, 2, 4]"),
        (("--model.draft.rope_base", "500000"), "model.draft.rope_base 10000.0, the experiment has 500000.0"),
        (("--model.draft.rms_eps", "1.0e-3"), "model.draft.rms_eps 1e-06, the experiment has 0.001"),
        (("--model.draft.feedback", "post_norm"), "model.draft.feedback 'pre_norm', the experiment has 'post_norm'"),
        (("--model.draft.heads", "2", "--model.draft.kv_heads", "1", "--model.draft.head_dim", "16"),
         "model.draft.heads 4, the experiment has 2"),
        (("--model.draft_vocab", "32"), "model.draft_vocab 64, the experiment has 32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["evaluate", "generate abc"])
def test_a_head_is_loaded_only_into_what_it_was_trained_as(
    finished: tuple[Bench, Ran], words: tuple[str, ...], told: str, verb: str
) -> None:
    bench, _ = finished
    (head,) = (bench.folder / "work").glob("*/draft.ckpt")
    name, *asked = verb.split()
    ran = bench.run(name, *asked, "--checkpoint-path", str(head), *words)
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaints == [f"{head}: was trained with {told}; write what it was trained with, or train another head"]


def test_a_beginning_of_other_options_is_refused_with_its_key(finished: tuple[Bench, Ran]) -> None:
    bench, _ = finished
    (head,) = (bench.folder / "work").glob("*/draft.ckpt")
    ran = bench.run("fit", "--dry-run", "--model.start", str(head), "--model.draft.rope_base", "20000")
    assert ran.code == 2
    assert (
        "model.start: " in ran.complaints[0] and "was trained with model.draft.rope_base 10000.0" in ran.complaints[0]
    )
    assert bench.run("fit", "--dry-run", "--model.start", str(head), "--model.draft.rope_base", "10000").code == 0


def test_a_head_of_before_its_options_were_kept_is_loaded_with_what_it_has(
    finished: tuple[Bench, Ran], tmp_path: Path
) -> None:
    bench, _ = finished
    (head,) = (bench.folder / "work").glob("*/draft.ckpt")
    content = torch.load(head, weights_only=True)
    del content["eagle3_lab"]["options"], content["eagle3_lab"]["target"]["settings_hash"]
    torch.save(content, tmp_path / "old.ckpt")
    ran = bench.run("generate", "abc", "--checkpoint-path", str(tmp_path / "old.ckpt"), "--max-new-tokens", "4")
    assert ran.code == 0, ran.err
