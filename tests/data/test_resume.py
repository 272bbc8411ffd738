"""Resuming through Lightning: a run stopped anywhere and one that was not see the same batches in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.training.module import Loaders
from eagle3_lab.types import Batch, TargetSpec

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")


class Recorder(LightningModule):
    """Remembers the batches it was given, and learns from them so that a weight tells what was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen: list[tuple[int, list[list[int]]]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.ids.tolist()))
        return (self.weight - batch.ids.double().mean()).square().sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert batch.ids.numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data(tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec) -> ConversationData:
    lines = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "x" * (i % 5 + 1)}]}
        for i in range(20)
    ]
    for one in lines[:4]:
        one |= {"split": "held_out", "temperature": 0.0}
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = ConversationData(str(path), max_length=120, row_length=160, rows_per_batch=2)
    found.build(Chat(chatml), spec)
    return found


def fit(
    data: ConversationData, folder: Path, *, steps: int, epoch_end: bool = False, resume: str | None = None
) -> Recorder:
    module = Recorder()
    save = ModelCheckpoint(
        folder,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=None if epoch_end else 1,
        every_n_epochs=1 if epoch_end else None,
        save_on_train_epoch_end=epoch_end or None,
    )
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[save],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=Loaders(data), ckpt_path=resume, weights_only=True)
    return module


def test_a_run_stopped_after_any_step_goes_on_with_the_very_next_batch(tmp_path: Path, data: ConversationData) -> None:
    batches = len(data.train_dataloader())
    assert batches > 2
    steps = 2 * batches + 1
    straight = fit(data, tmp_path, steps=steps)
    assert [epoch for epoch, _ in straight.seen] == [0] * batches + [1] * batches + [2]
    assert straight.seen[:batches] != straight.seen[batches:-1]
    for stop in range(1, steps):
        resumed = fit(data, tmp_path, steps=steps, resume=str(tmp_path / f"step={stop}.ckpt"))
        assert resumed.seen == straight.seen[stop:], stop
        assert torch.equal(resumed.weight, straight.weight)


def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(tmp_path: Path, data: ConversationData) -> None:
    batches = len(data.train_dataloader())
    straight = fit(data, tmp_path, steps=2 * batches + 1, epoch_end=True)
    for stop in (batches, 2 * batches):
        resumed = fit(data, tmp_path, steps=2 * batches + 1, epoch_end=True, resume=str(tmp_path / f"step={stop}.ckpt"))
        assert resumed.seen == straight.seen[stop:]
        assert torch.equal(resumed.weight, straight.weight)


def test_a_checkpoint_of_another_order_is_refused(
    tmp_path: Path, data: ConversationData, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    fit(data, tmp_path, steps=2)
    other = ConversationData(data.path, max_length=120, row_length=160, rows_per_batch=2, seed=1)
    other.build(Chat(chatml), spec)
    with pytest.raises(UserError, match="trained on other data"):
        fit(other, tmp_path, steps=4, resume=str(tmp_path / "step=1.ckpt"))
