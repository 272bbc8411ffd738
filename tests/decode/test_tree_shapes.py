"""Growing trees: hand examples, the static shapes, and the dynamic tree against a plain reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3_lab.config import ConfigError, load
from eagle3_lab.decode.methods import HeadTree
from eagle3_lab.decode.tree_growth import Grow, top
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, McSim7b63, StaticTree
from eagle3_lab.types import Tree

Draft = Callable[[tuple[int, ...]], Tensor]  # path of draft ids below the root -> log-probabilities [Vd]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table_draft(seed: int, vocab: int, tied: bool = False) -> Draft:
    """A draft whose law depends on the whole path; ``tied`` gives it many equal and some certain tokens."""
    table = 2 * torch.randn(101, vocab, generator=seeded(seed))
    if tied:
        table = table.round()
        table[::7] = torch.nn.functional.one_hot(torch.arange(len(table[::7])) % vocab, vocab) * 1e4  # log q = 0
    log_q = table.log_softmax(-1)

    def draft(path: tuple[int, ...]) -> Tensor:
        state = seed
        for token in path:
            state = (31 * state + token + 1) % 101
        return log_q[state]

    return draft


def grown(grow: Grow, drafts: list[Draft], vocab: int) -> Tree:
    """Drive a growth as a proposer does. What a row carries is its path; the mask must show exactly that path."""
    growth = grow.begin()
    carried: list[list[tuple[int, ...]]] = [[()] for _ in drafts]
    written: list[list[tuple[int, ...]]] = [[] for _ in drafts]
    widths = []
    frontier = growth.expand(torch.stack([draft(())[None] for draft in drafts]))
    while frontier is not None:
        widths.append(frontier.tokens.shape[1])
        for b, draft in enumerate(drafts):
            rows = zip(frontier.parent[b].tolist(), frontier.tokens[b].tolist(), strict=True)
            carried[b] = [(*carried[b][parent], token) for parent, token in rows]
            written[b] += carried[b]
            for row, seen in zip(carried[b], frontier.visible[b].tolist(), strict=True):
                assert seen == [row[: len(other)] == other for other in written[b]]
        log_q = torch.stack([torch.stack([d(path) for path in c]) for d, c in zip(drafts, carried, strict=True)])
        frontier = growth.expand(log_q)
    assert tuple(widths) == grow.widths
    root = torch.full((len(drafts),), 99)
    return growth.finish().tree(root, torch.arange(vocab) * 2)


def paths(tree: Tree, b: int) -> list[tuple[int, ...]]:
    """Each node's path of draft ids below the root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[b, 1:].tolist(), tree.parents[b, 1:].tolist(), strict=True):
        assert 0 <= parent < len(found)
        found.append((*found[parent], token // 2))
    return found


def reference_dynamic(draft: Draft, levels: int, width: int, budget: int) -> list[tuple[int, ...]]:
    """EAGLE-2's expansion and re-ranking in plain Python: a score is added up in the draft's precision, equal scores
    keep the order in which they were made."""
    frontier = [(torch.zeros(()), ())]
    candidates: list[tuple[Tensor, tuple[int, ...]]] = []
    for _ in range(levels):
        level = []
        for score, path in frontier:
            log_q = draft(path)
            best = sorted(range(len(log_q)), key=lambda token: -log_q[token].item())[:width]
            level += [(score + log_q[token], (*path, token)) for token in best]
        candidates += level
        frontier = sorted(level, key=lambda item: -item[0].item())[:width]
    order = sorted(range(len(candidates)), key=lambda i: -candidates[i][0].item())[: budget - 1]
    return [()] + [candidates[i][1] for i in sorted(order)]


def test_top_is_descending_with_ties_in_index_order() -> None:
    scores = torch.tensor([[-0.0, -3.0, 0.0, -torch.inf, -1.0, -3.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values, index = top(scores.to(dtype), 6)
        assert index.tolist() == [[0, 2, 4, 1, 5, 3]]
        assert torch.equal(values, scores.to(dtype).gather(1, index))
    assert top(torch.tensor([2.0, -1.0, 2.0, 5.0]), 3)[1].tolist() == [3, 0, 2]


def test_top_equals_a_stable_sort() -> None:
    scores = torch.randn(4, 3, 500, generator=seeded(0)).bfloat16().float()
    assert torch.equal(top(scores, 40)[1], scores.sort(dim=-1, descending=True, stable=True).indices[..., :40])


def test_a_dynamic_tree_by_hand() -> None:
    #  level 1: a .6  b .3        level 2: aa .36  ab .18  ba .15  bb .09      budget 5 keeps a, b, aa, ab
    log_q = torch.tensor([0.6, 0.3, 0.1]).log()
    tree = grown(DynamicTree(levels=2, width=2, budget=5), [lambda path: log_q], 3)
    assert paths(tree, 0) == [(), (0,), (1,), (0, 0), (0, 1)]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1]]
    assert tree.tokens.tolist() == [[99, 0, 2, 0, 2]]
    assert tree.candidate.all() and tree.q is None


def test_a_certain_chain_keeps_every_parent_though_scores_tie() -> None:
    # every best child has log-probability 0, so parent and child tie all the way down
    certain = torch.tensor([0.0, -50.0, -60.0])
    tree = grown(DynamicTree(levels=4, width=3, budget=5), [lambda path: certain], 3)
    assert paths(tree, 0) == [(), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("levels", "width", "budget"), [(1, 3, 4), (2, 4, 9), (4, 4, 12), (4, 3, 31), (6, 5, 30)])
def test_the_dynamic_tree_equals_the_plain_reference(levels: int, width: int, budget: int, tied: bool) -> None:
    drafts = [table_draft(seed, 7, tied) for seed in range(6)]
    tree = grown(DynamicTree(levels, width, budget), drafts, 7)
    for b, draft in enumerate(drafts):
        assert paths(tree, b) == reference_dynamic(draft, levels, width, budget)


def test_the_official_dynamic_sizes_are_as_published() -> None:
    grow = DynamicTree(levels=8, width=10, budget=60)
    assert (grow.nodes, grow.levels, grow.widths) == (60, 8, (10,) * 7)
    assert DynamicTree(levels=2, width=3, budget=13).nodes == 13  # all 3 + 9 candidates and the root


def test_a_static_tree_takes_each_path_of_ranks() -> None:
    grow = StaticTree([[1], [0], [1, 0], [1, 2], [1, 0, 0]])
    draft = table_draft(3, 6)

    def follow(ranks: list[int]) -> tuple[int, ...]:
        path: tuple[int, ...] = ()
        for rank in ranks:
            path = (*path, int(draft(path).argsort(descending=True)[rank]))
        return path

    expected = [follow(ranks) for ranks in ([], [0], [1], [1, 0], [1, 2], [1, 0, 0])]
    tree = grown(grow, [draft, draft], 6)
    assert paths(tree, 0) == paths(tree, 1) == expected
    assert (grow.nodes, grow.levels, grow.widths) == (6, 3, (1, 1))


def test_a_chain_is_the_greedy_continuation() -> None:
    draft = table_draft(5, 8)
    tree = grown(Chain(4), [draft], 8)
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3]]
    path: tuple[int, ...] = ()
    for _ in range(4):
        path = (*path, int(draft(path).argmax()))
    assert paths(tree, 0)[-1] == path


def test_the_published_static_tree_has_its_published_size() -> None:
    grow = McSim7b63()
    assert (grow.nodes, grow.levels, grow.widths) == (26, 5, (4, 4, 1, 1))
    tree = grown(grow, [table_draft(1, 9)], 9)
    assert tree.depth()[0].bincount().tolist() == [1, 4, 8, 8, 3, 2]


def test_only_shapes_that_throw_no_draw_away_may_draw() -> None:
    Chain(3).require_drawable()
    McSim7b63().require_drawable()
    with pytest.raises(ValueError, match="DynamicTree keeps nodes by score"):
        DynamicTree(2, 2, 4).require_drawable()


def test_the_largest_shapes_are_made_without_a_search_for_every_node() -> None:
    began = time.process_time()
    chain = Chain(1024)
    plan = chain.plan(torch.device("cpu"))
    fan = StaticTree([[n] for n in range(2047)] + [[n, 0] for n in range(2047)])
    fan.require_drawable()
    assert torch.equal(fan.plan(torch.device("cpu")).levels[0].visible, torch.eye(2047, dtype=torch.bool))
    assert time.process_time() - began < 10, "a second where it is linear, minutes where it is not"
    assert (chain.nodes, chain.levels) == (1025, 1024)
    assert plan.parents.tolist() == [0, *range(1024)]
    assert plan.levels[-2].visible.shape == (1, 1023)
    assert plan.levels[-2].visible.all(), "the last row that is run sees all above it"


def test_a_large_static_tree_is_read_from_a_file_in_seconds(tmp_path: Path) -> None:
    paths = [[n] for n in range(600)] + [[n, 0] for n in range(600)]
    file = tmp_path / "tree.yaml"
    file.write_text(f"grow: {{class_path: StaticTree, init_args: {{choices: {paths}}}}}")
    begin = time.process_time()
    made = load(file, into=HeadTree)
    assert time.process_time() - begin < 8, "the time grows with the square of the paths"
    assert isinstance(made.grow, StaticTree)
    assert made.grow.nodes == 1201


def test_a_list_that_no_tree_takes_is_refused_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tree.yaml"
    file.write_text(f"grow:\n  class_path: StaticTree\n  init_args:\n    choices: {[[n] for n in range(4097)]}")
    with pytest.raises(ConfigError, match=r"tree\.yaml:4: grow\.choices: a list of 4097 values; at most 4096"):
        load(file, into=HeadTree)
    file.write_text("grow: {class_path: StaticTree, init_args: {choices: [[0]]}}")
    with pytest.raises(ConfigError, match=r"^--grow\.choices: a list of 4100 values; at most 4096 are taken$"):
        load(file, f"grow.choices={[[n] for n in range(4100)]}", into=HeadTree)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: StaticTree([]), "at least one node"),
        (lambda: StaticTree([[0], []]), r"choices.1 must be a path of ranks >= 0, got \[\]"),
        (lambda: StaticTree([[-1]]), "choices.0 must be"),
        (lambda: StaticTree([[0], [1], [0]]), r"choices.2 repeats \[0\]"),
        (lambda: StaticTree([[0], [1, 0]]), r"choices.1: the parent \[1\] of \[1, 0\] must stand before it"),
        (lambda: StaticTree([[0, 0], [0]]), "choices.0: the parent"),
        (lambda: StaticTree([[n] for n in range(4096)]), "choices must be at most 4095 nodes below the root, got 4096"),
        (lambda: StaticTree([[0], [0] * 1025]), "choices must be at most 1024 levels deep, got 1025"),
        (lambda: Chain(0), "length must be >= 1, got 0"),
        (lambda: Chain(10**9), "length must be at most 1024, got 1000000000"),
        (lambda: DynamicTree(0, 2, 3), "levels must be >= 1, got 0"),
        (lambda: DynamicTree(2, 0, 3), "width must be >= 1, got 0"),
        (lambda: DynamicTree(2, 3, 14), "budget must lie in 2 .. 13 with levels 2 and width 3, got 14"),
        (lambda: DynamicTree(2, 3, 1), "budget must lie in 2 .. 13"),
        (lambda: DynamicTree(10**9, 2, 3), "levels must be at most 1024, got 1000000000"),
        (lambda: DynamicTree(1, 10**9, 3), "width must be at most 4096, got 1000000000"),
        (
            lambda: DynamicTree(9, 4096, 3),
            "width must leave at most 1048576 candidates, got 4096: 134221825 with levels",
        ),
        (lambda: DynamicTree(3, 64, 8000), "budget must lie in 2 .. 4096 with levels 3 and width 64, got 8000"),
        (lambda: DynamicTree(2, 3, 5).check(2), "width is 3, the draft vocabulary has 2 tokens"),
        (lambda: StaticTree([[4]]).check(4), "choices use 5 ranks, the draft vocabulary has 4 tokens"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
