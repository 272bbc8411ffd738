"""Forwards of fixed shape, recorded once as CUDA graphs and replayed: one launch instead of hundreds.

A graph reads and writes fixed memory. Inputs are copied into its own tensors before a replay, outputs are copied out
of them after it, and the keys and values it writes are those of the cache it was recorded with; so caches are kept,
with their graphs, from one session to the next. Whatever else a forward reads is read where it lay when it was
recorded: weights may change in place, and must not move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_lab.errors import UserError

T = TypeVar("T")

Inputs = tuple[Tensor, ...]
Replay = Callable[[], None]


class Unrecorded(Exception):
    """A forward cannot be recorded; the text says why."""


class Record(ABC):
    """How forwards are recorded."""

    @abstractmethod
    def __call__(self, forward: Callable[[Inputs], T], inputs: Inputs) -> tuple[T, Replay]:
        """What ``forward`` gives, and what fills the very tensors of it anew from the inputs' present values. Raises
        Unrecorded."""


class Captured:
    """Forwards recorded with one cache, by shapes. ``name`` is whose they are; ``made`` how many were recorded by all
    in this process."""

    made: ClassVar[int] = 0

    def __init__(self, record: Record, name: str) -> None:
        self._record, self._name = record, name
        self._made: dict[object, tuple[Inputs, Any, Replay]] = {}

    def run(self, kind: object, forward: Callable[[Inputs], T], inputs: Inputs) -> T:
        """``forward(inputs)``: a tensor, or a tuple or dataclass of such. ``kind`` stands for all that a recorded
        forward takes for granted, the inputs' shapes apart.

        Raises UserError where it cannot be recorded.
        """
        key = (kind, *((t.shape, t.dtype) for t in inputs))
        if key not in self._made:
            own = tuple(t.clone() for t in inputs)
            try:
                self._made[key] = (own, *self._record(forward, own))
                Captured.made += 1
            except Unrecorded as error:
                said = " ".join(str(error).split())[:120]
                raise UserError(
                    f"target.capture: {self._name} cannot be recorded as a CUDA graph ({said}); false"
                ) from None
        own, out, replay = self._made[key]
        for mine, given in zip(own, inputs, strict=True):
            mine.copy_(given)
        replay()
        return _copy(out)


def settled(work: Callable[[], T]) -> T:
    """What ``work`` gives; done once more where something was recorded in it, which is done once for good and is not to
    be timed with what it is recorded for."""
    before = Captured.made
    done = work()
    return done if Captured.made == before else work()


def _copy(out: T) -> T:
    """The next replay, of this graph or of another in the same pool, writes over what the last one gave."""
    if isinstance(out, Tensor):
        return cast(T, out.clone())
    if isinstance(out, tuple):
        return cast(T, tuple(map(_copy, out)))
    if is_dataclass(out) and not isinstance(out, type):
        return cast(T, type(out)(**{f.name: _copy(vars(out)[f.name]) for f in fields(out)}))
    return out


class CudaRecord(Record):
    """Records CUDA graphs that share one pool of memory, which is sound since outputs are copied out at once.

    Raises UserError for another device than CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(f"target.capture: needs CUDA, the target is on {device}; false")
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._beside: torch.cuda.Stream | None = None  # one for all: what a graph has freed only its own stream takes
        self._first: torch.cuda.CUDAGraph | None = None

    def __call__(self, forward: Callable[[Inputs], T], inputs: Inputs) -> tuple[T, Replay]:
        beside = self._beside = self._beside or torch.cuda.Stream(self._device)
        here = torch.cuda.current_stream(self._device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(2):  # lazy handles and workspaces are made outside the graph
                forward(inputs)
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads (a data loader's, NCCL's) may go on asking the device for this and that
            with torch.cuda.graph(graph, self._pool, beside, capture_error_mode="thread_local"):
                out = forward(inputs)
        except RuntimeError as error:
            raise Unrecorded(str(error)) from None
        self._first = self._first or graph  # a pool that has lost all its graphs takes no more
        return out, graph.replay


class Tape(Record):
    """What a CUDA graph does, on any device and slowly: every operation is noted with the memory it reads and writes,
    and a replay repeats these alone. The Python around them runs no more, and what it would have read anew stays as it
    was. For tests and dry runs."""

    def __call__(self, forward: Callable[[Inputs], T], inputs: Inputs) -> tuple[T, Replay]:
        forward(inputs)  # as a graph is warmed up
        noted = _Noted()
        with noted:
            out = forward(inputs)
        return out, noted.replay


class _Noted(TorchDispatchMode):
    """The operations of one forward, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., object], Sequence[object], Mapping[str, object], object]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self._steps:
            for old, new in zip(_tensors(made), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # equal for a view, and for what was written in place
                    old.copy_(new)


def _tensors(made: object) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, (tuple, list)):
        for one in made:
            yield from _tensors(one)
