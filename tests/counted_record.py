"""A record of forwards that counts what it records."""

from __future__ import annotations

from collections.abc import Callable

from eagle3_lab.backend.cuda_graphs import Inputs, Record, Replay, T, Tape


class Counted(Record):
    """A record that counts what it records."""

    def __init__(self, record: Record | None = None) -> None:
        self.recorded, self._record = 0, record or Tape()

    def __call__(self, forward: Callable[[Inputs], T], inputs: Inputs) -> tuple[T, Replay]:
        self.recorded += 1
        return self._record(forward, inputs)
