"""`bench train`: what it measures is a real step, and every optimisation can be turned off without changing it."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import Bench

from eagle3_lab.backend import onednn_linear
from eagle3_lab.bench.timed_step import TimedStep
from eagle3_lab.bench.training_setup import Setup
from eagle3_lab.experiment import load

STEP = """\
import json, sys
shape = json.loads(sys.stdin.readline())
print(json.dumps({"versions": {"speculators": "9"}, "attention": "eager", "parameters": len(shape["document"])}))
sys.stdout.flush()
for _ in sys.stdin:
    print(json.dumps({"seconds": 100.0, "cpu_seconds": 99.0, "loss": 1.0, "peak_bytes": 1}), flush=True)
"""


def prepared(bench: Bench, *overrides: str, every_row: bool = True) -> Setup:
    return Setup.of(load(bench.yaml, *overrides), every_row)


def losses(setup: Setup, steps: int = 3) -> list[float]:
    step = setup.step()
    return [step().loss for _ in range(steps)]


def test_every_optimisation_turned_off_gives_the_same_losses(bench: Bench) -> None:
    as_it_is = losses(prepared(bench))
    assert as_it_is[2] < as_it_is[0], "it learns"
    for off in (
        ["model.unroll.attention=eagle3_lab.draft.attention.dense.DenseUnrolled"],
        ["model.budget_mib=null"],
        ["model.budget_mib=1"],
        ["model.unroll.attention=eagle3_lab.draft.attention.dense.DenseUnrolled", "model.budget_mib=null"],
    ):
        assert losses(prepared(bench, *off)) == pytest.approx(as_it_is, abs=1e-5), off


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_float32_products_by_onednn_and_by_mkl_give_the_same_losses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for by_onednn in (True, False):
        monkeypatch.setattr(onednn_linear, "outdoes_mkl", lambda by_onednn=by_onednn: by_onednn)
        found.append(losses(prepared(bench)))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_the_timed_step_is_the_trainers(bench: Bench) -> None:
    """The loss of its first step, before anything is learned, is the module's own."""
    setup = prepared(bench, every_row=False)
    out, _ = setup.module.run(setup.batch)
    assert losses(setup, 1) == pytest.approx([float(out.total.detach())], abs=1e-6)


def test_without_the_loss_the_head_learns_nothing(bench: Bench) -> None:
    setup = prepared(bench)
    before = setup.module.draft.lm_head.weight.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
    setup.step(with_loss=False)()
    assert torch.equal(setup.module.draft.lm_head.weight, before)  # pyright: ignore[reportAttributeAccessIssue]
    setup.step()()
    assert not torch.equal(setup.module.draft.lm_head.weight, before)  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_format_is_refused(bench: Bench) -> None:
    setup = prepared(bench)
    with pytest.raises(ValueError, match="products must be"):
        TimedStep(setup.module, setup.batch, "16-mixed")


def test_the_bench_reports_in_words_and_for_machines(bench: Bench, tmp_path: Path) -> None:
    table, rival = tmp_path / "bench.json", tmp_path / "python"
    rival.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{STEP}'\n")
    rival.chmod(rival.stat().st_mode | stat.S_IXUSR)
    words = ["--steps", "2", "--memory", "false", "--rival", str(rival), "--json", str(table)]
    ran = bench.run("bench train", *words)
    assert ran.code == 0, ran.err
    told = json.loads(table.read_text())
    assert told["shape"]["row_length"] == 128 and told["shape"]["depth"] == 3 and told["shape"]["draft_vocab"] == 64
    assert len(told["ours"]["all_seconds"]) == 2, "the first one warms up"
    assert told["rival"]["parameters"] == 128 and told["rival"]["seconds"] == 100
    ratio = sorted(100 / seconds for seconds in told["ours"]["all_seconds"])
    assert sorted(told["times_faster"]["all"]) == pytest.approx(ratio)
    share = told["operations"]["total"] / told["ours"]["seconds"] / told["product_rate"]
    assert told["ours"]["share_of_product_rate"] == pytest.approx(share)
    assert "tokens/s" in ran.out and "eager path" in ran.out
    assert not bench.folder.exists(), "nothing is logged"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps: must be >= 1, got 0"),
        (["--rival", "/nowhere/python"], "--rival: no file /nowhere/python"),
        (["--rival", sys.executable, "--data.rows_per_batch", "2"], "--data.rows_per_batch 1"),
        (["--rival", "/bin/false"], "--rival: /bin/false ended"),
        (["--features", "{layers: [9]}"], "features.layers: 9, but"),
        (["--rows", "every"], "--rows: expected one of 'all', 'data', got 'every'"),
    ],
)
def test_bad_input_is_one_line(bench: Bench, words: list[str], said: str) -> None:
    ran = bench.run("bench train", *words)
    assert ran.code == 2
    assert len(ran.complaints) == 1 and said in ran.complaints[0], ran.err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to tell a peak")
def test_head_and_loss_take_memory_that_a_step_without_them_does_not(bench: Bench, tmp_path: Path) -> None:
    table = tmp_path / "bench.json"
    # logits of ten megabytes: a process's own peak wavers by half of one
    words = ["--data.row_length", "1024", "--model.draft_vocab", "null", "--model.budget_mib", "null"]
    words += ["--data.rows_per_batch", "8"]
    assert bench.run("bench train", "--steps", "1", "--json", str(table), *words).code == 0
    memory = json.loads(table.read_text())["memory"]
    assert memory["step_bytes"] > memory["without_loss_bytes"] >= 0, memory


def test_what_is_kept_of_the_targets_logits_changes_no_loss(bench: Bench) -> None:
    """`features` in the experiment: the summary is at hand, and the step makes the draft vocabulary's logits alone."""
    kept = prepared(bench, "features={}")
    assert kept.summary is not None and prepared(bench).summary is None
    target = kept.module.target
    widths: list[int] = []
    made = target.logits
    target.logits = lambda top: widths.append(top.shape[0]) or made(top)  # type: ignore[method-assign]
    step = kept.step()
    widths.clear()
    found = [step().loss for _ in range(3)]
    assert not widths, "logits over all ids were made"
    assert found == pytest.approx(losses(prepared(bench)), abs=1e-5)
