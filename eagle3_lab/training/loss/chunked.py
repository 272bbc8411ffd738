"""A loss over many rows, worked off piece by piece: which rows come together, and how their gradients are kept.

A target row teaches up to S draft rows: row t of step s has teacher t + 1 + s. Going through the teachers in chunks,
and through the steps within a chunk, a teacher's law is made once and used for all its draft rows while it is at
hand. Each piece's gradient is taken at once, so that nothing of the size rows x vocabulary outlives its piece; what
stays are gradients of the heads' inputs and parameters, which the backward pass only hands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from eagle3_lab.interfaces import DraftModel
from eagle3_lab.training.loss.head_linear import HeadProducts
from eagle3_lab.types import DraftOut

NEARLY_ALL = 7 / 8
"""From this share on a step's rows are worked off with every teacher of the chunk, those without a row by a row that
does not count: a few more products, and no second copy of the laws."""


@dataclass(frozen=True)
class Taught:
    """Draft rows of one step: row ``place[i]``, flat ``b * T + t``, has the chunk's teacher ``slot[i]``; ascending.

    ``beside``: a row for every teacher of the chunk, where nearly all have one; those that have none get some row of
    the batch, whose result is dropped. None: the rows are worked off by themselves.
    """

    step: int
    place: Int[Tensor, " R"]
    slot: Int[Tensor, " R"]
    beside: Int[Tensor, " C"] | None = None

    @property
    def rows(self) -> Int[Tensor, " computed"]:
        """The rows to be worked off."""
        return self.place if self.beside is None else self.beside

    def spread(self, values: Shaped[Tensor, " R"]) -> Shaped[Tensor, " computed"]:
        """A value of each row, for the rows to be worked off: 0 where one does not count."""
        if self.beside is None:
            return values
        return torch.zeros_like(self.beside, dtype=values.dtype).index_put((self.slot,), values)

    def pick(self, values: Shaped[Tensor, "computed ..."]) -> Shaped[Tensor, "R ..."]:
        """Of the rows worked off, those that count."""
        return values if self.beside is None else values[self.slot]


@dataclass(frozen=True)
class Chunk:
    """Target rows ``(row, column)``, and the draft rows they teach. A column may lie past the text: >= T."""

    row: Int[Tensor, " C"]
    column: Int[Tensor, " C"]
    pieces: tuple[Taught, ...]


def chunks(wanted: Bool[Tensor, "B T S"], size: int) -> list[Chunk]:
    """Group the wanted draft rows by teacher, at most ``size`` teachers together, as evenly as that allows.

    There is at least one chunk, with a piece for each step, however little is wanted: so every step has a loss, which
    may be 0, with a gradient. One wait for the device, not one a chunk.
    """
    batch, rows, depth = wanted.shape
    wide = rows + depth  # the last step's last teacher is row T - 1 + depth
    taught = wanted.new_zeros(batch, wide, depth)
    for s in range(depth):
        taught[:, 1 + s : 1 + s + rows, s] = wanted[..., s]
    taught = taught.flatten(0, 1)
    teachers = taught.any(-1).nonzero()[:, 0]

    total = teachers.shape[0]
    count = max(1, -(-total // size))
    size = -(-total // count)
    grid = taught.new_zeros(count * size, depth)
    grid[:total] = taught[teachers]
    grid = grid.view(count, size, depth).transpose(1, 2)  # (chunk, step, slot)
    chunk, step, slot = grid.nonzero().unbind(-1)
    teacher = teachers[chunk * size + slot]
    place = teacher // wide * rows + teacher % wide - 1 - step

    counts = grid.sum(-1).flatten().tolist()
    places, slots = place.split(counts), slot.split(counts)
    result = []
    for c in range(count):
        ids = teachers[c * size : (c + 1) * size]
        row, column = ids // wide, ids % wide
        pieces = []
        for s in range(depth):
            i, beside = c * depth + s, None
            if NEARLY_ALL * ids.shape[0] <= counts[i] < ids.shape[0]:
                beside = row * rows + (column - 1 - s).clamp(0, rows - 1)
            pieces.append(Taught(s, places[i], slots[i], beside))
        result.append(Chunk(row, column, tuple(pieces)))
    return result


class Collected:
    """Gradients of a sum of pieces, for every step's ``head_in`` and the draft's trained parameters.

    Logits are made while ``products`` is active, which collects what it can of the head's gradient. ``add`` takes the
    gradient of one piece, and ``total`` is the sum as the caller's graph sees it: its backward multiplies what was
    collected by the incoming gradient and by ``scale``.
    """

    def __init__(self, steps: Sequence[DraftOut], draft: DraftModel, products: HeadProducts) -> None:
        self._inputs = [out.head_in for out in steps]
        self._parameters = [p for p in draft.parameters() if p.requires_grad]
        self._products = products
        self._by_row = [torch.zeros_like(x).reshape(-1, x.shape[-1]) for x in self._inputs]
        self._by_parameter: list[Tensor | None] = [None for _ in self._parameters]

    def add(
        self,
        logits: Float[Tensor, "R Vd"],
        gradient: Float[Tensor, "R Vd"] | None,
        rest: Float[Tensor, ""],
        leaf: Float[Tensor, "R H"],
        piece: Taught,
    ) -> None:
        """Take the gradient of one piece, which ends its graph: of a loss whose gradient by ``logits`` is known (None:
        it has none), and of the ``rest`` of the loss, made from the ``leaf`` that the logits are made from."""
        parts = [] if gradient is None else [(logits, gradient)]
        if rest.requires_grad:
            parts.append((rest, torch.ones_like(rest)))
        assert parts, "a term that weighs something has a gradient"
        outputs, incoming = zip(*parts, strict=True)
        by_leaf, *found = torch.autograd.grad(outputs, [leaf, *self._parameters], incoming, allow_unused=True)
        if by_leaf is not None:
            self._by_row[piece.step][piece.place] = piece.pick(by_leaf)
        for i, new in enumerate(found):
            so_far = self._by_parameter[i]
            if new is not None:
                # the first is copied: a gradient may be shared or expanded, which no one should add into
                self._by_parameter[i] = new.clone() if so_far is None else so_far.add_(new)

    def total(self, value: Float[Tensor, ""], scale: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """``value``, with ``scale`` times the collected gradients behind it."""
        gradients: list[Tensor | None] = []
        for kept, x in zip(self._by_row, self._inputs, strict=True):
            gradients.append(kept.view(x.shape))
        for parameter, by_autograd in zip(self._parameters, self._by_parameter, strict=True):
            by_product = self._products.take(parameter)
            if by_product is not None and by_autograd is not None:
                by_product += by_autograd
            gradients.append(by_autograd if by_product is None else by_product)
        self._by_row, self._by_parameter = [], []
        out = _Known.apply(value, scale, gradients, *self._inputs, *self._parameters)
        assert isinstance(out, Tensor)
        return out


class _Known(torch.autograd.Function):
    """A value whose gradients are known beforehand."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor, gradients: list[Tensor | None], *_: Tensor) -> Tensor:  # noqa: ANN401
        ctx.scale, ctx.gradients = scale, gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise RuntimeError("the loss's backward ran before and kept nothing; the first needs retain_graph=True")
        factor, gradients = grads[0] * ctx.scale, ctx.gradients
        if _graph_is_kept():
            return None, None, None, *(None if known is None else known * factor for known in gradients)
        # handed on, not copied: autograd makes a gradient a parameter's own only where no one else holds it
        ctx.gradients = None
        return None, None, None, *(None if known is None else known.mul_(factor) for known in gradients)


def _graph_is_kept() -> bool:
    """Whether the backward that is running may be repeated."""
    return _get_current_graph_task_keep_graph()
