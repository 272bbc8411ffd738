"""Callbacks of every training: its progress, its checkpoints, and how it is interrupted."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.tensor import DTensor

from eagle3_lab.system.progress import Stage, duration
from eagle3_lab.system.signals import AT_ONCE, Terminated
from eagle3_lab.training.checkpoint import ADVICE, NotFinite
from eagle3_lab.training.fsdp import Sharded
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch

TIMED_STEPS = 2
LONG_S, SHORT_S = 20 * 60, 10 * 60


class Reporter(Callback):
    """Report a training's progress to its stage. Behind the first steps, of which the very first warms up and is not
    timed, report how long the training will take on this machine; of a long one, also how many steps take 10 minutes.

    Args:
        progress: the stage.
        clock: returns seconds that never decrease.
    """

    def __init__(self, progress: Stage, clock: Callable[[], float] = time.monotonic) -> None:
        self._stage, self._clock = progress, clock
        self._first = 0
        self._started: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stage.begin_at(trainer.global_step, int(trainer.estimated_stepping_batches))
        self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        steps = trainer.global_step - self._stage.done
        self._stage.advance(steps, tokens=int((batch.document >= 0).sum()))
        new_steps = trainer.global_step - self._first
        if steps and new_steps == 1:
            self._started = self._clock()
        elif steps and new_steps == 1 + TIMED_STEPS and self._started is not None:
            self._stage.note(self._expected((self._clock() - self._started) / TIMED_STEPS))

    def _expected(self, step_s: float) -> str:
        """Return in words how long the rest takes. ``step_s``: seconds of a step."""
        assert self._stage.total is not None
        seconds = step_s * (self._stage.total - self._stage.done)
        text = f"{duration(step_s)} a step on this machine, {duration(seconds)} for the rest"
        steps = int(SHORT_S / step_s)
        if seconds <= LONG_S or self._first or steps < 1:
            return text
        return f"{text}; with --trainer.max_steps {steps} a shorter training takes {duration(steps * step_s)}"


class Finite(Callback):
    """Ends a training that has come to nothing: no NaN is trained on, logged as a curve, or written as a head.

    Raises:
        NotFinite: at every ``every``-th step, those that are logged, for a loss that is NaN or infinite; at the end,
            for such a parameter.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step % self._every:
            return  # the device is waited for only where a logger waits for it
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NotFinite(f"training: the loss is {float(loss)} at step {trainer.global_step}; {ADVICE}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad and not bool(whole.isfinite().all()):
                raise NotFinite(f"training: {name} is not finite after step {trainer.global_step}; {ADVICE}")


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
    only where it struck between two steps and left finite numbers. A step is logged before its checkpoint is there."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - ModelCheckpoint's, each of its own type
        super().__init__(**options)
        self._whole = WholeSteps()

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint. The interval is no part of it: it may change on resuming."""
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
            _send_step(pl_module)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        sharded = isinstance(trainer.strategy, Sharded)
        if sharded and not isinstance(exception, KeyboardInterrupt):
            return  # all processes gather what is saved, and only an interrupt reaches all of them
        if self._whole.between(trainer) and not isinstance(exception, NotFinite):
            _send_step(pl_module)
            with suppress(NotFinite):  # the checkpoint before stands, and the exception is told
                super().on_exception(trainer, pl_module, exception)


def _send_step(module: LightningModule) -> None:
    assert isinstance(module, DraftModule)
    module.send_step()


class Validations(Callback):
    """Runs the validation behind the step of the last checkpoint when training goes on from it: Lightning takes it for
    done, and it may not have been. What it logs a second time is logged once (:class:`RunLogger`)."""

    def __init__(self) -> None:
        self._is_due = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop: Any = trainer.fit_loop
        checkpoint[VALIDATION_DUE] = bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_due = checkpoint.get(VALIDATION_DUE, False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due:
            self._is_due = False
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False  # from its first batch on
            trainer.validating = True
            loop.run()
            trainer.training = True

    def finish(self, trainer: Trainer, module: LightningModule, data: LightningDataModule) -> None:
        """Run it where the checkpoint was of the last step, behind which Lightning trains no more."""
        if self._is_due:
            self._is_due = False
            loggers, trainer.loggers = trainer.loggers, []
            (values,) = trainer.validate(module, datamodule=data, verbose=False)
            trainer.loggers = loggers
            for logger in loggers:
                logger.log_metrics({"epoch": float(trainer.current_epoch), **values}, trainer.global_step - 1)


VALIDATION_DUE = "eagle3_lab_validation_due"


class Interrupts(Callback):
    """Ctrl-C and SIGTERM end training between two optimizer steps, on all processes at the same one, so that the
    checkpoint saved on the way out is of a whole step (in the middle of one it would hold weights that are half
    updated). A second signal ends it at once."""

    def __init__(self) -> None:
        self._signalled = False
        self._number, self._when = 0, -math.inf  # of the last signal
        self._whole = WholeSteps()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals within are this callback's; Ctrl-C comes out as KeyboardInterrupt, SIGTERM as Terminated. Where this
        is not the main thread, signals are left to those who have it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # the second is how Lightning leaves after either
            raise (Terminated if self._number == signal.SIGTERM else KeyboardInterrupt) from None
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
        now = time.monotonic()
        is_echo = number == self._number == signal.SIGTERM and now - self._when < AT_ONCE
        self._number, self._when = number, now
        if is_echo:
            return  # `timeout` tells the process, and then its group
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)
