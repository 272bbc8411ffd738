"""The verifier: its law by enumeration of every branch in float64, its edges, and what it must never do.

The enumeration is exact: every draft that can be drawn, every accept or reject, every categorical outcome is a row of
one batch with its weight, and the weights of what comes out must be the target's law.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.trees import root_only
from eagle3_lab.decode.verify import Chance, ExactVerifier, Uniforms, inverse_cdf, judge
from eagle3_lab.types import PADDING, Tree

Path = tuple[int, ...]
EXACT = 1e-12


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Branches(Chance):
    """Takes prescribed outcomes, one set a row, and keeps each row's probability."""

    def __init__(self, bits: Tensor, picks: Tensor) -> None:
        self.bits, self.picks, self.used = bits, picks, 0
        self.weight = torch.ones(len(picks), dtype=torch.float64)

    def accept(self, prob: Tensor) -> Tensor:
        bit = self.bits[:, self.used]
        self.used += 1
        self.weight = self.weight * torch.where(bit, prob, 1 - prob)
        return bit

    def pick(self, probs: Tensor) -> Tensor:
        probs = probs / probs.sum(-1, keepdim=True)
        weight = probs.gather(-1, self.picks[..., None])[..., 0]
        self.weight = self.weight * weight.reshape(len(weight), -1).prod(-1)
        return self.picks


class PathLaw:
    """A law of the next token given the tokens after the root: any law, one for each path."""

    def __init__(self, seed: int, vocab: int, options: SamplingLaw, kept: Sequence[int] | None = None) -> None:
        self.seed, self.vocab, self.options, self.kept, self.known = seed, vocab, options, kept, {}

    def __call__(self, path: Path) -> Tensor:
        if path not in self.known:
            seed = self.seed + sum((token + 1) * 17**i for i, token in enumerate(path))
            logits = 1.5 * torch.randn(self.vocab, generator=seeded(seed), dtype=torch.float64)
            if self.kept is not None:  # a draft vocabulary: no mass elsewhere
                logits = torch.full_like(logits, -torch.inf).scatter(0, torch.tensor(self.kept), logits)
            root = root_only(torch.tensor([0]), 1)
            self.known[path] = self.options.probs(logits[None, None], torch.tensor([[-1]]), root)[0, 0]
        return self.known[path]

    def joint(self, depth: int) -> dict[Path, float]:
        """The law of the next ``depth`` tokens."""
        law: dict[Path, float] = {(): 1.0}
        for _ in range(depth):
            law = {(*path, x): w * p for path, w in law.items() for x, p in enumerate(self(path).tolist()) if p > 0}
        return law


@dataclass
class Shape:
    """A tree without its tokens."""

    parents: list[int]
    candidate: list[bool]

    def paths(self, tokens: Sequence[int]) -> list[Path]:
        """The tokens below the root of each node that has a token yet (padding: none)."""
        found: list[Path] = [()]
        for token, parent in zip(tokens[1:], self.parents[1:], strict=False):
            found.append(() if parent == PADDING else (*found[parent], token))
        return found

    @property
    def depth(self) -> int:
        return max(len(path) for path in self.paths(range(len(self.parents))))

    def tree(self, tokens: Tensor, q: Tensor | None, replacement: bool) -> Tree:
        rows = len(tokens)
        parents, candidate = torch.tensor(self.parents), torch.tensor(self.candidate)
        return Tree(tokens, parents.expand(rows, -1), candidate.expand(rows, -1), q, replacement)


def drafts(shape: Shape, q: PathLaw, replacement: bool) -> list[tuple[tuple[int, ...], float]]:
    """Every way of drawing the candidates, and its probability. Nodes that are not drawn carry token 0."""
    ways: list[tuple[tuple[int, ...], float]] = [((0,), 1.0)]
    for i, parent in enumerate(shape.parents[1:], start=1):
        drawn = shape.candidate[i] and parent != PADDING
        if not drawn:
            ways = [((*tokens, 0), w) for tokens, w in ways]
            continue
        elder = [j for j in range(1, i) if shape.parents[j] == parent and shape.candidate[j]]
        grown = []
        for tokens, w in ways:
            law = q(shape.paths(tokens)[parent]).clone()
            if not replacement:
                law[[tokens[j] for j in elder]] = 0
                if law.sum() <= 0:  # drawn empty: the place is filled with anything, and nobody may judge it
                    grown.append(((*tokens, 0), w))
                    continue
                law /= law.sum()
            grown += [((*tokens, x), w * v) for x, v in enumerate(law.tolist()) if v > 0]
        ways = grown
    return ways


def emitted_law(
    shape: Shape, p: PathLaw, q: PathLaw, replacement: bool, given: Sequence[int] | None
) -> dict[Path, float]:
    """The exact law of the first depth + 1 tokens that the verifier leads to; shorter rounds go on as vanilla would.
    ``given`` are fixed candidates; None: they are drawn from q."""
    ways = [((0, *given), 1.0)] if given is not None else drafts(shape, q, replacement)
    q_rows = None
    if given is None:
        q_rows = torch.stack([torch.stack([q(path) for path in shape.paths(way)]) for way, _ in ways])
    tokens, weights = torch.tensor([way for way, _ in ways]), torch.tensor([w for _, w in ways], dtype=torch.float64)
    return judged_law(shape.tree(tokens, q_rows, replacement), weights, p)


def judged_law(tree: Tree, weights: Tensor, p: PathLaw) -> dict[Path, float]:
    """The same for trees of one shape, one a row, each proposed with its weight."""
    shape = Shape(tree.parents[0].tolist(), tree.candidate[0].tolist())
    nodes, ways = len(shape.parents), len(weights)
    if tree.q is None:
        picks = torch.tensor(list(itertools.product(range(p.vocab), repeat=nodes)))
        bits = torch.zeros(len(picks), 0, dtype=torch.bool)
    else:
        outcomes = itertools.product(*[(False, True)] * (nodes - 1), range(p.vocab))
        table = torch.tensor([list(map(int, outcome)) for outcome in outcomes])
        bits, picks = table[:, :-1].bool(), table[:, -1]
    branches = len(picks)
    tokens = tree.tokens.repeat_interleave(branches, 0)
    paths = [shape.paths(way) for way in tree.tokens.tolist()]
    p_rows = torch.stack([torch.stack([p(path) for path in row]) for row in paths]).repeat_interleave(branches, 0)
    q_rows = None if tree.q is None else tree.q.repeat_interleave(branches, 0)
    chance = Branches(bits.repeat(ways, 1), picks.repeat(ways, *[1] * (picks.dim() - 1)))
    verdict = judge(p_rows, shape.tree(tokens, q_rows, tree.replacement), chance)
    weight = chance.weight * weights.repeat_interleave(branches)

    came: dict[Path, float] = {}
    walked = tokens.gather(1, verdict.path.clamp(min=0))
    happened = weight > 0
    rows = zip(*(x[happened].tolist() for x in (walked, verdict.length, verdict.bonus, weight)), strict=True)
    for row, length, bonus, w in rows:
        text = (*row[1 : length + 1], bonus)
        came[text] = came.get(text, 0.0) + w
    law: dict[Path, float] = {}
    while came:
        text, w = came.popitem()
        if len(text) == shape.depth + 1:
            law[text] = law.get(text, 0.0) + w
            continue
        for x, v in enumerate(p(text).tolist()):
            if v > 0:
                came[(*text, x)] = came.get((*text, x), 0.0) + w * v
    return law


def total_variation(a: dict[Path, float], b: dict[Path, float]) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


SHAPES = {
    "root alone": Shape([0], [True]),
    "chain of three": Shape([0, 0, 1, 2], [True] * 4),
    "three siblings": Shape([0, 0, 0, 0], [True] * 4),
    "two levels": Shape([0, 0, 0, 1, 1, 2], [True] * 6),
    "two levels, depth first": Shape([0, 0, 1, 1, 0, 4], [True] * 6),
    "padding and riders between": Shape([0, -1, 0, 0, 2, 2], [True, False, True, False, True, True]),
    "a candidate below a rider": Shape([0, 0, 1, 0], [True, False, True, True]),
}
LAWS = {
    "temperature 1": SamplingLaw(1.0),
    "sharp, top-k 2": SamplingLaw(0.4, top_k=2),
    "top-p": SamplingLaw(0.8, top_p=0.7),
    "greedy": SamplingLaw(0.0),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_candidates_leave_the_target_law_exact(shape: str, law: str) -> None:
    tree = SHAPES[shape]
    full, narrow, filtered = (SamplingLaw(1.0), None), (SamplingLaw(1.5), (0, 2)), (SamplingLaw(1.0, top_k=2), None)
    for replacement, (options, kept) in ((True, full), (False, full), (True, filtered), (False, narrow)):
        p, q = PathLaw(11, 3, LAWS[law]), PathLaw(23, 3, options, kept)
        came = emitted_law(tree, p, q, replacement, given=None)
        assert abs(sum(came.values()) - 1) < EXACT
        assert total_variation(came, p.joint(tree.depth + 1)) < EXACT


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_candidates_leave_the_target_law_exact(shape: str, law: str) -> None:
    tree = SHAPES[shape]
    p = PathLaw(5, 3, LAWS[law])
    for seed in range(2):  # three tokens on up to six nodes: siblings repeat
        given = torch.randint(3, (len(tree.parents) - 1,), generator=seeded(seed)).tolist()
        came = emitted_law(tree, p, p, True, given)
        assert abs(sum(came.values()) - 1) < EXACT
        assert total_variation(came, p.joint(tree.depth + 1)) < EXACT


def test_fixed_candidates_are_accepted_as_by_zeroing_and_renormalising() -> None:
    # p = .5 .3 .15 .05, candidates 3 then 2: 3 with .05; else 2 with .95 * .15 / .95 = .15; else 0 and 1 as 5 to 3
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    picks = torch.tensor(list(itertools.product(range(4), repeat=3)))
    chance = Branches(torch.zeros(64, 0, dtype=torch.bool), picks)
    verdict = judge(
        p.expand(64, 3, 4), Shape([0, 0, 0], [True] * 3).tree(torch.tensor([[0, 3, 2]] * 64), None, True), chance
    )
    first = torch.where(verdict.length > 0, verdict.path[:, 1], 0)
    weight = torch.zeros(3, dtype=torch.float64).index_add(0, first, chance.weight)
    torch.testing.assert_close(weight, torch.tensor([0.8, 0.05, 0.15], dtype=torch.float64))


def test_the_path_names_nodes_root_first_and_the_lowest_of_equal_siblings() -> None:
    #  root - 1:a, 2:b, 3:b - 5:c, and 2 - 4:c        b is at nodes 2 and 3: the walk takes 2, then 4
    tree = Shape([0, 0, 0, 0, 2, 3], [True] * 6).tree(torch.tensor([[9, 1, 2, 2, 3, 3]]), None, True)
    chance = Branches(torch.zeros(1, 0, dtype=torch.bool), torch.tensor([[2, 0, 3, 3, 0, 1]]))
    verdict = judge(torch.full((1, 6, 10), 0.1), tree, chance)
    assert verdict.path.tolist() == [[0, 2, 4, -1, -1, -1]]
    assert (verdict.length.tolist(), verdict.bonus.tolist()) == ([2], [0])


def test_what_is_no_candidate_is_never_accepted_though_the_target_agrees() -> None:
    #  root - 1:a (rider) - 2:b (rider), 3:b; root - 4:a (padding); root - 5:a: the walk is 0, 5
    tree = Shape([0, 0, 1, 1, -1, 0], [True, False, False, True, False, True])
    tokens = torch.tensor([[9, 1, 2, 2, 1, 1]])
    chance = Branches(torch.zeros(1, 0, dtype=torch.bool), torch.tensor([[1, 2, 0, 0, 0, 7]]))
    verdict = judge(torch.full((1, 6, 10), 0.1), tree.tree(tokens, None, True), chance)
    assert verdict.path.tolist() == [[0, 5, -1, -1, -1, -1]]
    assert verdict.bonus.tolist() == [7]
    q = torch.full((1, 6, 10), 0.1)
    drawn = judge(q, tree.tree(tokens, q, True), Branches(torch.ones(1, 5, dtype=torch.bool), torch.tensor([7])))
    assert drawn.path.tolist() == [[0, 5, -1, -1, -1, -1]]


def test_the_roots_own_token_is_not_taken_for_a_sibling() -> None:
    tree = Shape([0, 0], [True, True]).tree(torch.tensor([[3, 3]]), None, True)
    chance = Branches(torch.zeros(1, 0, dtype=torch.bool), torch.tensor([[3, 1]]))
    assert judge(torch.full((1, 2, 4), 0.25), tree, chance).path.tolist() == [[0, 1]]


# ------------------------------------------------------------------------------------------ one step, published numbers

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.05, 0.15, 0.3, 0.5], dtype=torch.float64)
NOISE = 0.006


def one_step(drawn_from: Tensor, judged_with: Tensor) -> Tensor:
    """Exact law of the first token after one draft drawn from one law and judged, by our verifier, with another."""
    table = torch.tensor(list(itertools.product(range(4), (0, 1), range(4))))
    rows = len(table)
    tree = Shape([0, 0], [True, True]).tree(
        torch.stack((torch.zeros(rows, dtype=torch.long), table[:, 0]), 1), judged_with.expand(rows, 2, 4), True
    )
    chance = Branches(table[:, 1:2].bool(), table[:, 2])
    verdict = judge(P.expand(rows, 2, 4), tree, chance)
    first = torch.where(verdict.length > 0, table[:, 0], verdict.bonus)
    return torch.zeros(4, dtype=torch.float64).index_add(0, first, drawn_from[table[:, 0]] * chance.weight)


def distance(law: Tensor) -> float:
    return 0.5 * (law - P).abs().sum().item()


def test_a_draft_judged_with_the_law_it_was_drawn_from_gives_exactly_p() -> None:
    assert distance(one_step(Q, Q)) < EXACT


def test_the_known_mistakes_would_be_seen() -> None:
    """Each mistake's exact law, and that it lies far outside the noise of the 200,000 draws below."""
    accept = (P / Q).clamp(max=1)
    residual_left = Q * accept + (1 - (Q * accept).sum()) * P
    sharper = Q**2 / (Q**2).sum()
    mistakes = {
        "residual left as p": (residual_left, [0.35, 0.33, 0.24, 0.08], 0.150),
        "drawn at T = .5, judged at T = 1": (one_step(sharper, Q), [0.562, 0.247, 0.123, 0.069], 0.080),
        "arg-max draft judged with the softmax": (
            one_step(torch.tensor([0.0, 0, 0, 1], dtype=torch.float64), Q), [0.675, 0.225, 0, 0.1], 0.225,
        ),
        "rejected sibling not removed": (
            torch.tensor([0.0, 0, 0.95 * 0.15, 0.05], dtype=torch.float64) + 0.95 * 0.85 * P,
            [0.404, 0.242, 0.264, 0.090], 0.154,
        ),
    }  # fmt: skip
    for law, published, tv in mistakes.values():
        assert law.tolist() == pytest.approx(published, abs=6e-4)
        assert distance(law) == pytest.approx(tv, abs=6e-4)
        assert (law - P).abs().max() > 10 * NOISE


@pytest.mark.parametrize("kind", ["drawn", "fixed 3 then 2", "drawn twice without replacement"])
def test_two_hundred_thousand_draws_follow_p(kind: str) -> None:
    rows = 200_000
    if kind == "drawn":
        x = torch.multinomial(Q, rows, replacement=True, generator=seeded(1))[:, None]
    elif kind == "fixed 3 then 2":
        x = torch.tensor([[3, 2]]).expand(rows, -1)
    else:
        x = torch.multinomial(Q.expand(rows, -1), 2, replacement=False, generator=seeded(1))
    nodes = x.shape[1] + 1
    tokens = torch.cat((torch.zeros(rows, 1, dtype=torch.long), x), 1)
    q = None if kind.startswith("fixed") else Q.expand(rows, nodes, 4)
    tree = Shape([0] * nodes, [True] * nodes).tree(tokens, q, kind == "drawn")
    uniforms = torch.rand(rows, nodes, dtype=torch.float64, generator=seeded(2))
    verdict = judge(P.expand(rows, nodes, 4), tree, Uniforms(uniforms))
    last = tokens.gather(1, verdict.path[:, 1:2].clamp(min=0))[:, 0]
    first = torch.where(verdict.length > 0, last, verdict.bonus)
    assert (first.bincount(minlength=4) / rows - P).abs().max() < NOISE


# ------------------------------------------------------------------------------------------------------------ the edges


def test_inverse_cdf_by_hand() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.9999])
    assert inverse_cdf(probs.expand(4, -1), u).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_token_of_probability_zero_is_never_drawn(dtype: torch.dtype) -> None:
    generator = seeded(0)
    logits = 4 * torch.randn(3000, 50, generator=generator)
    logits[torch.rand(3000, 50, generator=generator) < 0.7] = -torch.inf
    logits[:, 7] = 0
    probs = logits.softmax(-1).to(dtype)
    for u in (0.0, 5e-324, 0.5, 1 - 2**-24, 1 - 2**-53, 1.0):
        index = inverse_cdf(probs, torch.full((3000,), u, dtype=torch.float64))
        assert (probs.gather(1, index[:, None]) > 0).all()


@pytest.mark.parametrize("vocab", [127, 128, 129, 1000])
def test_draws_by_blocks_are_those_of_one_long_sum(vocab: int) -> None:
    """Blocks are a way of summing: 5,000 draws, each of which a sum over the whole vocabulary gives too."""
    probs = (4 * torch.randn(20, vocab, generator=seeded(1))).softmax(-1)
    u = torch.rand(20, 250, dtype=torch.float64, generator=seeded(2))
    cdf = probs.cumsum(-1, dtype=torch.float64)
    whole = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)
    drawn = torch.stack([inverse_cdf(probs, u[:, i]) for i in range(250)], dim=1)
    assert drawn.equal(whole)
    assert len(drawn.unique()) > 60


def test_a_one_hot_law_is_drawn_whatever_the_uniform() -> None:
    probs = torch.eye(6)
    for u in (0.0, 0.5, 1 - 2**-53, 1.0):
        assert inverse_cdf(probs, torch.full((6,), u, dtype=torch.float64)).tolist() == list(range(6))


class Refusing(Chance):
    def accept(self, prob: Tensor) -> Tensor:
        return torch.zeros_like(prob, dtype=torch.bool)

    def pick(self, probs: Tensor) -> Tensor:
        self.left = probs
        return probs.argmax(-1)


def test_a_refusal_without_residual_was_rounding_and_accepts_a_lawful_token() -> None:
    p = torch.tensor([0.5, 0.5, 0.0]).double()
    tree = Shape([0, 0], [True, True]).tree(torch.tensor([[0, 1]]), p.expand(1, 2, 3), True)
    verdict = judge(p.expand(1, 2, 3), tree, Refusing())
    assert verdict.length.tolist() == [1]


def test_a_refusal_without_residual_of_an_unlawful_token_draws_the_bonus_from_p() -> None:
    p = torch.tensor([0.25, 0.75, 0.0]).double()
    q = torch.tensor([0.25, 0.75, 1e-20]).double()
    tree = Shape([0, 0, 0], [True] * 3).tree(torch.tensor([[0, 2, 1]]), q.expand(1, 3, 3), True)
    chance = Refusing()
    verdict = judge(p.expand(1, 3, 3), tree, chance)
    assert (verdict.length.tolist(), verdict.bonus.tolist()) == ([0], [1])
    assert chance.left.tolist() == [p.tolist()]


def test_a_law_in_half_precision_is_judged_as_the_law_that_was_drawn_from() -> None:
    # bfloat16 sums to 1 only roughly; what multinomial draws from it is the scaled law
    q = torch.tensor([0.1, 0.2, 0.3, 0.37]).bfloat16()
    scaled = q.double() / q.double().sum()
    assert abs(q.double().sum() - 1) > 1e-3
    assert distance(one_step(scaled, q)) < EXACT


def test_a_verdict_takes_the_same_number_of_uniforms_whatever_happens() -> None:
    after = set()
    for seed in range(8):
        logits = torch.randn(1, 5, 3, generator=seeded(seed))
        for q in (None, logits.roll(1, -1).softmax(-1)):
            generator = seeded(99)
            tree = Shape([0, 0, 0, 1, 1], [True] * 5).tree(torch.tensor([[0, 1, 2, 0, 1]]), q, True)
            ExactVerifier()(logits.softmax(-1), tree, [generator])
            after.add(torch.rand(1, generator=generator).item())
    assert len(after) == 1


@pytest.mark.parametrize("drawn", [False, True])
def test_a_row_is_judged_as_if_it_were_alone(drawn: bool) -> None:
    rows, nodes = 20, 6
    p = torch.randn(rows, nodes, 4, generator=seeded(1)).softmax(-1)
    q = torch.randn(rows, nodes, 4, generator=seeded(2)).softmax(-1) if drawn else None
    tokens = torch.randint(4, (rows, nodes), generator=seeded(3))
    tree = Shape([0, 0, 0, 1, 1, 2], [True] * nodes).tree(tokens, q, True)
    together = ExactVerifier()(p, tree, [seeded(b) for b in range(rows)])
    assert len(set(together.length.tolist())) > 1
    for b in range(rows):
        one = Tree(
            tokens[b : b + 1], tree.parents[b : b + 1], tree.candidate[b : b + 1], None if q is None else q[b : b + 1]
        )
        alone = ExactVerifier()(p[b : b + 1], one, [seeded(b)])
        for name in ("path", "length", "bonus"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b])


def test_uniforms_are_drawn_from_each_rows_own_generator() -> None:
    both = Uniforms.draw([seeded(1), seeded(2)], 3, torch.device("cpu")).uniforms
    assert torch.equal(both[1], Uniforms.draw([seeded(2)], 3, torch.device("cpu")).uniforms[0])
    assert ((both >= 0) & (both < 1)).all()
