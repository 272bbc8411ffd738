"""Training a draft head: batch -> target features -> unroll -> losses -> log. Lightning does the rest.

The frozen target is held outside the module, so no checkpoint, optimizer or strategy ever sees its weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lab.checkpoint import KEY, label
from eagle3_lab.draft.loss import LossOut, UnrolledLoss
from eagle3_lab.draft.noise import FeatureNoise
from eagle3_lab.draft.teacher import Oov
from eagle3_lab.draft.terms import FeatureTerm, RowTerm
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.metrics import HitTable
from eagle3_lab.rows import Edge, Mask
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.types import Batch, DraftModel, DraftOut, FeatureSource, Needs, TargetOut


@dataclass(frozen=True)
class Model:
    """What is trained, in interchangeable parts: this is where one line of YAML is one scientific difference.

    Args:
        features: which hidden states of the target the draft reads.
        draft: the head.
        unroll: how many steps ahead it is run in training, and what gradient flows between them.
        losses: the terms, each with its weight.
        step_decay: the loss of step s weighs ``step_decay ** s``.
        draft_vocab: how many target ids the draft can say (the most common of the training answers); null is all.
        mask: which rows count: ``drafted`` (a decoder could draft them), ``official``, ``root``.
        edge: whether ``official`` counts the row whose teacher lies past the text.
        oov: what is taught where the target's choice is outside the draft vocabulary.
        reduction: a step's loss is averaged over ``supervised`` rows, or over ``all``.
        noise: disturbs the states that the draft reads, in training; null: none.
        start: another run's ``draft.ckpt`` of the same parts to go on from, its draft vocabulary included; null:
            weights drawn from the seed.

    Raises:
        ValueError: a draft vocabulary of no token.
    """

    features: FeatureSource
    draft: DraftModel
    unroll: Unroll
    losses: list[RowTerm | FeatureTerm]
    step_decay: float = 0.8
    draft_vocab: int | None = None
    mask: Mask = "drafted"
    edge: Edge = "dropped"
    oov: Oov = "drop"
    reduction: Literal["supervised", "all"] = "supervised"
    noise: FeatureNoise | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ValueError(f"draft_vocab must be >= 1, or null for every token, got {self.draft_vocab}")

    def loss(self) -> UnrolledLoss:
        """The loss these options describe. Raises ValueError for options that contradict each other."""
        return UnrolledLoss(self.losses, self.step_decay, self.mask, self.edge, self.oov, self.reduction)


@dataclass(frozen=True)
class Optimization:
    """AdamW with linear warm-up, then decay to ``final`` of the peak at the last step.

    Args:
        lr: peak learning rate.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        warmup: share of all steps spent warming up.
        decay: shape of the way down.
        final: share of ``lr`` left at the end.
    """

    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.05
    decay: Literal["linear", "cosine", "constant"] = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr must be > 0, got {self.lr}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optimizer.warmup must be in [0, 1), a share of all steps, got {self.warmup}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"optimizer.final must be in [0, 1], a share of lr, got {self.final}")

    def share(self, step: int, total: int) -> float:
        """Of the peak rate, at optimizer step ``step`` (from 0) of ``total``."""
        warm = max(1, round(self.warmup * total))
        if step < warm:
            return (step + 1) / warm
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - warm) / max(1, total - warm))
        falling = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * falling


class DraftModule(lightning.LightningModule):
    """The LightningModule of every draft head.

    ``source`` and ``draft`` must be built for ``target``. Logged each step: train/loss, and per unroll step s
    train/step_{s}/loss, accuracy and overlap (sum of min(p, q), what sampling would accept); val/loss and the hit
    table's readings under val/. ``noise`` is drawn anew for each batch of a training step, from ``seed``, the step,
    the batch and the rank, so a resumed run draws what an unbroken one does. ``read`` gives a batch's features, what
    ``needs`` names: the target's own forward, once a batch, unless something else is put there.

    Raises:
        ValueError: for a term that these parts cannot serve.
    """

    def __init__(
        self,
        target: HFTarget,
        source: FeatureSource,
        draft: DraftModel,
        unroll: Unroll,
        loss: UnrolledLoss,
        optimization: Optimization,
        noise: FeatureNoise | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        loss.check(source, draft)
        self.source, self.draft = source, draft
        self.unroll, self.loss, self.optimization = unroll, loss, optimization
        self.noise, self.seed = noise, seed
        self.validation = HitTable(unroll.depth)
        self._target = (target,)  # in a tuple, so that Lightning never counts the target's weights as ours
        self.needs = Needs(layers=source.layers(target.spec.layers), top=True)
        self.read: Callable[[Batch, Needs], TargetOut] = target.features
        self._clock = time.perf_counter()
        self._tokens = 0

    @property
    def target(self) -> HFTarget:
        """The frozen target, of which no checkpoint knows the weights."""
        return self._target[0]

    def run(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[LossOut, Sequence[DraftOut]]:
        """Features, unroll and loss of one batch; with a ``generator``, the model's noise on what the draft reads."""
        target = self._target[0]
        out = self.read(batch, self.needs)
        taps = out.taps
        if self.noise is not None and generator is not None:
            taps = self.noise.disturb(taps, batch, generator)
        steps = list(self.unroll(self.draft, self.source(taps), batch))
        assert out.top is not None
        return self.loss(self.draft, steps, batch, target, out.top.to(target.dtype), summary=out.summary), steps

    def training_step(self, batch: Batch, index: int) -> Tensor:
        out, _ = self.run(batch, None if self.noise is None else self._generator(index))
        self._tokens += int((batch.document >= 0).sum())
        self._log_step(out)
        return out.total

    def validation_step(self, batch: Batch, index: int) -> None:
        out, _ = self.run(batch)
        self.validation.update(out.hit, batch.supervised, batch.document)
        rows = out.weights.sum()
        self.log("val/loss", out.total, batch_size=max(1, int(rows)), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/{name}": value for name, value in self.validation.compute().items()}, sync_dist=False)
        self.validation.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        o = self.optimization
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: o.share(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = label(self._target[0], self.source, self.draft)

    def _generator(self, index: int) -> torch.Generator:
        """Of this step, batch and rank alone. Hashed, so that neighbouring seeds share nothing."""
        text = f"{self.seed} {self.trainer.global_step} {index} {self.global_rank}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        return torch.Generator(self.device).manual_seed(seed)

    def _log_step(self, out: LossOut) -> None:
        """One dictionary a step, so a logger makes one call of it."""
        counts = out.judged.sum((0, 1)).clamp(min=1)
        accuracy = (out.hit & out.judged).sum((0, 1)) / counts
        overlap = (out.overlap * out.judged).sum((0, 1)) / counts
        values: dict[str, Float[Tensor, ""]] = {"train/loss": out.total.detach()}
        for s in range(len(out.steps)):
            values[f"train/step_{s}/loss"] = out.steps[s]
            values[f"train/step_{s}/accuracy"] = accuracy[s]
            values[f"train/step_{s}/overlap"] = overlap[s]
        values["train/lr"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        now = time.perf_counter()
        values["train/tokens_per_second"] = torch.tensor(self._tokens / max(now - self._clock, 1e-9))
        self._clock, self._tokens = now, 0
        self.log_dict(values, batch_size=1)
