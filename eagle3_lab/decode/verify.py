"""Exact verification of a token tree: what is emitted follows the target's law p, whatever was proposed.

Two ways of judging, by what the tree says of its candidates. Both are free of host synchronisation and work on all B
rows at once. Randomness enters through :class:`Chance`, so that a test can walk every branch with its exact weight.

Fixed candidates (``tree.q`` None). The textbook rule: accept the candidate child x with probability p(x), else set p(x)
to 0, renormalise, judge the next; with none left, draw the bonus from what remains. Ours: draw y from p once per node;
if a candidate child carries y go there, else y is the bonus. The two are one law: by the textbook rule the k-th of
distinct children x1, x2, ... is accepted with (1 - p(x1) - ... - p(x(k-1))) * p(xk) / (1 - p(x1) - ... - p(x(k-1)))
= p(xk), which is the probability that y = xk, and the bonus is drawn from p without x1, x2, ..., which is the law of y
given that y is none of them. A node's y is used only if the walk comes there and is independent of the others', so all
can be drawn at once. With a one-hot p this is greedy matching.

Drawn candidates (``tree.q`` given). One scan in index order: a child x of the node reached is accepted with
min(1, p(x) / q(x)), else p becomes norm(max(p - q, 0)), and without replacement q loses x too. Every draw is judged,
repeated ones as well.
Source: Leviathan et al. 2023, appendix A.1 (one draft); Miao et al. 2023 (SpecInfer), algorithm 2 (several).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from eagle3_lab.interfaces import Verifier
from eagle3_lab.types import PADDING, Tree, Verdict


class Chance(ABC):
    """The two random acts of a verifier."""

    @abstractmethod
    def accept(self, prob: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """True with probability ``prob``; never at 0, always at 1."""

    @abstractmethod
    def pick(self, probs: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
        """An index drawn from the law proportional to ``probs``; never one of probability 0."""


class Uniforms(Chance):
    """Chance from uniforms in [0, 1) drawn beforehand, ``[B, K]``, used up column by column. How many a verdict takes
    depends on shapes alone, so one round's outcome never shifts the next round's stream."""

    def __init__(self, uniforms: Float[Tensor, "B K"]) -> None:
        self.uniforms = uniforms
        self.used = 0

    @classmethod
    def draw(cls, generators: Sequence[torch.Generator], count: int, device: torch.device) -> Uniforms:
        """``count`` float64 uniforms a row, row b's from ``generators[b]`` alone. Generators on the CPU give the same
        numbers whatever ``device`` is, and cost one small copy a round."""
        rows = [torch.rand(count, dtype=torch.float64, generator=g, device=g.device) for g in generators]
        return cls(torch.stack(rows).to(device, non_blocking=True))

    def accept(self, prob: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return self._next(1)[:, 0] < prob

    def pick(self, probs: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
        u = self._next(probs[0, ..., 0].numel()).reshape(probs.shape[:-1])
        return inverse_cdf(probs, u)

    def _next(self, count: int) -> Float[Tensor, "B count"]:
        taken = self.uniforms[:, self.used : self.used + count]
        assert taken.shape[1] == count, "fewer uniforms were drawn than this tree needs"
        self.used += count
        return taken


BLOCK = 128
"""Tokens whose probabilities are summed as one before any is looked at singly."""


def inverse_cdf(probs: Float[Tensor, "*rows V"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """The first index whose cumulated probability exceeds ``u`` times the whole mass; sums are taken in float64.

    First the block of tokens is found, then the token in it, so that no float64 copy of ``probs`` is made.
    A token of probability 0 is never named: where a parallel sum grows by an ulp over a zero, or u has been rounded
    up to 1, the likeliest token of the heaviest block stands in (weight about 1e-16).
    """
    short = -probs.shape[-1] % BLOCK
    blocks = (nn.functional.pad(probs, (0, short)) if short else probs).unflatten(-1, (-1, BLOCK))
    mass = blocks.sum(-1, dtype=torch.float64)
    cdf = mass.cumsum(-1)
    aim = u.double()[..., None] * cdf[..., -1:]
    block = torch.searchsorted(cdf, aim, right=True).clamp(max=cdf.shape[-1] - 1)
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp(min=0)), 0.0)
    found, weight = _within(blocks, block, lambda inner: _above(inner, aim - before))
    heaviest = mass.argmax(-1, keepdim=True)
    instead, _ = _within(blocks, heaviest, lambda inner: inner.argmax(-1, keepdim=True))
    return torch.where(weight > 0, found, instead)[..., 0]


def _within(
    blocks: Float[Tensor, "*rows blocks K"],
    block: Int[Tensor, "*rows one"],
    choose: Callable[[Tensor], Tensor],
) -> tuple[Int[Tensor, "*rows one"], Float[Tensor, "*rows one"]]:
    """The token that ``choose`` names in one block of every row, and its probability."""
    index = block[..., None].expand(*block.shape, blocks.shape[-1])
    inner = blocks.gather(-2, index)[..., 0, :]
    place = choose(inner)
    return block * blocks.shape[-1] + place, inner.gather(-1, place)


def _above(weights: Float[Tensor, "*rows K"], aim: Float[Tensor, "*rows one"]) -> Int[Tensor, "*rows one"]:
    """The first place at which the cumulated weights exceed ``aim``, the last one if none does."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, aim.contiguous(), right=True).clamp(max=weights.shape[-1] - 1)


class ExactVerifier(Verifier):
    """Lossless verification of fixed and of drawn candidates; see this module's docstring."""

    lossless = True

    def __call__(self, p: Float[Tensor, "B N V"], tree: Tree, generators: Sequence[torch.Generator]) -> Verdict:
        """The verdict. Takes N uniforms a row: one a node for fixed candidates; for drawn ones N - 1 to accept with
        and one for the bonus."""
        return judge(p, tree, Uniforms.draw(generators, tree.tokens.shape[1], p.device))

    def follow(self, choice: Int[Tensor, "B N"], tree: Tree) -> Verdict:
        """Greedy matching. Of drawn candidates too: p(x) is 0 or 1, so p / q refuses or accepts, and what a refusal
        leaves of p is p."""
        return follow(choice, tree)


def judge(p: Float[Tensor, "B N V"], tree: Tree, chance: Chance) -> Verdict:
    """The verdict on ``tree`` under the target's law ``p``, all randomness taken from ``chance``."""
    if tree.q is None:
        return _judge_fixed(p, tree, chance)
    return _judge_drawn(p, tree, tree.q, chance)


def _judge_fixed(p: Float[Tensor, "B N V"], tree: Tree, chance: Chance) -> Verdict:
    return follow(chance.pick(p), tree)


def follow(choice: Int[Tensor, "B N"], tree: Tree) -> Verdict:
    """The path along ``choice``, the target's own next token at every node."""
    nodes = tree.tokens.shape[1]
    if nodes == 1:  # a root alone, as in every round of vanilla: nothing to judge
        return Verdict(torch.zeros_like(choice), torch.zeros_like(choice[:, 0]), choice[:, 0])
    index = torch.arange(nodes, device=choice.device)
    child = tree.candidate & (tree.parents != PADDING) & (index > 0)
    twin = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
    repeated = (twin & child[:, None, :] & (index < index[:, None])).any(-1)  # a lower sibling carries the token
    chosen = child & ~repeated & (tree.tokens == choice.gather(1, tree.parents.clamp(min=0)))
    chosen[:, 0] = True
    walked = (chosen[:, None, :] | ~tree.visible()).all(-1) & (tree.parents != PADDING)  # it and all its ancestors
    last = torch.where(walked, index, 0).amax(-1, keepdim=True)
    return _verdict(walked, choice.gather(1, last)[:, 0])


def _judge_drawn(p: Float[Tensor, "B N V"], tree: Tree, q: Float[Tensor, "B N V"], chance: Chance) -> Verdict:
    """Per row: ``here`` the node reached, ``rest`` what is left of its p, ``law`` of its q (float64, mass 1).

    A child whose token has no mass left in q cannot have been drawn (a draft vocabulary drawn empty without
    replacement) and is not judged. If p - q leaves no mass, p equals q but for rounding and the refusal was rounding
    too: the child is accepted if p(x) > 0, else the walk stops and the bonus is drawn from p.
    """
    batch, nodes = tree.tokens.shape
    row = torch.arange(batch, device=p.device)
    here = torch.zeros(batch, dtype=torch.long, device=p.device)
    walking = torch.ones(batch, dtype=torch.bool, device=p.device)
    walked = [walking]
    rest, law = _normal(p[:, 0]), _normal(q[:, 0])
    for i in range(1, nodes):
        x = tree.tokens[:, i]
        q_x = law[row, x]
        judged = walking & tree.candidate[:, i] & (tree.parents[:, i] == here) & (q_x > 0)
        ratio = torch.where(judged, rest[row, x] / q_x, 0.0).clamp(max=1)
        left = (rest - law).clamp(min=0)
        refused = judged & ~chance.accept(ratio)
        spent = refused & (left.sum(-1) <= 0)
        lawful = p[row, here, x] > 0
        taken = judged & (~refused | (spent & lawful))
        stopped = spent & ~lawful
        refused = refused & ~spent

        rest = torch.where(refused[:, None], _normal(left), rest)
        rest = torch.where(stopped[:, None], _normal(p[row, here]), rest)
        rest = torch.where(taken[:, None], _normal(p[:, i]), rest)
        if not tree.replacement:
            without = law.scatter(1, x[:, None], 0.0)
            law = torch.where(refused[:, None], _normal(without), law)
        law = torch.where(taken[:, None], _normal(q[:, i]), law)
        here = torch.where(taken, i, here)
        walking = walking & ~stopped
        walked.append(taken)
    return _verdict(torch.stack(walked, dim=1), chance.pick(rest))


def _normal(weights: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Scaled to mass 1 in float64; all zeros stay zeros. q in half precision sums to 1 only roughly, yet what is drawn
    from it follows the scaled law."""
    weights = weights.double()
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0)


def _verdict(walked: Bool[Tensor, "B N"], bonus: Int[Tensor, " B"]) -> Verdict:
    """Indices rise along a path, so the walked nodes in index order are the path."""
    nodes = walked.shape[1]
    index = torch.arange(nodes, device=walked.device)
    path = torch.where(walked, index, nodes).sort(-1).values
    return Verdict(path.masked_fill(path == nodes, PADDING), walked.sum(-1) - 1, bonus)
