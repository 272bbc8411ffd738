"""What a training step is measured on: an experiment's head, the first batch of its data, a number format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eagle3_lab.bench.timed_step import Summarise, TimedStep
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.context import open_training
from eagle3_lab.pipeline.head_module import check_compiler
from eagle3_lab.pipeline.train_head import check_features
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch

DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}


@dataclass(frozen=True)
class Setup:
    """What is measured: a head, a batch with its loss's rows chosen, and the number format; and what summarises the
    target's logits beforehand, where the experiment trains from kept features."""

    module: DraftModule
    batch: Batch
    products: str
    clip: float | None
    summary: Summarise | None

    @staticmethod
    def of(experiment: Experiment, every_row: bool) -> Setup:
        """The experiment's head on the first batch of its data. Raises UserError for a format that is not timed."""
        _, _, _, trainer = experiment.require_training("bench train")
        check_compiler(experiment)
        context = open_training(experiment, "bench train", answer=False)
        check_features(context)  # what a `fit` would refuse
        target, module = context.target, context.module
        products, _ = trainer.precision(target.device)
        if products not in DTYPES:
            raise UserError(f"trainer.precision: {products!r} is not timed; one of {', '.join(DTYPES)}")
        batch = next(iter(context.data.train_dataloader())).to(target.device)
        if every_row:
            batch = replace(batch, supervised=batch.document >= 0)
        clip = trainer.options.get("gradient_clip_val")
        return Setup(module, batch, products, clip, None if experiment.features is None else target.summary)

    def step(self, with_loss: bool = True) -> TimedStep:
        return TimedStep(self.module, self.batch, self.products, self.clip, with_loss, self.summary)
