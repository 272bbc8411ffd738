"""Trees as values."""

from __future__ import annotations

import pytest
import torch

from eagle3_lab.decode.trees import cut, extent, merge, narrow, root_only
from eagle3_lab.types import Tree


def tree_of(nodes: list[tuple[int, int, bool]]) -> Tree:
    tokens, parents, candidate = zip(*nodes, strict=True)
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([candidate]))


def spelled(tree: Tree) -> list[list[tuple[int, ...]]]:
    """The paths of all candidates of each row, spelled in tokens."""
    return [
        [tuple(tokens[seen].tolist()) for seen in visible[candidate]]
        for tokens, visible, candidate in zip(tree.tokens, tree.visible(), tree.candidate, strict=True)
    ]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 33])
def test_a_node_sees_itself_and_its_ancestors_however_deep_and_padding_nobody(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    chain = list(range(-1, nodes - 1))
    some = [int(torch.randint(max(i - 3, 0), max(i, 1), (1,), generator=generator)) for i in range(nodes)]
    parents = [[max(p, 0) for p in chain], some, [*some[: nodes // 2], *[-1] * (nodes - nodes // 2)]]
    tree = Tree(torch.zeros(3, nodes, dtype=torch.long), torch.tensor(parents), torch.ones(3, nodes, dtype=torch.bool))

    def path(above: list[int], node: int) -> set[int]:
        if above[node] == -1:
            return set()
        return {node} | (path(above, above[node]) if node else set())

    for above, sees in zip(parents, tree.visible(), strict=True):
        assert [set(row.nonzero()[:, 0].tolist()) for row in sees] == [path(above, i) for i in range(nodes)]


def test_the_root_alone_has_padding_behind_it() -> None:
    tree = root_only(torch.tensor([7, 8]), 3)
    assert tree.tokens[:, 0].tolist() == [7, 8]
    assert tree.parents.tolist() == [[0, -1, -1]] * 2
    assert tree.candidate.tolist() == [[True, False, False]] * 2


def test_a_cut_tree_keeps_its_upper_levels() -> None:
    chain = tree_of([(1, 0, True), (2, 0, True), (3, 1, True), (4, 2, False), (5, 0, True)])
    assert cut(chain, torch.tensor([1])).parents.tolist() == [[0, 0, -1, -1, 0]]
    assert cut(chain, torch.tensor([2])).candidate.tolist() == [[True, True, True, False, True]]
    assert cut(chain, torch.tensor([-3])).parents.tolist() == [[0, -1, -1, -1, -1]]
    assert torch.equal(cut(chain, torch.tensor([3])).parents, chain.parents)


def test_only_padding_behind_every_rows_last_node_is_left_out() -> None:
    one = tree_of([(1, 0, True), (2, -1, False), (3, 0, True), (0, -1, False), (0, -1, False)])
    two = tree_of([(1, 0, True), (2, 0, True), (0, -1, False), (0, -1, False), (0, -1, False)])
    q = torch.rand(2, 5, 9)
    both = Tree(*(torch.cat(pair) for pair in zip(parts(one), parts(two), strict=True)), q, replacement=False)
    assert (extent(one), extent(two), extent(both)) == (3, 2, 3)
    assert extent(root_only(torch.tensor([7]), 4)) == 1
    short = narrow(both, 3)
    assert [x.tolist() for x in parts(short)] == [x[:, :3].tolist() for x in parts(both)]
    assert short.q is not None and torch.equal(short.q, q[:, :3])
    assert not short.replacement
    assert extent(tree_of([(0, -1, False), (0, -1, False)])) == 1, "a row that has ended is all padding"


def parts(tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tree.tokens, tree.parents, tree.candidate


def test_merging_by_hand() -> None:
    #  root - 1:a - 2:b          root - 1:a - 2:b
    #       - 3:a - 4:b     ->              - 5:c        3 and 4 padding
    #             - 5:c
    tree = tree_of([(9, 0, True), (1, 0, True), (2, 1, True), (1, 0, True), (2, 3, True), (3, 3, True)])
    merged = merge(tree)
    assert merged.parents.tolist() == [[0, 0, 1, -1, -1, 1]]
    assert merged.candidate.tolist() == [[True, True, True, False, False, True]]
    assert torch.equal(merged.tokens, tree.tokens)


def test_a_child_that_repeats_its_parents_or_the_roots_token_is_not_merged() -> None:
    tree = tree_of([(4, 0, True), (4, 0, True), (4, 1, True), (4, 2, True)])
    assert torch.equal(merge(tree).parents, tree.parents)


def test_what_is_not_a_candidate_is_left_alone_and_hangs_on_below_a_merged_node() -> None:
    tree = tree_of(
        [(9, 0, True), (1, 0, False), (1, 0, True), (1, 0, True), (5, 3, False), (1, 0, False), (7, -1, False)]
    )
    merged = merge(tree)
    assert merged.parents.tolist() == [[0, 0, 0, -1, 2, 0, -1]]
    assert merged.candidate.tolist() == [[True, False, True, False, False, False, False]]


def test_merging_random_trees_keeps_the_set_of_paths_and_spells_each_once() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = 12
    tokens = torch.randint(2, (200, nodes), generator=generator)
    parents = (torch.rand(200, nodes, generator=generator) * torch.arange(nodes)).long()
    tree = Tree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
    merged = merge(tree)
    repeats = 0
    for b, (before, after) in enumerate(zip(spelled(tree), spelled(merged), strict=True)):
        assert set(before) == set(after)
        assert len(set(after)) == len(after)
        repeats += len(before) - len(after)
        index = torch.arange(nodes)
        real = merged.parents[b] >= 0
        assert (merged.parents[b][real][1:] < index[real][1:]).all()
    assert repeats > 200
    assert torch.equal(merge(merged).parents, merged.parents)


def test_drawn_candidates_are_not_merged() -> None:
    tree = tree_of([(9, 0, True), (1, 0, True)])
    drawn = Tree(tree.tokens, tree.parents, tree.candidate, q=torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(ValueError, match="every draw must be judged"):
        merge(drawn)
