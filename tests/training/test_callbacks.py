"""What a training reports of its time, from the first steps."""

from __future__ import annotations

import io
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from eagle3_lab.system.progress import stage
from eagle3_lab.training.callbacks import Reporter
from eagle3_lab.types import Batch


@pytest.mark.parametrize(
    ("first", "step_s", "line"),
    [
        (0, 2.0, "training: 2.0 s a step on this machine, 5 min 14 s for the rest"),
        (
            0,
            30.0,
            "training: 30 s a step on this machine, 1 h 18 min for the rest; with --trainer.max_steps 20 a shorter"
            + " training takes 10 min 0 s",
        ),
        (40, 30.0, "training: 30 s a step on this machine, 58 min 30 s for the rest"),
        (0, 900.0, "training: 15 min 0 s a step on this machine, 39 h 15 min for the rest"),
    ],
    ids=["short", "long", "continued", "no step in ten minutes"],
)
def test_the_time_of_a_training_is_reported_behind_its_third_step(first: int, step_s: float, line: str) -> None:
    now, out = [0.0], io.StringIO()
    trainer = Mock(spec=Trainer, global_step=first, estimated_stepping_batches=160)
    module, batch = Mock(spec=LightningModule), Mock(spec=Batch, document=torch.zeros(1, 8))
    with stage("training", out=out, clock=lambda: now[0]) as s:
        reporter = Reporter(s, clock=lambda: now[0])
        reporter.on_train_start(trainer, module)
        for seconds in (100.0, 0.0, step_s, 0.0, step_s, step_s):  # two batches a step; the first step warms up
            now[0] += seconds
            trainer.global_step += seconds > 0
            reporter.on_train_batch_end(trainer, module, None, batch, 0)
    assert [text for text in out.getvalue().splitlines() if "on this machine" in text] == [line]
