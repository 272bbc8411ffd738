"""Model operations of a training step: what a head's mathematics asks for, whatever a program spends on it.

A product of [m, k] and [k, n] is 2 m k n operations, forward; its backward is as much again for the input's gradient
where one is wanted, and again for the weight's. Per row, an EAGLE-3 head of hidden width h, MLP width m, draft
vocabulary v, widths hq and hkv of all query and key heads, S rows of a document and T steps comes to

    3 T (4 h hq + 8 h hkv + 2 hq h + 6 h m + 2 h v + 2 S hq) + 12 h^2

with the projection of three tapped states last. Counted are all rows, padding and rows without a loss included. The
teacher, norms, rope, the loss's elementwise work and the diagonal of later steps' keys are counted as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from eagle3_lab.draft.attention.unrolled import JoinedUnrolled
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.types import PADDING, Batch, Rows

PROBED = 8  # rows that the head's operations are counted on


@dataclass(frozen=True)
class Operations:
    """Of one training step: ``projections`` all linear maps of source and draft but the head, ``attention`` scores and
    weighted values, ``head`` the draft logits."""

    projections: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.head


def count(source: FeatureSource, draft: DraftModel, depth: int, batch: Batch, taps: tuple[Tensor, ...]) -> Operations:
    """The operations of one step, forward and backward, of built parts on a batch: one forward is run and looked at."""
    from eagle3_lab.draft.unroll import Unroll

    attention = 0

    class Counting(JoinedUnrolled):
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
            nonlocal attention
            attention += 3 * 2 * q.shape[1] * q.shape[3] * _squared_lengths(batch)
            return super().attend(layer, q, k, v, rows)

    with _linear_maps(source, draft) as maps:
        outs = list(Unroll(depth, attention=Counting)(draft, source(taps), batch))
    rows, head = batch.ids.numel(), 0
    for s, out in enumerate(outs):
        leaf = out.head_in.detach().flatten(0, 1)[:PROBED].requires_grad_()
        with FlopCounterMode(display=False) as counter:
            draft.logits(leaf, s).sum().backward()
        head += rows * (counter.get_total_flops() // leaf.shape[0])
    draft.zero_grad()
    return Operations(sum(maps), attention, head)


def _squared_lengths(batch: Batch) -> int:
    """Sum over documents of length^2."""
    total = 0
    for row in batch.document.tolist():
        lengths: dict[int, int] = {}
        for name in row:
            if name != PADDING:
                lengths[name] = lengths.get(name, 0) + 1
        total += sum(length**2 for length in lengths.values())
    return total


@contextmanager
def _linear_maps(*parts: nn.Module) -> Iterator[list[int]]:
    """Operations of each call of a linear map within, its backward's included."""
    calls: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        (x,) = args
        passes = 1 + int(x.requires_grad) + int(module.weight.requires_grad)
        calls.append(2 * passes * module.weight.numel() * (x.numel() // x.shape[-1]))

    maps = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_hook(note) for module in maps]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
