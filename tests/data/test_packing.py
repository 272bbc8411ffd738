from __future__ import annotations

import random
import time

import pytest
import torch
from torch.utils.data import DataLoader

from eagle3_lab.data.conversations import Conversation
from eagle3_lab.data.documents import Document
from eagle3_lab.data.packing import PackedRows, RowLoader, RowOrder, pack
from eagle3_lab.errors import UserError
from eagle3_lab.rows import row_weights
from eagle3_lab.types import PADDING


def document(*ids: int, supervised: int = 1) -> Document:
    """Ids of which the last ``supervised`` are the target's."""
    mask = torch.arange(len(ids)) >= len(ids) - supervised
    return Document(Conversation(str(ids[0]), ()), torch.tensor(ids, dtype=torch.int32), mask)


def some_documents(count: int, longest: int, seed: int = 0) -> list[Document]:
    """Documents whose ids are all different."""
    draw = random.Random(seed)
    found, next_id = [], 1
    for _ in range(count):
        length = draw.randint(2, longest)
        found.append(document(*range(next_id, next_id + length), supervised=length // 2))
        next_id += length
    return found


def order_of(found: list[Document], row_length: int, **more: int) -> RowOrder:
    return RowOrder([len(one) for one in found], row_length, **more)


def test_packing_by_hand() -> None:
    assert pack([3, 2, 2, 1], 4) == [(0, 3), (1, 2)]
    assert pack([1, 1, 4, 2], 4) == [(2,), (3, 0, 1)]
    assert pack([5, 3, 2, 4], 6) == [(0,), (3, 2), (1,)], "the row with the least room that is enough"
    assert pack([], 4) == []


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row_length must be at least the longest document, 5, got 4"):
        pack([5, 1], 4)


def test_a_batch_by_hand() -> None:
    rows = PackedRows([document(7, 8, 9), document(5, 6), document(4, 3)], 6)
    batch = rows[[(0, 1), (2,), ()]]
    assert batch.ids.tolist() == [[7, 8, 9, 5, 6, 0], [4, 3, 0, 0, 0, 0], [0] * 6]
    assert batch.position.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.document.tolist() == [[0, 0, 0, 1, 1, PADDING], [0, 0, *[PADDING] * 4], [PADDING] * 6]
    assert batch.supervised.int().tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_stands_in_exactly_one_place_of_an_epoch(epoch: int) -> None:
    found = some_documents(40, 20)
    rows = PackedRows(found, 32)
    seen: list[int] = []
    for batch in map(rows.__getitem__, order_of(found, 32, rows_per_batch=3, seed=1).batches(epoch)):
        real = batch.document != PADDING
        seen += batch.ids[real].tolist()
        assert batch.ids.shape == (3, 32)
        assert not batch.supervised[~real].any() and not batch.ids[~real].any()
        for b in range(3):
            for number in batch.document[b][real[b]].unique().tolist():
                here = batch.document[b] == number
                one = next(one for one in found if one.ids[0] == batch.ids[b][here][0])
                assert batch.ids[b][here].tolist() == one.ids.tolist(), "in one piece, in order"
                assert batch.supervised[b][here].tolist() == one.supervised.tolist()
                assert batch.position[b][here].tolist() == list(range(len(one)))
    assert sorted(seen) == sorted(i for one in found for i in one.ids.tolist())


def test_no_row_weight_crosses_from_one_document_into_the_next() -> None:
    found = [document(*range(1, 8), supervised=5), document(*range(11, 15), supervised=3)]
    packed = PackedRows(found, 16)[[(0, 1)]]
    for s in range(6):
        alone = [row_weights(b.supervised, b.document, s) for b in (PackedRows(found, 16)[[(i,)]] for i in (0, 1))]
        expected = torch.cat([alone[0][0, :7], alone[1][0, :4], torch.zeros(5)])
        assert row_weights(packed.supervised, packed.document, s)[0].tolist() == expected.tolist()


def test_an_epoch_has_the_same_number_of_batches_as_any_other_and_an_order_of_its_own() -> None:
    found = some_documents(60, 20)
    order = order_of(found, 32, rows_per_batch=2, seed=3)
    epochs = [order.batches(epoch) for epoch in range(4)]
    assert {len(epoch) for epoch in epochs} == {len(order)}
    assert epochs[0] != epochs[1] != epochs[2]
    assert {frozenset(row) for batch in epochs[0] for row in batch} != {
        frozenset(row) for batch in epochs[1] for row in batch
    }, "documents meet others, not only rows other rows"
    assert order.batches(1) == epochs[1]
    for seed in (4, 3 + 2**32):
        assert order_of(found, 32, rows_per_batch=2, seed=seed).batches(0) not in epochs


def test_validation_keeps_one_order() -> None:
    order = order_of(some_documents(20, 20), 32)
    assert order.batches(0) == order.batches(3)


def test_rows_are_filled_well_and_many_documents_are_packed_fast() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(20, 1024) for _ in range(20_000)]
    began = time.process_time()
    rows = pack(lengths, 2048, torch.Generator().manual_seed(0))
    assert time.process_time() - began < 5
    assert sum(lengths) / (len(rows) * 2048) > 0.97
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))


def test_ranks_share_an_epoch_and_take_equally_many_batches() -> None:
    found = some_documents(23, 20)
    alone = [row for batch in order_of(found, 32, seed=1).batches(0) for row in batch]
    for world in (2, 3):
        orders = [order_of(found, 32, rows_per_batch=2, seed=1, rank=r, world=world) for r in range(world)]
        shares = [order.batches(0) for order in orders]
        assert {len(share) for share in shares} == {len(orders[0])}
        assert all(len(batch) == 2 for share in shares for batch in share)
        together = [row for share in shares for batch in share for row in batch if row]
        assert sorted(together) == sorted(alone)


def test_the_same_batches_come_in_the_same_order_from_any_number_of_workers() -> None:
    found = some_documents(20, 20)
    rows = PackedRows(found, 32)
    expected = [batch.ids.tolist() for batch in RowLoader(rows, order_of(found, 32, seed=1))]
    for workers in (0, 2):
        sampler = order_of(found, 32, seed=1).batches(0)
        loader = DataLoader(rows, sampler=sampler, batch_size=None, num_workers=workers)
        assert [batch.ids.tolist() for batch in loader] == expected


def fresh() -> RowLoader:
    found = some_documents(12, 20)
    return RowLoader(PackedRows(found, 32), order_of(found, 32, seed=1), "data")


def take(loader: RowLoader, count: int) -> list[list[list[int]]]:
    """The ids of the next ``count`` batches, over as many epochs as it takes."""
    seen: list[list[list[int]]] = []
    while len(seen) < count:
        for batch in loader:
            seen.append(batch.ids.tolist())
            if len(seen) == count:
                break
    return seen


def test_a_loader_stopped_anywhere_goes_on_with_the_next_batch() -> None:
    total = 2 * len(fresh()) + 1
    straight = take(fresh(), total)
    for stop in range(total):
        stopped, resumed = fresh(), fresh()
        before = take(stopped, stop)
        resumed.load_state_dict(stopped.state_dict())
        assert before + take(resumed, total - stop) == straight


def test_a_state_says_where_the_next_batch_stands() -> None:
    loader = fresh()
    assert loader.state_dict() == {"epoch": 0, "batch": 0, "data": "data"}
    for number, _ in enumerate(loader, 1):
        expected = {"epoch": 0, "batch": number} if number < len(loader) else {"epoch": 1, "batch": 0}
        assert loader.state_dict() == {**expected, "data": "data"}


def test_a_pass_that_is_left_early_is_followed_by_the_next_epoch() -> None:
    loader = fresh()
    take(loader, 1)
    assert [batch.ids.tolist() for batch in loader] == take(fresh(), 2 * len(loader))[len(loader) :]


def test_a_state_of_other_data_is_refused() -> None:
    found = some_documents(4, 20)
    loader = RowLoader(PackedRows(found, 32), order_of(found, 32), "this")
    with pytest.raises(UserError, match=r"other data \(that\) than this \(this\)"):
        loader.load_state_dict({"epoch": 0, "batch": 1, "data": "that"})


def test_loading_draws_from_no_global_generator() -> None:
    found = some_documents(12, 20)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    take(RowLoader(PackedRows(found, 32), order_of(found, 32, seed=1)), 9)
    assert torch.equal(torch.get_rng_state(), before)
