"""What torch compiles of a training step teaches what the plain operations teach.

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
from tiny import TinyLab

from eagle3_lab.backend.compile import fusible, fusing, is_fusing, require_compiler
from eagle3_lab.errors import UserError

ROOT = Path(__file__).parents[2]

ROWS = """
import torch
from eagle3_lab.training.loss.row_losses import Learned, compare
from eagle3_lab.training.loss.lk import KLToMeanAcceptance
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.loss.teacher import Teacher
from eagle3_lab.training.loss.terms import HardCE, SoftCE, TopKCE
from eagle3_lab.backend.compile import fusing
from torch._dynamo.utils import counters

torch._dynamo.config.recompile_limit = 1  # a process in which others have compiled; ours have room of their own
COUNT, SIZE = 8, 600
g = torch.Generator().manual_seed(0)
label = torch.randint(-1, SIZE, (COUNT,), generator=g)
p = torch.randn(COUNT, SIZE, generator=g).mul(3).softmax(-1)
taught, inside = torch.randint(2, (COUNT,), generator=g).float(), torch.rand(COUNT, generator=g)
teacher = Teacher(p, label, taught, 2 * p.argmax(-1), inside, label)
vocab, weight, made = 2 * torch.arange(SIZE), torch.rand(COUNT, generator=g), 0
for terms in ([SoftCE()], [SoftCE(0.5), TopKCE(2.0, k=3), HardCE()], [KLToMeanAcceptance(rate=2.0)]):
    losses = UnrolledLoss(terms)._row_losses
    for dtype in (torch.float32, torch.bfloat16):
        logits = p.log().add(torch.randn(COUNT, SIZE, generator=g)).to(dtype).requires_grad_()
        learned = Learned(losses, torch.tensor(0.4), weight, torch.tensor(0.3))
        plain = compare(logits, teacher.rows, vocab, 3, learned)
        with fusing():
            fused = compare(logits, teacher.rows, vocab, 3, learned)
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


ATTENTION = """
import torch
from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.attention.unrolled import JoinedUnrolled
from eagle3_lab.backend.compile import fusing
from eagle3_lab.types import PADDING, Rows

def found(context, tensors, document):
    rows = Rows(position=torch.zeros_like(document), document=document)
    outs = [context.attend(0, q, k, v, rows) for q, k, v in zip(*[iter(tensors)] * 3)]
    pulls = [torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out) for out in outs]
    return [*outs, *torch.autograd.grad(sum((o * p).sum() for o, p in zip(outs, pulls)), tensors)]

draw = torch.Generator().manual_seed(0)
for lengths in ((150, 1, 9), (5, 160)):
    document = torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)] + [PADDING] * 3])
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.02)):
        tensors = [
            torch.randn(1, n, document.shape[1], 16, generator=draw).to(dtype).requires_grad_()
            for _ in range(4) for n in (6, 2, 2)
        ]
        truth = found(DenseUnrolled(), [x.detach().double().requires_grad_() for x in tensors], document)
        with fusing():
            context = JoinedUnrolled()
            ours = found(context, tensors, document)
        for mine, theirs in zip(ours, truth):
            assert mine.dtype == dtype
            assert (mine - theirs).norm() <= tolerance * theirs.norm(), (dtype, (mine - theirs).norm() / theirs.norm())
"""

STEPS = """
import json, sys
from eagle3_lab import load
from eagle3_lab.bench.training_setup import Setup
from torch._dynamo.utils import counters

found = []
for compiled in ("false", "true"):
    step = Setup.of(load(sys.argv[1], f"model.compile={compiled}", *sys.argv[2:]), True).step()
    made = counters["stats"]["unique_graphs"]
    found.append([step().loss for _ in range(3)])
    assert (counters["stats"]["unique_graphs"] > made) == (compiled == "true")
print(json.dumps(found))
"""

HEADS = {
    "EAGLE-3": [],
    "two layers": ["model.draft.init_args.num_layers=2", "model.unroll.detach=true"],
    "EAGLE": ["model.features=TopFeature", "model.draft={class_path: Eagle1}", "model.draft_vocab=null"],
    "Hydra": ["model.features=TopFeature", "model.draft={class_path: Hydra, init_args: {heads: 3}}"],
}


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, with a compiler's cache of its own in ``folder``."""
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "MPLCONFIGDIR": str(folder)}
    env = os.environ | kept | environment
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("program", [ROWS, ATTENTION], ids=["rows", "attention"])
def test_compiled_parts_have_the_same_values_and_gradients(program: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "products", "tolerance"),
    [
        ("EAGLE-3", "float32", 1e-5),
        ("EAGLE-3", "bfloat16", 0.02),
        ("two layers", "bfloat16", 0.02),
        ("EAGLE", "float32", 1e-5),
        ("Hydra", "bfloat16", 0.02),
    ],
)
def test_a_compiled_training_has_the_same_losses(
    head: str, products: str, tolerance: float, tmp_path: Path, tiny: TinyLab
) -> None:
    options = [*HEADS[head], f"trainer.products={products}"]
    done = run(tmp_path, "-c", STEPS, str(experiment(tmp_path, tiny)), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, compiled = json.loads(done.stdout.splitlines()[-1])
    assert plain[2] < plain[0], "it learns"
    assert compiled == pytest.approx(plain, rel=tolerance)


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so(tmp_path: Path, tiny: TinyLab) -> None:
    words = ["-m", "eagle3_lab", "fit", str(experiment(tmp_path, tiny)), "--model.compile", "true"]
    done = run(tmp_path, *words, CXX="/nowhere/g++")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    complaints = [line for line in done.stderr.splitlines() if "model.compile: true, but" in line]
    assert len(complaints) == 1 and "/nowhere/g++" in complaints[0], done.stderr[-3000:]
    assert "target:" not in done.stderr, "told before anything is loaded"


@pytest.mark.slow
def test_a_compiler_that_fails_at_the_first_step_costs_one_line_too(tmp_path: Path, tiny: TinyLab) -> None:
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    words = ["-m", "eagle3_lab", "fit", str(experiment(tmp_path, tiny)), "--model.compile", "true"]
    done = run(tmp_path, *words, CXX=str(broken))
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "target:" in done.stderr
    complaints = [line for line in done.stderr.splitlines() if "model.compile: true, but" in line]
    assert len(complaints) == 1 and "could not compile on this machine" in complaints[0], done.stderr[-3000:]


def test_triton_is_asked_for_on_a_gpu_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cpp_builder", None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    require_compiler(on_gpu=True)
    monkeypatch.setitem(sys.modules, "triton", None)  # what cannot be imported
    with pytest.raises(UserError, match=r"^model\.compile: true, but .*triton.*; a compiler for C\+\+ is needed"):
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


def test_a_marked_function_is_itself_until_fusing() -> None:
    @fusible("any")
    def twice(x: int) -> int:
        """Twice."""
        return 2 * x

    assert twice(3) == 6 and twice.__name__ == "twice" and twice.__doc__ == "Twice."
    assert not is_fusing()
    with fusing():
        assert is_fusing()
        with fusing(False):
            assert not is_fusing()
        assert is_fusing()
    assert not is_fusing()
