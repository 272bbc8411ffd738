"""A training step by itself, to be timed: one packed batch, its features at hand, the rest as in `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lab.backend.compile import fusing
from eagle3_lab.backend.onednn_linear import float32_products
from eagle3_lab.training.module import DraftModule
from eagle3_lab.training.precast import unrolled
from eagle3_lab.types import Batch, LogitSummary, Needs

Summarise = Callable[[Tensor], LogitSummary]


@dataclass(frozen=True)
class Took:
    """Wall-clock and processor seconds of one step (the latter of all this process's threads), and its loss."""

    seconds: float
    cpu_seconds: float
    loss: float


class TimedStep:
    """Forward, backward, clipping and AdamW on one batch, again and again. The target runs once, when this is made.

    Args:
        module: a built head with its target.
        batch: packed rows.
        products: Lightning's name of the number format, "bf16-mixed" or "32-true".
        clip: largest norm of the gradient; None: not clipped.
        with_loss: False puts the sum of the heads' inputs in the loss's place, for what head and loss take.
        summary: makes arg-max and log-normaliser of the target's logits from its top states; they are then at hand with
            the features, as a feature store keeps them. None: the step makes them from the logits over all ids, as one
            beside the target does.
    """

    def __init__(
        self,
        module: DraftModule,
        batch: Batch,
        products: str,
        clip: float | None = None,
        with_loss: bool = True,
        summary: Summarise | None = None,
    ) -> None:
        if products not in ("bf16-mixed", "32-true"):
            raise ValueError(f"products must be bf16-mixed or 32-true, got {products!r}")
        self._module, self._batch, self._clip, self._with_loss = module.train(), batch, clip, with_loss
        self._target = module.target
        self._narrow = products == "bf16-mixed"
        out = self._target.features(batch, Needs(layers=module.source.layers(self._target.spec.layers), top=True))
        assert out.top is not None
        self.taps, self._top = out.taps, out.top.to(self._target.dtype)
        self._summary = None if summary is None else _of_rows(summary, self._top)
        self._optimizer = module.optimization.adamw(module)

    def __call__(self) -> Took:
        """One step. The loss is read, so the device has finished."""
        self._wait()
        began, ran = time.perf_counter(), time.process_time()
        loss = self.forward()
        self._optimizer.zero_grad()
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._clip)
        self._optimizer.step()
        self._wait()
        return Took(time.perf_counter() - began, time.process_time() - ran, float(loss.detach()))

    def forward(self) -> Tensor:
        """The loss of the batch."""
        module, device = self._module, self._batch.ids.device
        narrow = torch.autocast(device.type, torch.bfloat16, enabled=self._narrow)
        with narrow, float32_products(), fusing(module.compiled):
            steps = unrolled(module.unroll, module.draft, module.source(self.taps), self._batch)
            if not self._with_loss:
                return torch.stack([out.head_in.sum(dtype=torch.float32) for out in steps]).sum()
            out = module.loss(module.draft, steps, self._batch, self._target, self._top, summary=self._summary)
            return out.total

    def _wait(self) -> None:
        if self._batch.ids.device.type == "cuda":
            torch.cuda.synchronize(self._batch.ids.device)


def _of_rows(summary: Summarise, top: Float[Tensor, "B T Dt"]) -> LogitSummary:
    """[B, T]"""
    said = summary(top.flatten(0, 1))
    return LogitSummary(said.argmax.view(top.shape[:2]), said.log_sum.view(top.shape[:2]))
