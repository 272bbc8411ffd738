"""The choice of a tree: what narrower trees would have held of a wide tree's rounds, and which shape is fastest."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from decode_toys import seeded

from eagle3_lab.decode.auto_tree import AutoTree, Choice, SeenRound, accepted_by_budget, choose_tree
from eagle3_lab.decode.tree_growth import Grown
from eagle3_lab.decode.tree_shapes import DynamicTree

VOCAB = 7


def test_what_a_narrower_tree_holds_by_hand() -> None:
    """Root with children 1 2 3 (scores -1 -2 -4), 1 with 4 5 (-1.5 -3), 2 with 6 (-2.5); 2 and 6 were accepted."""
    seen = SeenRound((0, 0, 0, 1, 1, 2), (-1.0, -2.0, -4.0, -1.5, -3.0, -2.5), frozenset({2, 6}))
    assert accepted_by_budget(seen, levels=2, width=3) == [0, 0, 1, 2, 2, 2]  # by score: 1 4 2 6 5 3
    assert accepted_by_budget(seen, levels=1, width=3) == [0, 1, 1]
    assert accepted_by_budget(seen, levels=2, width=2) == [0, 0, 1, 2, 2]  # 3 is no child of width 2
    assert accepted_by_budget(seen, levels=2, width=1) == [0, 0]  # the chain 1 4


class Model:
    """A draft whose log-probabilities are fixed by the path alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def log_q(self, path: tuple[int, ...]) -> torch.Tensor:
        key = random.Random(f"{self.seed} {path}").randrange(2**31)
        return (2 * torch.randn(VOCAB, generator=seeded(key))).log_softmax(-1)

    def grow(self, tree: DynamicTree) -> tuple[Grown, list[tuple[int, ...]]]:
        """The tree, and every node's path of tokens."""
        growth = tree.begin()
        paths: list[tuple[int, ...]] = [()]
        frontier = growth.expand(self.log_q(())[None, None])
        while frontier is not None:
            tokens, parents = frontier.tokens[0].tolist(), frontier.parent[0].tolist()
            paths = [(*paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            frontier = growth.expand(torch.stack([self.log_q(path) for path in paths])[None])
        grown = growth.finish()
        named: list[tuple[int, ...]] = [()]
        for token, parent in zip(grown.tokens[0].tolist(), grown.parents[0, 1:].tolist(), strict=True):
            named.append((*named[parent], token))
        return grown, named


@pytest.mark.parametrize("seed", range(8))
def test_it_holds_what_the_narrower_tree_itself_would_have_accepted(seed: int) -> None:
    """Grown anew, tree by tree: for every shape whose nodes the wide one kept the counts are equal."""
    model = Model(seed)
    text = tuple(random.Random(seed).choices(range(VOCAB), k=5))
    wide, named = model.grow(DynamicTree(4, 4, 1 + 4 + 3 * 16))  # every candidate, so that nothing is unknown
    accepted = {i for i, path in enumerate(named) if path and text[: len(path)] == path}
    seen = SeenRound(tuple(wide.parents[0, 1:].tolist()), tuple(wide.scores[0].tolist()), frozenset(accepted))
    for levels in range(1, 5):
        for width in range(1, 5):
            most = 1 + width + (levels - 1) * width**2
            counts = accepted_by_budget(seen, levels, width)
            assert len(counts) == most - 1
            for budget in {2, (2 + most) // 2, most}:
                _, paths = model.grow(DynamicTree(levels, width, budget))
                held = sum(text[: len(path)] == path for path in paths if path)
                assert counts[budget - 2] == held, (levels, width, budget)


def test_the_fastest_tree_depends_on_what_sizes_cost() -> None:
    seen = [SeenRound((0, 0, 1, 1, 3), (-1.0, -2.0, -1.1, -3.0, -1.2), frozenset({1, 3, 5}))]  # a chain 1 3 5
    budgets = range(2, 7)
    free = choose_tree(seen, lambda n: 1.0, lambda w: 0.0, levels=3, width=2, budgets=budgets)[0]
    assert (free.levels, free.width, free.budget) == (3, 1, 4)  # the fewest levels, rows and nodes that hold all
    assert free.tau == 4.0
    assert free.tokens_per_s == 4.0
    dear = choose_tree(seen, lambda n: 1.0, lambda w: 5.0, levels=3, width=2, budgets=budgets)[0]
    assert dear.levels == 1  # a level costs five forwards
    found = choose_tree(seen, lambda n: float(n), lambda w: 0.0, levels=3, width=2, budgets=budgets)
    assert [c.tokens_per_s for c in found] == sorted((c.tokens_per_s for c in found), reverse=True)
    with pytest.raises(ValueError, match="no round was seen"):
        choose_tree([], lambda n: 1.0, lambda w: 1.0, levels=1, width=1, budgets=[2])


def test_an_automatic_tree_is_the_first_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"trees": [vars(Choice(3, 2, 6, 1.5, 9.0)), vars(Choice(1, 1, 2, 1.1, 8.0))]}))
    tree = AutoTree(file)
    assert (tree.levels, tree.width, tree.budget, tree.nodes) == (3, 2, 6, 6)


@pytest.mark.parametrize("text", [None, "nonsense", "{}", '{"trees": []}', '{"trees": [{"levels": 2}]}', "[]"])
def test_a_file_without_a_tree_is_refused(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="is no JSON of `bench decode` with a tree"):
        AutoTree(file)
