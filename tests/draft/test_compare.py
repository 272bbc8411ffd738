"""Rows compared by one compiled operation learn what the plain operations teach them.

In processes of their own: torch compiles the package as users have it, without the checks of shapes that tests add.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny import TinyLab

from eagle3_lab.draft.compare import Learned, compare, require_compiler
from eagle3_lab.draft.loss import UnrolledLoss
from eagle3_lab.draft.teacher import Teacher
from eagle3_lab.draft.terms import SmoothL1
from eagle3_lab.errors import UserError

ROOT = Path(__file__).parents[2]

ALIKE = """
import torch
from eagle3_lab.draft.compare import Learned, compare
from eagle3_lab.draft.lk import KLToMeanAcceptance
from eagle3_lab.draft.loss import UnrolledLoss
from eagle3_lab.draft.teacher import Teacher
from eagle3_lab.draft.terms import HardCE, SoftCE, TopKCE
from torch._dynamo.utils import counters

torch._dynamo.config.recompile_limit = 1  # a process in which others have compiled; ours have room of their own
ROWS, SIZE = 8, 600
g = torch.Generator().manual_seed(0)
label = torch.randint(-1, SIZE, (ROWS,), generator=g)
p = torch.randn(ROWS, SIZE, generator=g).mul(3).softmax(-1)
taught, inside = torch.randint(2, (ROWS,), generator=g).float(), torch.rand(ROWS, generator=g)
teacher = Teacher(p, label, taught, 2 * p.argmax(-1), inside, label)
vocab, weight, made = 2 * torch.arange(SIZE), torch.rand(ROWS, generator=g), 0
for terms in ([SoftCE()], [SoftCE(0.5), TopKCE(2.0, k=3), HardCE()], [KLToMeanAcceptance(rate=2.0)]):
    losses = UnrolledLoss(terms)._row_losses
    for dtype in (torch.float32, torch.bfloat16):
        logits = p.log().add(torch.randn(ROWS, SIZE, generator=g)).to(dtype).requires_grad_()
        plain, fused = (
            compare(logits, teacher.rows, vocab, 3, Learned(losses, torch.tensor(0.4), weight, torch.tensor(0.3), how))
            for how in (False, True)
        )
        assert plain.hit.any() and not plain.hit.all() and torch.equal(plain.hit, fused.hit)
        torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused.overlap, plain.overlap, rtol=1e-5, atol=1e-6)
        assert fused.gradient.dtype == dtype and plain.gradient.abs().max() > 1e-3
        # a narrow gradient may round to its neighbour
        tolerance = {"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
        torch.testing.assert_close(fused.gradient, plain.gradient, **tolerance)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > made, "something was compiled"
        made = graphs
"""

STEPS = """
import json, sys
from eagle3_lab import load
from eagle3_lab.commands.bench_train import Setup

found = []
for compiled in ("false", "true"):
    step = Setup.of(load(sys.argv[1], f"model.compile_loss={compiled}"), True).step()
    found.append([step().loss for _ in range(3)])
print(json.dumps(found))
"""


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, with a compiler's cache of its own in ``folder``."""
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "MPLCONFIGDIR": str(folder)}
    env = os.environ | kept | environment
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_compiled_rows_have_the_same_losses_statistics_and_gradients(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", ALIKE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_training_with_a_compiled_loss_has_the_same_losses(tmp_path: Path, tiny: TinyLab) -> None:
    done = run(tmp_path, "-c", STEPS, str(experiment(tmp_path, tiny)))
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compiled = json.loads(done.stdout.splitlines()[-1])
    assert plain[2] < plain[0], "it learns"
    assert compiled == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so(tmp_path: Path, tiny: TinyLab) -> None:
    words = ["-m", "eagle3_lab", "fit", str(experiment(tmp_path, tiny)), "--model.compile_loss", "true"]
    done = run(tmp_path, *words, CXX="/nowhere/g++")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    complaints = [line for line in done.stderr.splitlines() if "model.compile_loss: true, but" in line]
    assert len(complaints) == 1 and "/nowhere/g++" in complaints[0], done.stderr[-3000:]
    assert "target:" not in done.stderr, "told before anything is loaded"


@pytest.mark.slow
def test_a_compiler_that_fails_at_the_first_step_costs_one_line_too(tmp_path: Path, tiny: TinyLab) -> None:
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    words = ["-m", "eagle3_lab", "fit", str(experiment(tmp_path, tiny)), "--model.compile_loss", "true"]
    done = run(tmp_path, *words, CXX=str(broken))
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "target:" in done.stderr
    complaints = [line for line in done.stderr.splitlines() if "model.compile_loss: true, but" in line]
    assert len(complaints) == 1 and "could not compile on this machine" in complaints[0], done.stderr[-3000:]


def test_triton_is_asked_for_on_a_gpu_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cpp_builder", None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    require_compiler(on_gpu=True)
    monkeypatch.setitem(sys.modules, "triton", None)  # what cannot be imported
    with pytest.raises(UserError, match=r"^model\.compile_loss: true, but .*triton.*; a compiler for C\+\+ is needed"):
        require_compiler(on_gpu=True)


def experiment(folder: Path, tiny: TinyLab) -> Path:
    file = folder / "compiled.yaml"
    file.write_text(f"""\
name: compiled
target: {{model: {tiny.target}}}
data: {{path: {tiny.data}, max_length: 64, row_length: 64}}
model:
  features: FusedFeature
  draft: {{class_path: Eagle3, init_args: {{head: target}}}}
  unroll: {{depth: 3}}
  losses: [SoftCE]
  draft_vocab: 64
optimizer: {{lr: 1.0e-2}}
trainer: {{max_steps: 3, products: float32}}
tracking: {{folder: {folder / "mlruns"}}}
""")
    return file


def test_a_loss_that_reads_no_law_has_no_gradient_by_logits() -> None:
    teacher = Teacher(
        torch.full((2, 3), 1 / 3), torch.tensor([0, 1]), torch.ones(2), torch.tensor([2, 1]), torch.full((2,), 0.5)
    )
    assert not UnrolledLoss([SmoothL1()]).row_terms
    logits = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]], requires_grad=True)
    learned = Learned(None, torch.zeros(()), torch.ones(2), torch.ones(()))
    found = compare(logits, teacher.rows, torch.arange(3), 1, learned)
    assert found.gradient is None and found.loss == 0
    assert found.hit.tolist() == [True, False]
    # one draft says id 2 nearly surely, of which the full law has a sixth
    assert found.overlap.tolist() == pytest.approx([1 / 6, 1 / 6], abs=1e-3)
