"""Drawn trees: the law of everything a round can emit, by walking every draw and every verdict in float64.

Each way of drawing a tree is a row of one batch with its exact weight; so is each accept, refusal and bonus.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from test_verify import EXACT, Path, PathLaw, judged_law, seeded, total_variation
from torch import Tensor

from eagle3_lab.decode.sampled_trees import DrawnTree
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, McSim7b63, StaticTree
from eagle3_lab.decode.verify import Chance, ExactVerifier, Uniforms
from eagle3_lab.types import Tree

Draft = Callable[[Path], Tensor]  # path of target ids below the root -> logits over the draft vocabulary
DRAFT = SamplingLaw(1.5)


class EveryDraw(Chance):
    """Takes prescribed tokens, one set a row, and keeps each row's probability. Where nothing is left to draw, token 0
    stands for the one thing that can happen."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.used = tokens, 0
        self.weight = torch.ones(len(tokens), dtype=torch.float64)

    def accept(self, prob: Tensor) -> Tensor:
        raise AssertionError("nothing is accepted while a tree is drawn")

    def pick(self, probs: Tensor) -> Tensor:
        taken = self.tokens[:, self.used : self.used + probs.shape[1]]
        self.used += probs.shape[1]
        mass = probs.sum(-1)
        weight = torch.where(mass > 0, probs.gather(-1, taken[..., None])[..., 0] / mass, (taken == 0).double())
        self.weight = self.weight * weight.prod(1)
        return taken


def grown(grow: DrawnTree, draft: Draft, vocab: Sequence[int], chance: Chance, rows: int) -> Tree:
    """Drive the growth as a proposer does; what a row of the draft carries is its path in target ids."""
    growth, ids = grow.begin(chance), torch.tensor(vocab)
    carried: list[list[Path]] = [[()] for _ in range(rows)]
    known: dict[Path, Tensor] = {}

    def log_q() -> Tensor:
        for path in {path for row in carried for path in row} - known.keys():
            known[path] = draft(path).log_softmax(-1)
        return torch.stack([torch.stack([known[path] for path in row]) for row in carried])

    frontier = growth.expand(log_q())
    while frontier is not None:
        steps = zip(frontier.parent.tolist(), ids[frontier.tokens].tolist(), strict=True)
        carried = [
            [(*above[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for above, (parents, tokens) in zip(carried, steps, strict=True)
        ]
        frontier = growth.expand(log_q())
    return growth.finish().tree(torch.zeros(rows, dtype=torch.long), ids)


def every_tree(grow: DrawnTree, draft: Draft, vocab: Sequence[int]) -> tuple[Tree, Tensor]:
    """Every tree that can be drawn, one a row, and its probability."""
    ways = torch.tensor(list(itertools.product(range(len(vocab)), repeat=grow.draws)))
    chance = EveryDraw(ways)
    tree = grown(grow, draft, vocab, chance, len(ways))
    assert chance.used == grow.draws, "a tree takes as many draws as it says"
    real = chance.weight > 0
    assert tree.q is not None and abs(float(chance.weight.sum()) - 1) < EXACT
    return Tree(tree.tokens[real], tree.parents[real], tree.candidate[real], tree.q[real], tree.replacement), (
        chance.weight[real]
    )


def random_draft(seed: int, size: int) -> Draft:
    law = PathLaw(seed, size, SamplingLaw(1.0))
    return lambda path: law(path).log()


SHAPES = {
    "chain": Chain(3),
    "three siblings": StaticTree([[0], [1], [2]]),
    "two levels, uneven": StaticTree([[0], [1], [0, 0], [1, 0], [1, 1]]),
    "three below the only child": StaticTree([[0], [0, 0], [0, 1], [0, 2]]),
}
TARGETS = {"temperature 1": SamplingLaw(1.0), "top-k 2": SamplingLaw(0.7, top_k=2), "greedy": SamplingLaw()}
VOCAB = {"chain": 4, "three siblings": 5}  # others: 3, so that every way can be walked
WHOLE, KEPT = (0, 1, 2), (0, 2)


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_drawn_the_text_follows_the_targets_law(shape: str, target: str, replacement: bool) -> None:
    """Also with a draft vocabulary of two of the target's tokens, and with laws of fewer tokens than siblings."""
    size = VOCAB.get(shape, 3)
    p, whole = PathLaw(11, size, TARGETS[target]), tuple(range(size))
    for law, vocab in ((DRAFT, whole), (SamplingLaw(0.6, top_k=2), whole), (DRAFT, KEPT), (SamplingLaw(), whole)):
        grow = DrawnTree(SHAPES[shape], law, size, replacement)
        came = judged_law(*every_tree(grow, random_draft(23, len(vocab)), vocab), p)
        assert abs(sum(came.values()) - 1) < EXACT
        assert total_variation(came, p.joint(grow.levels + 1)) < EXACT


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
def test_a_draft_that_likes_most_what_the_target_never_says_changes_nothing(replacement: bool) -> None:
    p = PathLaw(11, 3, TARGETS["top-k 2"])
    grow = DrawnTree(SHAPES["two levels, uneven"], SamplingLaw(1.0), 3, replacement)
    came = judged_law(*every_tree(grow, lambda path: ((1 - p(path)) ** 3).log(), WHOLE), p)
    assert total_variation(came, p.joint(3)) < EXACT


def test_the_tests_above_see_a_q_that_is_not_the_law_of_the_draws() -> None:
    """Another temperature, another sibling's law, and the other rule for siblings: each a bias far above rounding."""

    def bias(shape: str, replacement: bool, mistake: Callable[[Tree, Tensor], Tree]) -> float:
        size = VOCAB.get(shape, 3)
        p = PathLaw(11, size, TARGETS["temperature 1"])
        grow = DrawnTree(SHAPES[shape], DRAFT, size, replacement)
        tree, weights = every_tree(grow, random_draft(23, size), range(size))
        assert tree.q is not None
        return total_variation(judged_law(mistake(tree, tree.q), weights, p), p.joint(grow.levels + 1))

    for replacement in (False, True):
        for shape in SHAPES:  # of what is zero everywhere, zero is made again
            assert bias(shape, replacement, lambda tree, q: replace(tree, q=q**2)) > 0.01
        assert bias("two levels, uneven", replacement, lambda tree, q: replace(tree, q=q[:, [0, 2, 1, 3, 4, 5]])) > 0.01
    # The other way round is no mistake: draws with replacement whose repeats are not judged are draws without it.
    assert bias("three siblings", False, lambda tree, q: replace(tree, replacement=True)) > 0.001


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
def test_the_tree_carries_each_parents_own_law_over_the_targets_ids(replacement: bool) -> None:
    vocab, law, draft = (1, 2, 4, 5, 7), SamplingLaw(0.7, top_k=4), random_draft(3, 5)
    grow = DrawnTree(StaticTree([[0], [1], [0, 0], [0, 1], [0, 2], [1, 0], [0, 2, 0]]), law, 9, replacement)
    uniforms = torch.rand(40, grow.draws, dtype=torch.float64, generator=seeded(4))
    tree = grown(grow, draft, vocab, Uniforms(uniforms), 40)
    assert tree.q is not None and tree.replacement is replacement and tree.q.dtype == torch.float64
    assert tree.parents[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 5]
    repeated = 0
    for b in range(40):
        paths: list[Path] = [()]
        for i in range(1, 8):
            parent, token = int(tree.parents[b, i]), int(tree.tokens[b, i])
            paths.append((*paths[parent], token))
            assert tree.q[b, parent, token] > 0
        for node in range(8):
            own = torch.zeros(9, dtype=torch.float64)
            if node in (0, 1, 2, 5):
                own[torch.tensor(vocab)] = law.filtered(draft(paths[node])[None, None])[0, 0]
            torch.testing.assert_close(tree.q[b, node], own, rtol=0, atol=1e-12)
        repeated += len(set(paths)) < 8
    assert (repeated > 0) is replacement


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    p = PathLaw(11, 6, SamplingLaw(1.0))
    grow, rows = DrawnTree(Chain(4), SamplingLaw(1.0), 6), 200
    chance = Uniforms(torch.rand(rows, 4, dtype=torch.float64, generator=seeded(0)))
    tree = grown(grow, lambda path: p(path).log(), range(6), chance, rows)
    laws = torch.stack([torch.stack([p(tuple(row[1:n])) for n in range(1, 6)]) for row in tree.tokens.tolist()])
    assert ExactVerifier()(laws, tree, [seeded(b) for b in range(rows)]).length.tolist() == [4] * rows
    assert len({tuple(row) for row in tree.tokens.tolist()}) > 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_promoted_and_q_keeps_the_dtype_of_the_draws(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 1, 300, generator=seeded(2)).to(dtype)
    grow = DrawnTree(StaticTree([[0], [1]]), SamplingLaw(0.8), 300)
    growth = grow.begin(Uniforms(torch.rand(5, 2, dtype=torch.float64, generator=seeded(3))))
    assert growth.expand(logits) is None
    tree = growth.finish().tree(torch.zeros(5, dtype=torch.long), torch.arange(300))
    assert tree.q is not None and tree.q.dtype == torch.float32
    torch.testing.assert_close(tree.q[:, 0], (logits[:, 0].float() / 0.8).softmax(-1), rtol=0, atol=0)


def test_the_published_tree_draws_by_rank_and_takes_what_it_says() -> None:
    grow = DrawnTree(McSim7b63(), SamplingLaw(1.0), 40)
    assert (grow.nodes, grow.levels, grow.widths) == (26, 5, (4, 4, 1, 1))
    assert grow.draws == 1 * 4 + 4 * 3 + 4 * 3 + 1 * 3 + 1 * 2
    chance = Uniforms(torch.rand(3, grow.draws, dtype=torch.float64, generator=seeded(1)))
    tree = grown(grow, random_draft(1, 40), range(40), chance, 3)
    assert chance.used == grow.draws
    for b in range(3):
        for parent in set(tree.parents[b].tolist()):
            children = [int(t) for t, p in zip(tree.tokens[b, 1:], tree.parents[b, 1:], strict=True) if p == parent]
            assert len(set(children)) == len(children)


def test_shapes_that_throw_draws_away_are_refused() -> None:
    with pytest.raises(ValueError, match="DynamicTree keeps nodes by score, so its candidates must be fixed"):
        DynamicTree(2, 2, 4).require_drawable()
    with pytest.raises(ValueError, match=r"choices: \[0, 2\] stands without its sibling \[0, 1\]; drawn siblings must"):
        StaticTree([[0], [0, 0], [0, 2]]).require_drawable()
    with pytest.raises(ValueError, match=r"law.repetition_penalty must be 1 for a draft, got 1.3"):
        DrawnTree(Chain(2), SamplingLaw(1.0, repetition_penalty=1.3), 9)
    with pytest.raises(ValueError, match="choices use 3 ranks, the draft vocabulary has 2 tokens"):
        DrawnTree(StaticTree([[0], [1], [2]]), SamplingLaw(1.0), 9).check(2)
