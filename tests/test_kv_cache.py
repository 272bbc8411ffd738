"""The slot cache: hand examples, then random operations against rows kept as plain lists."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from eagle3_lab.kv_cache import BUCKET, KVCache, few_sizes
from eagle3_lab.types import PADDING

LAYERS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 3, 2


def states(tokens: list[list[int]], layer: int, width: int) -> Tensor:
    """[B, HEADS, T, width]: every entry tells its token, layer, head and place apart."""
    token = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
    head = torch.arange(HEADS, dtype=torch.float64)[None, :, None, None]
    place = torch.arange(width, dtype=torch.float64)
    return token + 0.1 * layer + 0.01 * head + 0.001 * place


def write(cache: KVCache, tokens: list[list[int]], offset: int = 0) -> None:
    """The same tokens' states to every layer, into scratch slots from ``offset`` on."""
    slots = cache.slots(len(tokens[0]), offset)
    for layer in range(LAYERS):
        cache.write(layer, states(tokens, layer, KEY_WIDTH), states(tokens, layer, VALUE_WIDTH), slots)


def read(cache: KVCache, row: int, count: int) -> list[int]:
    """The tokens whose states stand in the first ``count`` slots of a row, in every layer alike."""
    found = []
    for layer in range(LAYERS):
        keys, values = cache.read(layer, cache.view(0))
        tokens = keys[row, 0, :count, 0] - 0.1 * layer
        found.append([round(x) for x in tokens.tolist()])
        expected = states([found[-1]], layer, KEY_WIDTH)[0], states([found[-1]], layer, VALUE_WIDTH)[0]
        torch.testing.assert_close(keys[row, :, :count], expected[0])
        torch.testing.assert_close(values[row, :, :count], expected[1])
    assert found[0] == found[1]
    return found[0]


def ragged(prompts: list[list[int]], capacity: int = 64) -> KVCache:
    """A cache that has read right-padded prompts."""
    cache = KVCache(LAYERS, len(prompts), capacity)
    width = max(map(len, prompts))
    write(cache, [p + [99] * (width - len(p)) for p in prompts])
    cache.advance(torch.tensor([len(p) for p in prompts]))
    return cache


# -------------------------------------------------------------------------------------------------------- by hand


def test_scratch_slots_begin_behind_each_rows_committed_tokens() -> None:
    cache = ragged([[1, 2, 3, 4, 5], [6, 7]])
    assert cache.lengths.tolist() == [5, 2] and cache.bound == 5
    assert cache.slots(3).tolist() == [[5, 6, 7], [2, 3, 4]]
    assert cache.slots(2, offset=4).tolist() == [[9, 10], [6, 7]]


def test_a_read_spans_the_next_length_bucket_and_never_more_than_there_is() -> None:
    assert BUCKET == 128
    cache = KVCache(1, 1, capacity=130, recorded=True)
    assert cache.capacity == 256  # whole buckets
    assert [cache.view(scratch) for scratch in (1, 128, 129, 256)] == [128, 128, 256, 256]
    cache.advance(torch.tensor([128]))
    assert [cache.view(scratch) for scratch in (0, 1, 128)] == [128, 256, 256]
    cache = KVCache(1, 1, capacity=130)  # on a CPU
    cache.advance(torch.tensor([128]))
    assert [cache.view(scratch) for scratch in (0, 1, 16, 17, 128)] == [128, 144, 144, 160, 256]


def test_rows_see_what_is_committed_and_the_scratch_slots_named() -> None:
    cache = ragged([[1, 2], [3, 4, 5]])
    uncommitted = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [0, 1]]]).bool()
    assert cache.visible(uncommitted, 6).int().tolist() == [
        [[1, 1, 1, 0, 0, 0],
         [1, 1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0, 0],
         [1, 1, 1, 0, 1, 0]],
    ]  # fmt: skip


def test_keep_moves_a_scattered_path_down_to_where_it_belongs() -> None:
    cache = ragged([[1, 2, 3, 4, 5]])
    write(cache, [[10, 11, 12, 13]])  # slots 5..8
    cache.keep(torch.tensor([[0, 2, 3]]), torch.tensor([3]))
    assert cache.lengths.tolist() == [8]
    assert read(cache, 0, 8) == [1, 2, 3, 4, 5, 10, 12, 13]


def test_keep_is_right_where_sources_are_overwritten_targets() -> None:
    """Nodes 2, 3, 4 move to scratch slots 1, 2, 3: each of the first two sources is the next one's target."""
    cache = ragged([[1], [2, 3]])
    write(cache, [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    cache.keep(torch.tensor([[0, 2, 3, 4], [0, 3, PADDING, PADDING]]), torch.tensor([4, 2]))
    assert cache.lengths.tolist() == [5, 4]
    assert read(cache, 0, 5) == [1, 10, 12, 13, 14]
    assert read(cache, 1, 4) == [2, 3, 20, 23]


def test_entries_behind_the_count_are_not_kept_even_if_they_name_nodes() -> None:
    cache = ragged([[1]])
    write(cache, [[10, 11, 12]])
    cache.keep(torch.tensor([[0, 2, 1]]), torch.tensor([2]))
    assert cache.lengths.tolist() == [3]
    assert read(cache, 0, 3) == [1, 10, 12]


def test_a_row_that_keeps_nothing_stays_as_it_was() -> None:
    cache = ragged([[1, 2], [3]])
    write(cache, [[10, 11], [20, 21]])
    cache.keep(torch.tensor([[PADDING, PADDING], [0, 1]]), torch.tensor([0, 2]))
    assert cache.lengths.tolist() == [2, 3]
    assert read(cache, 0, 2) == [1, 2]
    assert read(cache, 1, 3) == [3, 20, 21]


def test_a_row_is_replaced_by_another_caches_tokens_and_the_others_stay() -> None:
    cache = ragged([[1, 2, 3, 4], [5, 6, 7]])
    cache.adopt(0, ragged([[8, 9]]))
    assert cache.lengths.tolist() == [2, 3]
    assert read(cache, 0, 2) == [8, 9]
    assert read(cache, 1, 3) == [5, 6, 7]
    assert cache.bound == 4  # as high as ever, until it is settled
    cache.settle()
    assert cache.bound == 3


def test_an_empty_cache_can_adopt_and_none_can_adopt_what_was_never_written() -> None:
    cache = KVCache(LAYERS, 2, 32)
    cache.adopt(1, ragged([[8, 9, 10]]))
    assert cache.lengths.tolist() == [0, 3]
    assert read(cache, 1, 3) == [8, 9, 10]
    with pytest.raises(AssertionError, match="layer 0 was never written"):
        cache.adopt(0, KVCache(LAYERS, 1, 32))
    with pytest.raises(AssertionError, match="layer 0 was never written"):
        KVCache(LAYERS, 1, 32).keep(torch.tensor([[0, 1]]), torch.tensor([2]))


def test_fresh_memory_is_zero_so_that_a_masked_slot_spoils_nothing() -> None:
    cache = ragged([[1, 2]])
    keys, values = cache.read(0, cache.capacity)
    assert (keys[0, :, 2:] == 0).all() and (values[0, :, 2:] == 0).all()


# ------------------------------------------------------------------------------------------------------- overruns


def test_more_than_there_is_room_for_is_an_assertion_and_writes_nothing() -> None:
    cache = KVCache(LAYERS, 2, capacity=BUCKET)
    write(cache, [[1] * 126, [2] * 126])
    cache.advance(torch.tensor([126, 60]))
    write(cache, [[3, 4], [5, 6]])  # slots 126 and 127: the last ones
    before = [x.clone() for layer in range(LAYERS) for x in cache.read(layer, BUCKET)]
    with pytest.raises(AssertionError, match="cache overrun: 126 of 128 slots hold tokens, 3 more do not fit"):
        write(cache, [[7, 8, 9], [7, 8, 9]])
    with pytest.raises(AssertionError, match="cache overrun: 126 of 128 slots hold tokens, 3 more do not fit"):
        cache.slots(1, offset=2)
    with pytest.raises(AssertionError, match="cache overrun"):
        cache.view(3)
    after = [x for layer in range(LAYERS) for x in cache.read(layer, BUCKET)]
    assert all(map(torch.equal, before, after))


def test_a_bound_that_ran_ahead_of_the_rows_is_made_exact_before_room_is_refused() -> None:
    """Two rows commit in turn: the bound adds up both rows' tokens, the rows hold half as many."""
    cache = ragged([[1], [1]], capacity=BUCKET)
    for step in range(60):
        write(cache, [[10, 11, 12], [20, 21, 22]])
        mine = step % 2
        cache.keep(torch.tensor([[0, 1, 2]] * 2), torch.tensor([3 * (1 - mine), 3 * mine]))
    assert cache.lengths.tolist() == [91, 91]
    assert cache.slots(37).max() == 127
    assert cache.bound == 91
    with pytest.raises(AssertionError, match="cache overrun: 91 of 128"):
        cache.slots(38)


# ---------------------------------------------------------------------------------------------------- equivalence


class Lists:
    """The same cache as plain lists: committed tokens and scratch of each row."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.scratch: list[list[int]] = [[] for _ in range(batch)]

    def write(self, tokens: list[list[int]], offset: int) -> None:
        for scratch, new in zip(self.scratch, tokens, strict=True):
            scratch[offset : offset + len(new)] = new

    def keep(self, paths: list[list[int]]) -> None:
        for row, scratch, path in zip(self.rows, self.scratch, paths, strict=True):
            row += [scratch[node] for node in path]
        self.scratch = [[] for _ in self.rows]


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leave_what_plain_lists_hold(seed: int) -> None:
    """Trees written in pieces, ascending paths of any shape kept, prefixes committed, rows replaced."""
    draw = random.Random(seed)
    batch = 3
    cache, lists = KVCache(LAYERS, batch, 2 * BUCKET), Lists(batch)
    fresh = iter(range(1, 10**6))
    for _ in range(50):
        act = draw.choice(("tree", "tree", "tree", "prefix", "adopt", "settle"))
        if act == "adopt":
            row, tokens = draw.randrange(batch), [next(fresh) for _ in range(draw.randint(1, 40))]
            cache.adopt(row, ragged([tokens]))
            lists.rows[row] = tokens
        elif act == "settle":
            cache.settle()
            assert cache.bound == max(map(len, lists.rows))
        else:
            nodes = draw.randint(1, 12)
            tokens = [[next(fresh) for _ in range(nodes)] for _ in range(batch)]
            first = draw.randint(1, nodes)  # a tree is written level by level
            for offset, piece in ((0, [t[:first] for t in tokens]), (first, [t[first:] for t in tokens])):
                if piece[0]:
                    write(cache, piece, offset)
                    lists.write(piece, offset)
            if act == "prefix":
                counts = [draw.randint(0, nodes) for _ in range(batch)]
                cache.advance(torch.tensor(counts), bound=draw.choice((None, nodes)))
                lists.keep([list(range(c)) for c in counts])
            else:
                below = [draw.sample(range(1, nodes), draw.randint(0, min(nodes - 1, 4))) for _ in range(batch)]
                paths = [draw.choice(([], [0, *sorted(nodes_of)])) for nodes_of in below]
                width = max(1, *map(len, paths))
                padded = [p + [PADDING] * (width - len(p)) for p in paths]
                cache.keep(torch.tensor(padded), torch.tensor([len(p) for p in paths]))
                lists.keep(paths)
        assert cache.lengths.tolist() == [len(row) for row in lists.rows]
        assert max(map(len, lists.rows)) <= cache.bound
    for row, tokens in enumerate(lists.rows):
        assert read(cache, row, len(tokens)) == tokens


def test_a_copy_behind_other_lengths_writes_the_same_memory_and_keeps_its_commits_to_itself() -> None:
    cache = KVCache(LAYERS, 1, 20)
    write(cache, [[3, 4, 5]])
    cache.advance(torch.tensor([3]))
    other = cache.behind(torch.tensor([1]))
    write(other, [[8]])
    other.advance(torch.tensor([1]))
    assert read(cache, 0, 3) == [3, 8, 5]
    assert (cache.lengths.tolist(), other.lengths.tolist()) == ([3], [2])
    assert cache.bound == 3


def test_caches_have_few_sizes() -> None:
    assert [few_sizes(n) for n in (1, BUCKET, BUCKET + 1, 300, 512)] == [BUCKET, BUCKET, 2 * BUCKET, 512, 512]
