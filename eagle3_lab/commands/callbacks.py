"""What the lab tells Lightning's trainer: how training is reported, and how it is interrupted."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.tensor import DTensor

from eagle3_lab.errors import UserError
from eagle3_lab.progress import Stage
from eagle3_lab.sharded import Sharded
from eagle3_lab.types import Batch


class Reporter(Callback):
    """Tells a stage how training goes."""

    def __init__(self, progress: Stage) -> None:
        self._stage = progress

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stage.begin_at(trainer.global_step, int(trainer.estimated_stepping_batches))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        steps = trainer.global_step - self._stage.done
        self._stage.advance(steps, tokens=int((batch.document >= 0).sum()))


class Finite(Callback):
    """Ends a training that has come to nothing: no NaN is trained on, logged as a curve, or written as a head.

    Raises:
        UserError: at every ``every``-th step, those that are logged, for a loss that is NaN or infinite; at the end,
            for such a parameter.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step % self._every:
            return  # the device is waited for only where a logger waits for it
        loss = trainer.logged_metrics.get("train/loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise UserError(f"training: the loss is {float(loss)} at step {trainer.global_step}; {ADVICE}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad and not bool(whole.isfinite().all()):
                raise UserError(f"training: {name} is not finite after step {trainer.global_step}; {ADVICE}")


ADVICE = "lower optimizer.lr, or set trainer.gradient_clip_val"


class WholeSteps:
    """Tells whether training stands between two optimizer steps, all gradients used: what is saved anywhere else is no
    step's, since gradients are not saved."""

    def __init__(self) -> None:
        self._at_start: int | None = None

    def batch_begins(self, trainer: Trainer) -> None:
        self._at_start = trainer.global_step

    def between(self, trainer: Trainer) -> bool:
        """Whether the last batch that was read has been worked off and completed its step."""
        read: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        worked_off = read.ready == read.processed
        return worked_off and self._at_start is not None and trainer.global_step > self._at_start


class Saver(ModelCheckpoint):
    """A ModelCheckpoint that saves between optimizer steps alone: never within an accumulation, and after an exception
    only where it struck between two steps."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - ModelCheckpoint's, each of its own type
        super().__init__(**options)
        self._whole = WholeSteps()

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint, without the interval: it may be another one when training goes on."""
        return type(self).__name__

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._whole.batch_begins(trainer)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401 - whatever a training step gives
        batch: Batch,
        batch_idx: int,
    ) -> None:
        if self._whole.between(trainer):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        sharded = isinstance(trainer.strategy, Sharded)
        if sharded and not isinstance(exception, KeyboardInterrupt):
            return  # all processes gather what is saved, and only an interrupt reaches all of them
        if self._whole.between(trainer):
            super().on_exception(trainer, pl_module, exception)


class Interrupts(Callback):
    """Ctrl-C and SIGTERM end training between two optimizer steps, on all processes at the same one, so that the
    checkpoint saved on the way out is of a whole step (in the middle of one it would hold weights that are half
    updated). A second signal ends it at once."""

    def __init__(self) -> None:
        self._signalled = False
        self._whole = WholeSteps()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals within are this callback's; both come out as KeyboardInterrupt. Where this is not the main thread,
        signals are left to those who have it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except SystemExit:  # how Lightning leaves after either
            raise KeyboardInterrupt from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._whole.batch_begins(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if self._whole.between(trainer):
            self._leave(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if trainer.strategy.reduce_boolean_decision(self._signalled, all=False):  # one process told is all told
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)
