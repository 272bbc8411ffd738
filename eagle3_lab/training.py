"""The `trainer:` part of an experiment: Lightning's own options, and the choice of number format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO

Products = Literal["auto", "bfloat16", "float32"]


class Training:
    """Everything `lightning.Trainer` takes, passed through as written, but for what the lab itself brings (logger,
    checkpoint callback and its writer, the folder).

    Args:
        products: number format of matrix products over float32 parameters and optimizer state. ``auto`` times one
            product in both and takes the faster; the choice is printed and logged.
        precision: Lightning's own option instead, for formats that ``products`` does not name.
        save_every_minutes: how much work a killed run can lose.
        callbacks: further callbacks, beside the lab's.
        kwargs: lightning.Trainer's options.

    Raises:
        ValueError: for ``precision`` beside a ``products`` that says otherwise.
    """

    def __init__(
        self,
        products: Products = "auto",
        precision: str | None = None,
        save_every_minutes: float = 1.0,
        callbacks: list[Callback] | None = None,
        **kwargs: Any,
    ) -> None:
        if precision is not None and products != "auto":
            raise ValueError(f"trainer.products is {products!r} and trainer.precision {precision!r}: leave one out")
        if save_every_minutes <= 0:
            raise ValueError(f"trainer.save_every_minutes must be > 0, got {save_every_minutes}")
        self.products: Products = products
        self.named_precision = precision
        self.save_every_minutes = save_every_minutes
        self.callbacks = callbacks or []
        self.options = kwargs  # jsonargparse reads the names and types of kwargs off the call below

    def make(
        self, logger: Logger, callbacks: Sequence[Callback], checkpoints: CheckpointIO, precision: Any, folder: Path
    ) -> lightning.Trainer:
        """Lightning's trainer for one run."""
        return lightning.Trainer(
            logger=logger,
            callbacks=[*callbacks, *self.callbacks],
            plugins=[checkpoints],
            precision=precision,
            default_root_dir=folder,
            enable_checkpointing=True,
            **self.options,
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
        why = "one timed product: " + ", ".join(f"{str(d).removeprefix('torch.')} {s * 1e3:.1f} ms" for d, s in seconds.items())
        return ("bf16-mixed" if faster == torch.bfloat16 else "32-true"), why


def time_product(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Median seconds of a ``size`` cubed matrix product, warmed up, device synchronised."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        a @ b
        _wait(device)
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[repeats // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
