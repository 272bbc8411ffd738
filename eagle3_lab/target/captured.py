"""Forwards of fixed shape, recorded once as CUDA graphs and replayed: one launch instead of hundreds.

A graph reads and writes fixed memory. Inputs are copied into its own tensors before a replay, outputs are copied out
of them after it, and the keys and values it writes are those of the cache it was recorded with; so caches are kept,
with their graphs, from one session to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from eagle3_lab.errors import UserError
from eagle3_lab.types import TargetOut

Inputs = tuple[Tensor, ...]
Forward = Callable[[Inputs], TargetOut]
Replay = Callable[[], None]
Record = Callable[[Forward, Inputs], tuple[TargetOut, Replay]]
"""Records a forward of fixed inputs: its outputs' memory, and what fills it anew from the inputs' present values."""


class Captured:
    """Graphs of one cache, by shapes. ``record`` makes one; a test can hand in another than CUDA's."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._made: dict[object, tuple[Inputs, TargetOut, Replay]] = {}

    def run(self, kind: object, forward: Forward, inputs: Inputs) -> TargetOut:
        """``forward(inputs)``. ``kind`` stands for all that a recorded forward takes for granted, shapes apart.

        Raises UserError where the model cannot be recorded.
        """
        key = (kind, *((t.shape, t.dtype) for t in inputs))
        if key not in self._made:
            own = tuple(t.clone() for t in inputs)
            self._made[key] = (own, *self._record(forward, own))
        own, out, replay = self._made[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        replay()
        return _copy(out)


class CudaRecord:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward, inputs: Inputs) -> tuple[TargetOut, Replay]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):  # lazy handles and workspaces are made outside the graph
                forward(inputs)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                out = forward(inputs)
        except RuntimeError as error:
            said = " ".join(str(error).split())[:120]
            raise UserError(f"target.capture: this model cannot be recorded as a CUDA graph ({said}); false") from None
        return out, graph.replay


def _copy(out: TargetOut) -> TargetOut:
    """The next replay writes over what the last one gave."""
    given = {f.name: vars(out)[f.name] for f in fields(out)}
    taps = tuple(t.clone() for t in given.pop("taps"))
    return TargetOut(taps, **{name: None if t is None else t.clone() for name, t in given.items()})
