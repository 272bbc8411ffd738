"""Where a decoder's time goes, stage by stage."""

from __future__ import annotations

import time

import torch


class Clock:
    """Measures nothing and waits for nothing: the clock of a decoder that is only to be fast."""

    def start(self) -> None:
        """Begin a new measurement."""

    def lap(self, stage: str) -> None:
        """Book the time since the last lap on ``stage``."""

    def seconds(self) -> dict[str, float]:
        """Booked seconds by stage since the start."""
        return {}


class Stopwatch(Clock):
    """Wall time. Each lap waits for an accelerator to finish what was asked of it, so that work is booked where it
    was asked for; the total is therefore that of a decoder that runs without overlap."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._booked: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        self._booked = {}
        self._last = self._now()

    def lap(self, stage: str) -> None:
        now = self._now()
        self._booked[stage] = self._booked.get(stage, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return dict(self._booked)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
