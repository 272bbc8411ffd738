"""Training a draft head: batch -> target features -> unroll -> losses -> log. Lightning does the rest.

The frozen target is held outside the module, so no checkpoint, optimizer or strategy ever sees its weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab import seeds
from eagle3_lab.checkpoint import KEY, label
from eagle3_lab.data.packing import RowLoader
from eagle3_lab.draft.loss import LossOut, UnrolledLoss
from eagle3_lab.draft.narrow import unrolled
from eagle3_lab.draft.noise import FeatureNoise
from eagle3_lab.draft.teacher import Oov
from eagle3_lab.draft.terms import FeatureTerm, RowTerm, StepTerm
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.fusing import fusing
from eagle3_lab.metrics import HitTable, StepLoss
from eagle3_lab.onednn import float32_products
from eagle3_lab.rows import Edge, Mask
from eagle3_lab.sharded import shard
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
        draft_vocab: how many target ids the draft can say (the most common of the training answers); null is every one
            that stands for a text.
        mask: which rows count: ``drafted`` (a decoder could draft them), ``official``, ``root``.
        edge: whether ``official`` counts the row whose teacher lies past the text.
        oov: what is taught where the target's choice is outside the draft vocabulary.
        reduction: a step's loss is averaged over ``supervised`` rows, or over ``all``.
        budget_mib: memory, in MiB, of head and loss, gradients included: how many rows are worked off together, never
            what comes out; null: all at once. Laws and logits get at least an eighth of it.
        compile: let torch compile what lies between a training step's products (in the draft's layers and attention,
            and where logits meet laws), once, in a minute or so: faster from then on, equal but for rounding. Needs a
            compiler (for C++ on a CPU).
        noise: disturbs the states that the draft reads, in training; null: none.
        start: a head of the same parts to go on from, its draft vocabulary included: the experiment that trained it,
            without its ending, such as ``experiments/hass``, or a ``draft.ckpt``; null:
            weights drawn from the seed.
        public: a public EAGLE-3 head to go on from instead, or to measure as it is: a folder or hub id in the layout of
            EAGLE, SpecForge or SGLang.

    Raises:
        ValueError: a draft vocabulary of no token, or two beginnings.
    """

    features: FeatureSource
    draft: DraftModel
    unroll: Unroll
    losses: list[RowTerm | StepTerm | FeatureTerm]
    step_decay: float = 0.8
    draft_vocab: int | None = None
    mask: Mask = "drafted"
    edge: Edge = "dropped"
    oov: Oov = "drop"
    reduction: Literal["supervised", "all"] = "supervised"
    noise: FeatureNoise | None = None
    start: Path | None = None
    budget_mib: int | None = 256
    compile: bool = False
    public: str | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.public is not None:
            raise ValueError(f"model.start is {self.start} and model.public {self.public!r}: leave one out")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ValueError(f"draft_vocab must be >= 1, or null for every token, got {self.draft_vocab}")

    def loss(self) -> UnrolledLoss:
        """The loss these options describe. Raises ValueError for options that contradict each other."""
        return UnrolledLoss(
            terms=self.losses,
            step_decay=self.step_decay,
            mask=self.mask,
            edge=self.edge,
            oov=self.oov,
            reduction=self.reduction,
            budget_mib=self.budget_mib,
        )


MOST_LR = 1000
"""AdamW moves every weight by about this much in a step: anything larger is a slip, and overflows further on."""


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
        if not 0 < self.lr <= MOST_LR:  # nor NaN
            raise ValueError(f"optimizer.lr must be > 0 and at most {MOST_LR}, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay must be >= 0, got {self.weight_decay}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optimizer.warmup must be in [0, 1), a share of all steps, got {self.warmup}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"optimizer.final must be in [0, 1], a share of lr, got {self.final}")

    def adamw(self, module: nn.Module) -> torch.optim.AdamW:
        """AdamW at the peak rate over what ``module`` trains; fused, as the plain one copies each weight twice on its
        way, which for a head of a whole vocabulary is more than the loss takes."""
        decayed = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        made = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        # A fused one can unscale gradients itself, and beside that Lightning refuses to clip them; this one is not to.
        made._step_supports_amp_scaling = False
        return made

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
    train/step_{s}/loss, accuracy and overlap (sum of min(p, q), what sampling would accept), over all micro-batches and
    ranks; val/loss and the hit table's readings under val/, as deep as ``judged_depth`` (None: as the head is trained),
    so that heads trained for other depths are comparable. N_s of an optimizer step is known from the masks before its
    first forward, so accumulation and data parallelism change neither losses nor gradients. ``noise`` is drawn anew for
    each batch of a training step, from ``seed``, the step, the batch and the rank, so a resumed run draws what an
    unbroken one does. ``read`` gives a batch's features, what ``needs`` names: the target's own forward, once a batch,
    unless something else is put there. ``compiled``: torch compiles what lies between a training step's products.

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
        judged_depth: int | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        loss.check(source, draft)
        unroll.check(draft)
        self.source, self.draft = source, draft
        self.unroll, self.loss, self.optimization = unroll, loss, optimization
        self.noise, self.seed, self.compiled = noise, seed, compiled
        self.judging = unroll.judging(unroll.reach if judged_depth is None else judged_depth, draft.steps)
        self.validation = HitTable(self.judging.reach)
        self._target = (target,)  # in a tuple, so that Lightning never counts the target's weights as ours
        self.needs = Needs(layers=source.layers(target.spec.layers), top=True)
        self.read: Callable[[Batch, Needs], TargetOut] = target.features
        self._clock = time.perf_counter()
        self._counts: Float[Tensor, " S"] | None = None
        self._seen: list[Float[Tensor, "4 S"]] = []
        self._tokens: list[Int[Tensor, ""]] = []
        self.validation_loss = StepLoss(unroll.depth, loss.step_decay)

    @property
    def target(self) -> HFTarget:
        """The frozen target, of which no checkpoint knows the weights."""
        return self._target[0]

    def run(
        self,
        batch: Batch,
        generator: torch.Generator | None = None,
        denominators: Float[Tensor, " S"] | None = None,
    ) -> tuple[LossOut, Sequence[DraftOut]]:
        """Features, unroll and loss of one batch; with a ``generator``, the model's noise on what the draft reads.
        ``denominators``: N_s of the whole optimizer step; None: the batch is a step of its own."""
        return self._unrolled(batch, self.unroll, generator, denominators)

    @torch.no_grad()
    def judge(self, batch: Batch) -> LossOut:
        """One batch unrolled as a decoder drafts, as deep as ``judging``; the loss is that of the trained steps among
        them."""
        return self._unrolled(batch, self.judging, None, None)[0]

    def _unrolled(
        self,
        batch: Batch,
        unroll: Unroll,
        generator: torch.Generator | None,
        denominators: Float[Tensor, " S"] | None,
    ) -> tuple[LossOut, Sequence[DraftOut]]:
        target = self._target[0]
        out = self.read(batch, self.needs)
        taps = out.taps
        if self.noise is not None and generator is not None:
            taps = self.noise.disturb(taps, batch, generator)
        assert out.top is not None
        top, counted = out.top.to(target.dtype), self.unroll.depth
        with float32_products(), fusing(self.compiled and torch.is_grad_enabled()):
            steps = unrolled(unroll, self.draft, self.source(taps), batch)
            done = self.loss(
                self.draft, steps, batch, target, top, denominators=denominators, counted=counted, summary=out.summary
            )
        return done, steps

    def configure_model(self) -> None:
        shard(self, self.device_mesh)

    def on_fit_start(self) -> None:
        target = self._target[0]
        if target.device != self.device:  # one target a process, beside its head
            target.move(self.device)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        window = self._window(index)
        if index == window.start or self._counts is None:
            self._counts = self._count(window)
            self._seen, self._tokens = [], []
        generator = None if self.noise is None else self._generator(index)
        out, _ = self.run(batch, generator, self._counts)
        self._note(out, batch)
        if index == window.stop - 1:
            self._log_step()
        # Lightning divides a loss by the batches accumulated, and gradients are averaged over processes: N_s has
        # counted all of them already.
        return out.total * (self.trainer.accumulate_grad_batches * self._loader().order.processes)

    def validation_step(self, batch: Batch, index: int) -> None:
        out = self.judge(batch)
        self.validation.update(self.judging.table(out.hit), batch.supervised, batch.document)
        counts = self.loss.denominators(batch, self.unroll.depth)
        self.validation_loss.update(out.steps[: self.unroll.depth], counts)

    def on_validation_epoch_end(self) -> None:
        read = {"loss": self.validation_loss.compute(), **self.validation.compute()}  # of all ranks
        self.log_dict({f"val/{name}": value for name, value in read.items()}, sync_dist=self.trainer.world_size > 1)
        self.validation.reset()
        self.validation_loss.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        o = self.optimization
        optimizer = o.adamw(self)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: o.share(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = label(self._target[0], self.source, self.draft)

    def _generator(self, index: int) -> torch.Generator:
        """Return the generator of this step's, batch's and rank's noise."""
        seed = seeds.noise_seed(self.seed, self.trainer.global_step, index, self.global_rank)
        return seeds.generator(seed, self.device)

    def _loader(self) -> RowLoader:
        """The running loader: it alone knows what other micro-batches and ranks hold."""
        loader = self.trainer.train_dataloader
        assert isinstance(loader, RowLoader), "training rows come from ConversationData"
        return loader

    def _window(self, index: int) -> range:
        """The batches of the optimizer step that batch ``index`` of an epoch belongs to. An epoch's last step takes
        what is left."""
        several = self.trainer.accumulate_grad_batches
        begin = index - index % several
        return range(begin, min(begin + several, int(self.trainer.num_training_batches)))

    def _count(self, window: range) -> Float[Tensor, " S"]:
        """N_s over all micro-batches and ranks of an optimizer step, from their masks."""
        depth = self.unroll.depth
        counts = [self.loss.denominators(batch, depth) for batch in self._loader().together(window)]
        return torch.stack(counts).sum(0).to(self.device)

    def _note(self, out: LossOut, batch: Batch) -> None:
        """Keep what a micro-batch adds to its step's log; nothing waits for the device."""
        judged = out.judged
        seen = (out.steps, judged.sum((0, 1)), (out.hit & judged).sum((0, 1)), (out.overlap * judged).sum((0, 1)))
        self._seen.append(torch.stack([values.to(out.steps.dtype) for values in seen]))
        self._tokens.append((batch.document >= 0).sum())

    def _log_step(self) -> None:
        """One dictionary an optimizer step, so a logger makes one call of it."""
        tokens = torch.stack(self._tokens).sum().to(self._seen[0].dtype).expand(1, self.unroll.depth)
        together = torch.cat((torch.stack(self._seen).sum(0), tokens))
        losses, judged, hits, overlap, tokens = self.trainer.strategy.reduce(together, reduce_op="sum").unbind()
        decay = self.loss.step_decay ** torch.arange(len(losses), device=losses.device, dtype=losses.dtype)
        values: dict[str, Float[Tensor, ""]] = {"train/loss": (decay * losses).sum()}
        for s in range(len(losses)):
            values[f"train/step_{s}/loss"] = losses[s]
            values[f"train/step_{s}/accuracy"] = hits[s] / judged[s].clamp(min=1)
            values[f"train/step_{s}/overlap"] = overlap[s] / judged[s].clamp(min=1)
        values["train/lr"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        now = time.perf_counter()
        values["train/tokens_per_second"] = tokens[0] / max(now - self._clock, 1e-9)
        self._clock = now
        self.log_dict(values, batch_size=1)
