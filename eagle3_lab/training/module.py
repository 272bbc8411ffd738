"""Training a draft head: batch -> target features -> unroll -> losses -> log. Lightning does the rest.

The frozen target is held outside the module, so no checkpoint, optimizer or strategy ever sees its weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from jaxtyping import Float, Int
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from eagle3_lab import seeds
from eagle3_lab.backend.compile import fusing
from eagle3_lab.backend.onednn_linear import float32_products
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.packing import RowLoader
from eagle3_lab.draft.noise import FeatureNoise
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.checkpoint import KEY, label
from eagle3_lab.training.fsdp import shard
from eagle3_lab.training.hit_table import HitTable, StepLoss
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.training.options import Optimization
from eagle3_lab.training.precast import unrolled
from eagle3_lab.types import Batch, DraftOut, Needs, TargetOut


class Loaders(lightning.LightningDataModule):
    """An experiment's data as Lightning asks for it: each process reads its part of every epoch."""

    def __init__(self, data: ConversationData) -> None:
        super().__init__()
        self._data = data

    def train_dataloader(self) -> RowLoader:
        return self._data.train_dataloader(*self._share())

    def val_dataloader(self) -> list[RowLoader]:
        return self._data.val_dataloader(*self._share())

    def _share(self) -> tuple[int, int]:
        """Which of how many parts of the data this process reads: where a model is itself spread over processes, they
        read the same part."""
        options = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if options is None else (options["rank"], options["num_replicas"])


class DraftModule(lightning.LightningModule):
    """The LightningModule of every draft head.

    ``source`` and ``draft`` must be built for ``target``. Logged each step: train/loss, and per unroll step s
    train/step_{s}/loss, accuracy and overlap (sum of min(p, q), what sampling would accept), over all micro-batches and
    ranks; val/loss, the same loss over all trained steps; and the hit table's readings under val/, as deep as
    ``judged_depth`` (None: as the head is trained), so that heads trained for other depths are comparable. N_s of an
    optimizer step is known from the masks before its first forward, so accumulation and data parallelism change neither
    losses nor gradients. ``noise`` is drawn anew for each batch of a training step, from ``seed``, the step, the batch
    and the rank, so a resumed run draws what an unbroken one does. ``read`` gives a batch's features, what ``needs``
    names: the target's own forward, once a batch, unless something else is put there. ``compiled``: torch compiles what
    lies between a training step's products.

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
        self._validating = unroll.judging(max(self.judging.reach, unroll.depth), draft.steps)
        self.validation = HitTable(self.judging.reach)
        self._target = (target,)  # in a tuple, so that Lightning never counts the target's weights as ours
        self.needs = Needs(layers=source.layers(target.spec.layers), top=True)
        self.read: Callable[[Batch, Needs], TargetOut] = target.features
        self._clock = time.perf_counter()
        self._counts: Float[Tensor, " S"] | None = None
        self._seen: list[Float[Tensor, "4 S"]] = []
        self._unsent: tuple[int, dict[str, Tensor]] | None = None
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

    @torch.no_grad()
    def validate(self, batch: Batch) -> LossOut:
        """One batch unrolled as a decoder drafts, as deep as it is judged and as it is trained; the loss is that of all
        trained steps."""
        return self._unrolled(batch, self._validating, None, None)[0]

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
        out = self.validate(batch)
        hit = self._validating.table(out.hit)[..., : self.judging.reach]
        self.validation.update(hit, batch.supervised, batch.document)
        counts = self.loss.denominators(batch, self.unroll.depth)
        self.validation_loss.update(out.steps[: self.unroll.depth], counts)

    def on_validation_epoch_end(self) -> None:
        read = {"loss": self.validation_loss.compute(), **self.validation.compute()}  # of all ranks
        values = {f"val/{name}": value for name, value in read.items()}
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        self.log_dict(values, sync_dist=self.trainer.world_size > 1, logger=False if is_fitting else None)
        if is_fitting and not self.trainer.sanity_checking:
            self._send(values, self.trainer.global_step - 1)
        self.validation.reset()
        self.validation_loss.reset()

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_idx: int) -> None:
        self.send_step()

    def send_step(self) -> None:
        """Send the metrics of the last optimizer step to the loggers, if it is one that is logged and they were not
        sent yet. Whoever saves a checkpoint does it first: a run that goes on behind it makes the step no more."""
        trainer, unsent = self.trainer, self._unsent
        if unsent is None or trainer.global_step <= unsent[0]:
            return  # nothing, or a step that an exception has cut short
        step, values = unsent
        logged = (step + 1) % trainer.log_every_n_steps == 0  # pyright: ignore[reportAttributeAccessIssue]
        if logged or trainer.should_stop:
            self._send(values, step)
        self._unsent = None

    def _send(self, values: Mapping[str, Tensor], step: int) -> None:
        """Not by Lightning's own counter of steps, which goes astray where a process was interrupted while it logged;
        one wait for the device."""
        numbers = torch.stack([value.double().to(self.device) for value in values.values()]).tolist()
        for logger in self.trainer.loggers:
            logger.log_metrics(
                {"epoch": float(self.trainer.current_epoch), **dict(zip(values, numbers, strict=True))}, step
            )

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
        """One dictionary an optimizer step, for callbacks and, once the step is taken, for loggers."""
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
        self.log_dict(values, batch_size=1, logger=False)
        self._unsent = self.trainer.global_step, values
