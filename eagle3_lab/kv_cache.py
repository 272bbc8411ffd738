"""A preallocated key/value cache with one write position a row, for targets and drafts alike.

Slots below ``lengths[b]`` hold committed tokens, slot j the token at position j. Slots from ``lengths[b]`` on are
scratch: the nodes of a tree are written there, node i at ``lengths[b] + i``, and :meth:`KVCache.keep` moves the
accepted ones down to where they belong. Nothing is freed or copied otherwise; reads see the slots up to the next length
bucket, so that few shapes occur.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.types import PADDING

BUCKET, SPAN = 128, 16


def few_sizes(capacity: int) -> int:
    """The next power of two, a bucket at least: so few sizes that what was recorded with a cache is found again."""
    return max(1 << (capacity - 1).bit_length(), BUCKET)


class KVCache:
    """Keys and values of ``num_layers`` attention layers for B sequences of at most ``capacity`` slots.

        cache = KVCache(num_layers=2, batch=1, capacity=64)      # lengths [0]
        cache.write(0, k, v, cache.slots(5)); ...                # five prompt tokens, every layer
        cache.advance(torch.tensor([5]))                         # lengths [5]
        cache.write(0, k, v, cache.slots(4)); ...                # a tree of four nodes at slots 5..8
        cache.keep(torch.tensor([[0, 2, 3]]), torch.tensor([3])) # nodes 0, 2, 3 now at slots 5, 6, 7; lengths [8]

    ``recorded``: forwards over this cache are recorded, one for each shape of a read.

    Memory is zero-filled when a layer first writes: a NaN left in a masked slot would spoil the rows that mask it.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        recorded: bool = False,
    ) -> None:
        self.capacity = -(-capacity // BUCKET) * BUCKET
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        # reads end at a multiple of it; where nothing is made for a shape, few shapes are worth less than short reads
        self.bucket = SPAN if self.lengths.device.type == "cpu" and not recorded else BUCKET
        self.bound = 0  # no row is longer than this; kept on the host so that no read waits for the device
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._row = torch.arange(batch, device=device)[:, None]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def slots(self, count: int, offset: int = 0) -> Int[Tensor, "B count"]:
        """Scratch slots ``offset .. offset + count - 1`` of every row."""
        self._require(offset + count)
        step = torch.arange(offset, offset + count, device=self.lengths.device)
        return self.lengths[:, None] + step

    def view(self, scratch: int) -> int:
        """How many slots a read must span when ``scratch`` uncommitted ones are in use: the next length bucket."""
        self._require(scratch)
        return min(-(-(self.bound + scratch) // self.bucket) * self.bucket, self.capacity)

    def write(
        self,
        layer: int,
        keys: Float[Tensor, "B heads T dk"],
        values: Float[Tensor, "B heads T dv"],
        slots: Int[Tensor, "B T"],
    ) -> None:
        """Store one layer's keys and values of T tokens."""
        if self._keys[layer] is None:
            self._keys[layer], self._values[layer] = (self._empty(x) for x in (keys, values))
        row, slots = self._row.to(keys.device), slots.to(keys.device)  # a sharded target's layers lie apart
        self._keys[layer][row, :, slots] = keys.transpose(1, 2)
        self._values[layer][row, :, slots] = values.transpose(1, 2)

    def read(self, layer: int, view: int) -> tuple[Float[Tensor, "B heads S dk"], Float[Tensor, "B heads S dv"]]:
        """One layer's first ``view`` slots, without a copy."""
        return self._keys[layer][:, :, :view], self._values[layer][:, :, :view]

    def visible(self, uncommitted: Bool[Tensor, "B T M"], view: int) -> Bool[Tensor, "B T S"]:
        """The mask over ``view`` slots of rows that see all committed slots, and of the M scratch slots those that
        ``uncommitted`` names.

            lengths [2], uncommitted [[1 0], [1 1]], view 5:    1 1 1 0 0
                                                                1 1 1 1 0
        """
        slot = torch.arange(view, device=self.lengths.device)
        scratch = slot[None, :] - self.lengths[:, None]  # (B, S): index among the scratch slots
        width = uncommitted.shape[-1]
        inside = (scratch >= 0) & (scratch < width)
        index = scratch.clamp(0, width - 1)[:, None, :].expand(-1, uncommitted.shape[1], -1)
        named = torch.gather(uncommitted, 2, index) & inside[:, None, :]
        return named | (scratch < 0)[:, None, :]

    def positions(self, scratch: Int[Tensor, "B M"], view: int) -> Int[Tensor, "B S"]:
        """Where the token of each of ``view`` slots stands in the text: committed ones at their slot's number, the M
        scratch ones where ``scratch`` says, what lies behind them nowhere (some position, seen by nobody)."""
        slot = torch.arange(view, device=self.lengths.device).expand(self.batch, -1)
        index = slot - self.lengths[:, None]
        return torch.where(index < 0, slot, scratch.gather(1, index.clamp(0, scratch.shape[1] - 1)))

    def advance(self, count: Int[Tensor, " B"], bound: int | None = None) -> None:
        """Commit the first ``count[b]`` scratch slots of each row; ``bound`` caps ``count``, read from it if absent."""
        self.lengths = self.lengths + count
        self.bound += int(count.max()) if bound is None else bound

    def keep(self, path: Int[Tensor, "B A"], count: Int[Tensor, " B"]) -> None:
        """Commit the scratch nodes ``path[b, :count[b]]``, in that order, and drop the others.

        Entries behind ``count`` are ignored; the path's order is from the root, so it ascends, and the root, node 0,
        lies where it belongs: of a path that is no longer nothing is moved.
        """
        steps = path.shape[1]
        if steps == 1:
            self.advance(count, bound=steps)
            return
        target = self.slots(steps)[:, 1:]
        used = torch.arange(1, steps, device=path.device) < count[:, None]
        source = torch.where(used & (path[:, 1:] != PADDING), self.lengths[:, None] + path[:, 1:], target)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            if keys is None or values is None:
                raise AssertionError(f"layer {layer} was never written")
            row, into, out = (x.to(keys.device) for x in (self._row, target, source))
            keys[row, :, into] = keys[row, :, out]  # the right side is gathered before the write
            values[row, :, into] = values[row, :, out]
        self.advance(count, bound=steps)

    def behind(self, lengths: Int[Tensor, " B"]) -> KVCache:
        """This very memory behind other lengths, none above ``bound``. What is committed there only the copy knows of:
        for forwards that are recorded, and repeated behind lengths of which Python is not told."""
        other = copy.copy(self)
        other.lengths = lengths
        return other

    def adopt(self, row: int, other: KVCache, source: int = 0) -> None:
        """Replace one row by the committed tokens of another cache's row ``source``."""
        count = other.bound
        for layer, (keys, values) in enumerate(zip(other._keys, other._values, strict=True)):
            if keys is None or values is None:
                raise AssertionError(f"layer {layer} was never written")
            if self._keys[layer] is None:
                self._keys[layer], self._values[layer] = (self._empty(x) for x in (keys, values))
            self._keys[layer][row, :, :count] = keys[source, :, :count]
            self._values[layer][row, :, :count] = values[source, :, :count]
        self.lengths[row] = other.lengths[source]
        self.bound = max(self.bound, count)

    def reset(self) -> None:
        """Forget all tokens; memory stays where it is, zero-filled."""
        self.lengths, self.bound = torch.zeros_like(self.lengths), 0
        for memory in (*self._keys, *self._values):
            if memory is not None:
                memory.zero_()

    def settle(self) -> None:
        """Make the host's bound exact again (one read from the device); between rounds it only ever grows."""
        self.bound = int(self.lengths.max())

    def _require(self, scratch: int) -> None:
        """Assert that ``scratch`` slots fit behind every row. The device is asked only where the host's bound, which is
        never too low but may be too high, says that they do not."""
        if self.bound + scratch > self.capacity:
            self.settle()
        assert self.bound + scratch <= self.capacity, (
            f"cache overrun: {self.bound} of {self.capacity} slots hold tokens, {scratch} more do not fit"
        )

    def _empty(self, like: Float[Tensor, "_ heads T d"]) -> Float[Tensor, "B heads S d"]:
        return like.new_zeros(self.batch, like.shape[1], self.capacity, like.shape[3])
