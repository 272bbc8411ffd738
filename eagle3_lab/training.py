"""The `trainer:` part of an experiment: Lightning's own options, and the choice of number format."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from eagle3_lab.errors import UserError
from eagle3_lab.onednn import float32_products

if TYPE_CHECKING:  # takes seconds; jsonargparse imports it for the schema, where a YAML has a `trainer:`
    import lightning.pytorch
    import lightning.pytorch.loggers
    import lightning.pytorch.plugins.io

    import eagle3_lab.sharded  # noqa: F401  `Sharded` is a legal name of a strategy

Products = Literal["auto", "bfloat16", "float32"]

CURVE_POINTS = 1000

MOST_STEPS = 10**9

MOST_MINUTES = 10**6

EPOCHS = 1000
"""Lightning's, where neither steps nor epochs are named."""

LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "num_nodes": 1,
    "num_sanity_val_steps": -1,
}
"""The smallest value of options of Lightning's that it takes at any, and then divides by or understands otherwise."""

# Said by Lightning 2.6 of things that are meant, or that are its own: (category, beginning of the message).
KNOWN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),  # under torch 2.13
    (UserWarning, r"Checkpoint directory .* exists and is not empty"),  # a resumed run's, or the one with its state
    (UserWarning, r"The number of training batches \(\d+\) is smaller than the logging interval"),  # steps, not passes
)


class Training:
    """Everything `lightning.Trainer` takes, passed through as written, but for what the lab itself brings (logger,
    checkpoint callback and its writer, the folder) and for the defaults of what is named here.

    Args:
        products: number format of matrix products over float32 parameters and optimizer state. ``auto`` times one
            product in both and takes the faster; the choice is printed and logged.
        precision: Lightning's own option instead, for formats that ``products`` does not name.
        save_every_minutes: how much work a killed run can lose.
        max_steps: optimizer steps; -1: as many as ``max_epochs`` have.
        max_epochs: passes over the data; null: 1000, unless ``max_steps`` says.
        log_every_n_steps: how far apart a curve's points are; null: as close as leaves at most 1000 of them.
        enable_progress_bar: Lightning's, beside the lab's own stages.
        enable_model_summary: Lightning's table of parts.
        callbacks: further callbacks, beside the lab's.
        kwargs: lightning.Trainer's other options.

    Raises:
        ValueError: for ``precision`` beside a ``products`` that says otherwise, for a training without an end, which
            the learning rate's schedule needs, for one that would stop before it, and for a value outside its range.
    """

    def __init__(
        self,
        products: Products = "auto",
        precision: str | None = None,
        save_every_minutes: float = 1.0,
        max_steps: int = -1,
        max_epochs: int | None = None,
        log_every_n_steps: int | None = None,
        enable_progress_bar: bool = False,
        enable_model_summary: bool = False,
        callbacks: list[lightning.pytorch.Callback] | None = None,
        **kwargs: Any,  # noqa: ANN401 - of Trainer's options, each of its own type
    ) -> None:
        if precision is not None and products != "auto":
            raise ValueError(f"trainer.products is {products!r} and trainer.precision {precision!r}: leave one out")
        if not 0 < save_every_minutes <= MOST_MINUTES:
            raise ValueError(
                f"trainer.save_every_minutes must be > 0 and at most {MOST_MINUTES}, got {save_every_minutes}"
            )
        if max_steps == -1 and max_epochs in (-1, 0):
            raise ValueError("trainer.max_steps or trainer.max_epochs must be >= 1: the schedule needs a last step")
        if max_steps != -1 and not 1 <= max_steps <= MOST_STEPS:
            raise ValueError(f"trainer.max_steps must be within 1 .. {MOST_STEPS}, or -1 for no limit, got {max_steps}")
        if max_epochs is not None and max_epochs < 1 and max_epochs != -1:
            raise ValueError(f"trainer.max_epochs must be >= 1, -1 for no limit, or null, got {max_epochs}")
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"trainer.log_every_n_steps must be >= 1 or null, got {log_every_n_steps}")
        _check_ranges(kwargs)
        _check_whole(kwargs, callbacks or [])
        self.products: Products = products
        self.named_precision = precision
        self.save_every_minutes = save_every_minutes
        self.max_steps, self.max_epochs = max_steps, max_epochs
        self.log_every_n_steps = log_every_n_steps or max(1, max_steps // CURVE_POINTS)
        self.enable_progress_bar, self.enable_model_summary = enable_progress_bar, enable_model_summary
        self.callbacks = callbacks or []
        self.options = kwargs  # jsonargparse reads the names and types of kwargs off the call below

    def make(
        self,
        logger: lightning.pytorch.loggers.Logger,
        callbacks: Sequence[lightning.pytorch.Callback],
        checkpoints: lightning.pytorch.plugins.io.CheckpointIO,
        precision: str,
        folder: Path,
    ) -> lightning.pytorch.Trainer:
        """Lightning's trainer for one run. Raises UserError for options that Lightning refuses."""
        import lightning
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from eagle3_lab import sharded

        try:
            trainer = lightning.Trainer(
                logger=logger,
                callbacks=[*callbacks, *self.callbacks],
                plugins=[checkpoints],
                precision=cast(Any, precision),  # a name of Lightning's list, which it checks itself
                default_root_dir=folder,
                enable_checkpointing=True,
                max_steps=self.max_steps,
                max_epochs=self.max_epochs,
                log_every_n_steps=self.log_every_n_steps,
                enable_progress_bar=self.enable_progress_bar,
                enable_model_summary=self.enable_model_summary,
                **self.options,
            )
        except TypeError as error:  # values' types are checked before: what is left is how devices are written
            said = " ".join(str(error).split())
            raise UserError(f"trainer.devices: {self.options.get('devices', 'auto')!r}: {said}") from None
        except (MisconfigurationException, ValueError) as error:
            raise UserError(f"trainer: {' '.join(str(error).split())}") from None
        sharded.check(trainer.strategy)
        return trainer

    def within(self, batches: int) -> int:
        """How many of a pass's ``batches`` are trained on, by ``limit_train_batches``: a number, or a share."""
        limit = self.options.get("limit_train_batches")
        if limit is None:
            return batches
        return min(batches, limit) if type(limit) is int else int(batches * limit)

    def steps_a_pass(self, batches: int) -> int:
        """Optimizer steps of a pass of ``batches``: the last one takes what is left."""
        return math.ceil(self.within(batches) / self.options.get("accumulate_grad_batches", 1))

    def steps(self, batches: int) -> int:
        """Optimizer steps of the whole training, as Lightning counts them, where a pass has ``batches``."""
        epochs = self.max_epochs
        if epochs is None:
            epochs = EPOCHS if self.max_steps == -1 else -1
        if epochs == -1:
            return self.max_steps
        limit = epochs * self.steps_a_pass(batches)
        return limit if self.max_steps == -1 else min(limit, self.max_steps)

    def check(self, batches: int) -> None:
        """Refuse what Lightning would refuse once everything is set up. ``batches``: of one pass over the data.

        Raises:
            UserError: a share of a pass that is less than a batch, or a validation interval longer than a pass, where
                it is counted within passes.
        """
        every, within = self.options.get("val_check_interval"), self.within(batches)
        counted_within = self.options.get("check_val_every_n_epoch", 1) is not None
        if within == 0:
            raise UserError(
                f"trainer.limit_train_batches: {self.options['limit_train_batches']} of {batches} batches is less than "
                f"one; more than {1 / batches:.2g}, or a number of batches"
            )
        if type(every) is int and every > within and counted_within and self.options.get("limit_val_batches") != 0:
            raise UserError(
                f"trainer.val_check_interval: {every} steps, but a pass over the data has {within}; at most that, or "
                "check_val_every_n_epoch: null to count across passes"
            )

    def save_interval(self) -> timedelta:
        """How far apart checkpoints are."""
        return timedelta(minutes=self.save_every_minutes)

    def precision(self, device: torch.device) -> tuple[str, str]:
        """Lightning's name of the number format, and why it was taken."""
        if self.named_precision is not None:
            return self.named_precision, "trainer.precision"
        if self.products != "auto":
            return ("bf16-mixed" if self.products == "bfloat16" else "32-true"), f"trainer.products: {self.products}"
        seconds = {dtype: time_product(device, dtype) for dtype in (torch.bfloat16, torch.float32)}
        faster = min(seconds, key=lambda dtype: seconds[dtype])
        told = ", ".join(f"{str(d).removeprefix('torch.')} {s * 1e3:.1f} ms" for d, s in seconds.items())
        why = f"one timed product: {told}"
        return ("bf16-mixed" if faster == torch.bfloat16 else "32-true"), why


def _check_ranges(options: Mapping[str, Any]) -> None:
    """Refuse numbers that Lightning takes and stumbles over. Raises ValueError."""
    for key, least in LEAST.items():
        if (value := options.get(key)) is not None and not value >= least:  # nor NaN
            raise ValueError(f"trainer.{key} must be >= {least}, got {value}")
    for key in ("val_check_interval", "limit_train_batches"):
        value = options.get(key)
        if isinstance(value, int | float) and (value < 1 if isinstance(value, int) else not 0 < value <= 1):
            raise ValueError(f"trainer.{key} must be a number from 1 or a share in (0.0, 1.0], got {value}")


def _check_whole(options: Mapping[str, Any], callbacks: Sequence[lightning.pytorch.Callback]) -> None:
    """Refuse what ends a training before its last step: its head would pass for the whole training's. Raises
    ValueError."""
    if options.get("fast_dev_run"):
        raise ValueError(
            f"trainer.fast_dev_run is {options['fast_dev_run']}, which saves no head: leave it out, and set "
            "trainer.max_steps to 1"
        )
    timed = []
    if callbacks:
        from lightning.pytorch.callbacks import Timer

        timed = [callback for callback in callbacks if isinstance(callback, Timer)]
    if options.get("max_time") is not None or timed:
        said = "trainer.callbacks holds a Timer" if timed else f"trainer.max_time is {options['max_time']}"
        raise ValueError(
            f"{said}, which would leave a head in the middle of its schedule: set trainer.max_steps; a process that is "
            "ended by SIGTERM goes on at the next fit"
        )


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's banners, and warnings of what is meant (KNOWN_WARNINGS), off the terminal; others stay."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for category, message in KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        log.setLevel(level)


def time_product(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Median seconds of a ``size`` cubed matrix product as a training makes it, warmed up, device synchronised."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        with float32_products():
            torch.nn.functional.linear(a, b)
        _wait(device)
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[repeats // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
