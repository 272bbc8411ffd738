"""What validation logs while a head is trained is what a plain forward of the same weights gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tiny_runs import Bench

from eagle3_lab import load
from eagle3_lab.backend.prepacked_linear import PackedLinear
from eagle3_lab.commands.fit import fit
from eagle3_lab.pipeline import head_module, inputs
from eagle3_lab.training.module import DraftModule


class Plain(Callback):
    """Beside each val/loss, that of a module made anew, with the weights of the moment and plain linear layers."""

    def __init__(self, module: DraftModule) -> None:
        self.module, self.pairs = module, list[tuple[float, float]]()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.module.load_state_dict(pl_module.state_dict())
        loaders: Any = trainer.val_dataloaders
        batch = next(iter(loaders[0] if isinstance(loaders, list) else loaders))
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            out = self.module.eval().run(batch)[0]
        self.pairs.append((float(trainer.callback_metrics["val/loss"]), float(out.total)))


def plain_module(bench: Bench, overrides: list[str]) -> DraftModule:
    """The same experiment's module, its target's and its own linear layers plain."""
    experiment = load(str(bench.yaml), *overrides)
    target = inputs.load_target(experiment)
    module = head_module.build_module(experiment, target, inputs.build_data(experiment, target))
    for child in (*target.model.modules(), *module.modules()):
        if isinstance(child, PackedLinear):
            child.__class__ = torch.nn.Linear
    return module


def check(bench: Bench, *words: str) -> None:
    overrides = ["trainer.max_steps=30", "trainer.val_check_interval=10", "trainer.check_val_every_n_epoch=null"]
    overrides += words
    experiment = load(str(bench.yaml), *overrides)
    assert experiment.trainer is not None
    plain = Plain(plain_module(bench, overrides))
    experiment.trainer.callbacks.append(plain)
    fit(experiment)
    assert len(plain.pairs) == 3
    assert plain.pairs[0][0] != plain.pairs[-1][0], "it learns"
    tolerance = 1e-5 if "trainer.products=float32" in words else 2e-2
    for logged, wanted in plain.pairs:
        assert logged == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
@pytest.mark.parametrize("evaluate", [True, False], ids=["evaluated", "not evaluated"])
def test_val_loss_is_a_plain_forwards(bench: Bench, products: str, evaluate: bool) -> None:
    words = ["evaluate.max_new_tokens=2"] if evaluate else ["evaluate=null"]
    check(bench, f"trainer.products={products}", *words)


ALONE = """
import sys
from pathlib import Path

sys.path[:0] = sys.argv[1:3]
from test_validation import check
from tiny_runs import Bench

check(Bench(Path(sys.argv[3]), Path(sys.argv[4])), *sys.argv[5:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_val_loss_of_a_compiled_training_is_a_plain_forwards(bench: Bench, products: str) -> None:
    """In a process of its own, without the checks of shapes, which torch cannot compile."""
    here = Path(__file__).parent
    words = [here, here.parent, bench.yaml, bench.folder, f"trainer.products={products}", "evaluate.max_new_tokens=2"]
    command = [sys.executable, "-c", ALONE, *map(str, words), "model.compile=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_val_loss_of_a_draft_language_model_is_a_plain_forwards(bench: Bench) -> None:
    words = ["model.features=NoFeature", "model.draft={class_path: FirstLayers, init_args: {layers: 1}}"]
    words += ["model.unroll={class_path: NextToken}", "model.draft_vocab=null", "evaluate=null"]
    check(bench, "trainer.products=float32", *words)


def test_a_head_trained_deeper_than_it_is_judged_is_validated_on_all_its_steps(bench: Bench) -> None:
    check(bench, "trainer.products=float32", "model.unroll.depth=4", "judged_depth=2", "evaluate=null")
