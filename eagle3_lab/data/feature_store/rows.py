"""Batches that bring the target's features along, read from a store: what a training without the target's forward is
given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3_lab.data.feature_store.shards import Store
from eagle3_lab.data.packing import PackedRows, Row, RowSource
from eagle3_lab.types import Batch, LogitSummary, Needs, TargetOut


@dataclass(frozen=True)
class Reading:
    """A store, what is read from it for each batch, and how many batches ahead."""

    store: Store
    needs: Needs
    threads: int = 0


@dataclass(frozen=True)
class KeptBatch(Batch):
    """A batch with what its target said of it, in the store's dtype; zeros where there is no token."""

    out: TargetOut

    def to(self, device: torch.device | str) -> KeptBatch:
        plain, out = super().to(device), self.out
        assert out.top is not None and out.summary is not None
        there = TargetOut(
            taps=tuple(tap.to(device) for tap in out.taps),
            top=out.top.to(device),
            summary=LogitSummary(out.summary.argmax.to(device), out.summary.log_sum.to(device)),
        )
        return KeptBatch(plain.ids, plain.supervised, plain.position, plain.document, there)


class KeptRows(RowSource):
    """Packed rows with their features: index it as `PackedRows`. ``first`` is the place of its first document in the
    store."""

    def __init__(self, rows: PackedRows, reading: Reading, first: int) -> None:
        self.rows, self.reading, self.first = rows, reading, first

    def lay(self, rows: Sequence[Row]) -> Batch:
        return self.rows.lay(rows)

    def __getitem__(self, rows: Sequence[Row]) -> KeptBatch:
        batch = self.rows[rows]
        store, needs = self.reading.store, self.reading.needs
        contents = store.manifest.contents
        top = contents.layers[-1]
        shape = batch.ids.shape
        states = {i: torch.zeros(*shape, contents.width, dtype=contents.torch_dtype) for i in {*needs.layers, top}}
        argmax, log_sum = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for b, row in enumerate(rows):
            start = 0
            for i in row:
                kept = store.document(self.first + i, list(states))
                here = slice(start, start + len(kept.argmax))
                assert len(kept.argmax) == len(self.rows.documents[i])
                for layer, state in states.items():
                    state[b, here] = kept.states[layer]
                argmax[b, here], log_sum[b, here] = kept.argmax.long(), kept.log_sum
                start = here.stop
        out = TargetOut(tuple(states[i] for i in needs.layers), states[top], summary=LogitSummary(argmax, log_sum))
        return KeptBatch(batch.ids, batch.supervised, batch.position, batch.document, out)


class FromStore:
    """In the place of a target's ``features``: what the batch brings along, in the target's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, batch: Batch, needs: Needs) -> TargetOut:
        assert isinstance(batch, KeptBatch) and len(batch.out.taps) == len(needs.layers)
        out = batch.out
        assert out.top is not None
        return TargetOut(tuple(tap.to(self.dtype) for tap in out.taps), out.top.to(self.dtype), summary=out.summary)
