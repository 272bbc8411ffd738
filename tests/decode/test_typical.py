"""Typical acceptance, by hand: which path is kept, what the bonus may be, and where it is greedy matching."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle3_lab.decode.typical import TypicalVerifier
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.types import PADDING, Tree


def seeded(seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed)]


def tree(tokens: list[int], parents: list[int]) -> Tree:
    candidate = torch.tensor([[parent != PADDING for parent in parents]])
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), candidate)


# Node 0 and its children 1 (token 1) and 2 (token 2); 3 (token 0) below 2. Four tokens.
PARENTS, TOKENS = [0, 0, 0, 2], [3, 1, 2, 0]


def laws(root: list[float], second: list[float]) -> Tensor:
    even = [0.25] * 4
    return torch.tensor([[root, even, second, even]])


def test_the_longest_plausible_path_is_kept_though_the_target_would_rather_say_otherwise() -> None:
    # H of the root's law is 0.94: exp(-H) = 0.39, the threshold min(0.09, 0.117) = 0.09
    p = laws([0.2, 0.6, 0.1, 0.1], [0.2, 0.8, 0.0, 0.0])
    verdict = TypicalVerifier()(p, tree(TOKENS, PARENTS), seeded())
    assert verdict.path.tolist() == [[0, 2, 3, PADDING]]
    assert verdict.length.tolist() == [2]


def test_what_the_threshold_forbids_is_not_kept() -> None:
    p = laws([0.21, 0.6, 0.09, 0.1], [0.2, 0.8, 0.0, 0.0])
    verdict = TypicalVerifier(epsilon=0.09)(p, tree(TOKENS, PARENTS), seeded())
    assert verdict.path.tolist() == [[0, 1, PADDING, PADDING]]
    # without epsilon's mercy the entropy alone decides: 0.1 lies below 0.3 exp(-H) = 0.101
    p = laws([0.2, 0.6, 0.1, 0.1], [0.2, 0.8, 0.0, 0.0])
    entropy = -sum(x * math.log(x) for x in (0.2, 0.6, 0.1, 0.1))
    assert 0.1 < 0.3 * math.exp(-entropy)
    verdict = TypicalVerifier(epsilon=1.0)(p, tree(TOKENS, PARENTS), seeded())
    assert verdict.path.tolist() == [[0, 1, PADDING, PADDING]]


def test_of_two_paths_as_long_the_likelier_is_kept() -> None:
    p = laws([0.0, 0.4, 0.6, 0.0], [0.0, 1.0, 0.0, 0.0])
    verdict = TypicalVerifier()(p, tree(TOKENS, PARENTS), seeded())
    assert verdict.path.tolist() == [[0, 2, PADDING, PADDING]]


def test_the_bonus_is_drawn_from_the_plausible_part_alone() -> None:
    p = laws([0.5, 0.0, 0.45, 0.05], [0.0] * 4)
    nothing = tree([3, 1], [0, 0])
    seen = [0, 0, 0, 0]
    for seed in range(2000):
        seen[int(TypicalVerifier()(p[:, :2], nothing, seeded(seed)).bonus)] += 1
    assert seen[3] == 0  # 0.05 is below min(0.09, 0.3 exp(-0.86))
    assert abs(seen[0] / 2000 - 0.5 / 0.95) < 4 * math.sqrt(0.25 / 2000)


def test_at_temperature_zero_it_is_exact_matching_on_random_trees() -> None:
    draw = torch.Generator().manual_seed(3)
    for _ in range(200):
        parents = [0] + [int(torch.randint(i, (1,), generator=draw)) for i in range(1, 7)] + [PADDING]
        tokens = [parents[1 : i + 1].count(parent) for i, parent in enumerate(parents)]  # siblings differ, as in a trie
        choice = torch.randint(1, 4, (8,), generator=draw)
        p = torch.nn.functional.one_hot(choice, 8).double()[None]
        kept = TypicalVerifier()(p, tree(tokens, parents), seeded())
        told = ExactVerifier()(p, tree(tokens, parents), seeded())
        assert kept.length.tolist() == told.length.tolist()
        assert kept.bonus.tolist() == told.bonus.tolist()


def test_every_row_of_a_batch_is_its_own_verdict() -> None:
    one = laws([0.2, 0.6, 0.1, 0.1], [0.2, 0.8, 0.0, 0.0])
    other = laws([0.0, 0.4, 0.6, 0.0], [0.0, 1.0, 0.0, 0.0])
    single = tree(TOKENS, PARENTS)
    both = Tree(*(torch.cat((x, x)) for x in (single.tokens, single.parents, single.candidate)))
    verdict = TypicalVerifier()(torch.cat((one, other)), both, seeded(0) + seeded(1))
    assert verdict.path.tolist() == [[0, 2, 3, PADDING], [0, 2, PADDING, PADDING]]


def test_it_says_that_it_is_lossy_and_refuses_what_it_cannot_judge() -> None:
    assert not TypicalVerifier().lossless
    for name in ("epsilon", "alpha"):
        with pytest.raises(ValueError, match=rf"verifier.{name} must be in \(0, 1\], got 0"):
            TypicalVerifier(**{name: 0.0})
    fixed = tree([3, 1], [0, 0])
    drawn = Tree(fixed.tokens, fixed.parents, fixed.candidate, q=torch.ones(1, 2, 4) / 4)
    with pytest.raises(ValueError, match="drawn"):
        TypicalVerifier()(torch.ones(1, 2, 4) / 4, drawn, seeded())
