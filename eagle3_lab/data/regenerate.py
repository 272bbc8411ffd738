"""The target answers prompts itself: continuous batching over the decoder's own session.

A head learns from the target's answers, so they are made here by the target that will be decoded, token by token
through the same adapter. Rows are independent: as soon as one ends, the next prompt takes its place. Every prompt draws
from a generator of its own, seeded by the run's seed and the prompt's number, so its draws do not depend on its
neighbours (its arithmetic does, in the last bits: a forward of 32 rows rounds unlike one of a single row).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle3_lab.errors import UserError
from eagle3_lab.target.adapter import HFSession, HFTarget
from eagle3_lab.types import PADDING, Needs, Tree

SETTLE_EVERY = 16  # steps between exact looks at the longest row; until then reads may span a bucket too many
BLOCK = 256  # tokens whose probabilities are summed together where one of them is drawn
SPAN = 16  # slots: a CPU reads this close to the longest row's end, since there no shape is recorded or compiled


@dataclass(frozen=True)
class Answer:
    """One answer: token ids, the end token included unless ``cut`` at the length limit."""

    index: int
    tokens: tuple[int, ...]
    cut: bool


@dataclass
class _Live:
    """A prompt being answered in one row of the session."""

    index: int
    tokens: list[int]
    generator: torch.Generator


def answers(
    target: HFTarget,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    rows: int = 32,
    seed: int = 0,
    skip: Collection[int] = (),
    top_p: float | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Answer every prompt, yielding each as it ends (not in order).

    Args:
        prompts: token ids up to and including the generation prompt, each non-empty.
        temperature: 0 is greedy; otherwise logits are divided by it.
        max_new_tokens: an answer that reaches it without an end token is cut.
        rows: prompts answered side by side.
        seed: with the prompt's index, the seed of that prompt's draws.
        skip: numbers of prompts to leave out, answered before; the others' draws do not change.
        top_p: tokens are drawn from the likeliest ones that together have this probability; None: from all.
        numbers: what stands for the prompts' indices in their seeds, where a call has only a part of all prompts.

    Raises:
        UserError: the target's logits are NaN.
    """
    asked = [i for i in range(len(prompts)) if i not in skip]
    waiting = deque(sorted(asked, key=lambda i: (len(prompts[i]), i)))
    rows = min(rows, len(asked))
    capacity = max((len(prompts[i]) for i in asked), default=1) + max_new_tokens + 1
    session = _open(target, rows, capacity)
    live: list[_Live | None] = [None] * rows
    token = torch.zeros(rows, dtype=torch.long, device=target.device)
    ends = set(target.spec.end_tokens)
    seeds = range(len(prompts)) if numbers is None else numbers
    step = 0
    while True:
        while waiting and (free := [row for row, one in enumerate(live) if one is None]):
            fresh = [_Live(i, [], _generator(seed, seeds[i])) for i in _next(waiting, len(free))]
            free = free[: len(fresh)]
            logits = _prefill(target, session, free, [prompts[one.index] for one in fresh])
            first = _draw(logits, temperature, fresh, top_p)
            token[free] = first
            for row, one, made in zip(free, fresh, first.tolist(), strict=True):
                live[row] = one
                if answer := _extend(one, made, ends, max_new_tokens):
                    live[row] = None
                    yield answer
        if not any(live):
            return
        active = torch.tensor([one is not None for one in live], device=target.device)
        logits = _step(session, token, active)
        token = _draw(logits, temperature, live, top_p)
        made = token.tolist()
        for row, one in enumerate(live):
            if one is not None and (answer := _extend(one, made[row], ends, max_new_tokens)):
                live[row] = None
                yield answer
        step += 1
        if step % SETTLE_EVERY == 0:
            _settle(session, active)


def hash_seed(seed: int, index: int) -> int:
    """One 63-bit seed for a pair; neighbours share no bits to speak of (SplitMix64's finaliser)."""
    x = (seed * 0x9E3779B97F4A7C15 + index + 1) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


def _open(target: HFTarget, rows: int, capacity: int) -> HFSession:
    session = target.open(rows, capacity, Needs(logits=True))
    if target.device.type == "cpu":
        session.cache.bucket = SPAN
    return session


# Inference mode is entered in here: on a generator it would last while its consumer runs, or not at all where a type
# checker has wrapped the generator.


@torch.inference_mode()
def _prefill(
    target: HFTarget, session: HFSession, rows: Sequence[int], prompts: Sequence[Sequence[int]]
) -> Float[Tensor, "n V"]:
    """Read n prompts in one forward and put their keys into ``rows``; the logits after each."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    beside = _open(target, len(prompts), ids.shape[1])
    logits = beside.prefill(ids.to(target.device), lengths.to(target.device)).logits[:, 0]
    for i, row in enumerate(rows):
        session.cache.adopt(row, beside.cache, i)
    return logits


@torch.inference_mode()
def _step(session: HFSession, token: Int[Tensor, " B"], active: Bool[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """One forward of one token a row; idle rows are scored and dropped."""
    zero = torch.zeros_like(token)
    token = token.clamp(min=0)  # where an idle row's logits are NaN
    tree = Tree(token[:, None], zero[:, None], torch.ones_like(token, dtype=torch.bool)[:, None])
    logits = session.score(tree).logits[:, 0]
    session.cache.advance(active.long(), bound=1)  # a single node lies where it belongs: nothing to move
    return logits


@torch.inference_mode()
def _settle(session: HFSession, active: Bool[Tensor, " B"]) -> None:
    """Empty the idle rows, so that they hold the view open no longer, and look at the longest row."""
    session.cache.lengths[~active] = 0
    session.cache.settle()


def _draw(
    logits: Float[Tensor, "B V"], temperature: float, live: Sequence[_Live | None], top_p: float | None = None
) -> Int[Tensor, " B"]:
    """The next token of every row, each from its own generator and never one of probability 0; PADDING where the logits
    are NaN."""
    if temperature == 0:
        best, index = logits.max(-1)  # which is NaN where any is
        return index.masked_fill(best.isnan(), PADDING)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probs = torch.softmax(wide / temperature, -1)
    if top_p is not None and top_p < 1:
        probs = _keep_top_p(probs, top_p)
    idle = torch.zeros(1, dtype=torch.float64)
    draws = [torch.rand(1, dtype=torch.float64, generator=one.generator) if one else idle for one in live]
    index, total = _pick(probs, torch.stack(draws).to(logits.device))
    lawful = probs.gather(1, index) > 0  # a sum of sums may lie an ulp beside the sum
    return torch.where(lawful, index, probs.argmax(-1, keepdim=True))[:, 0].masked_fill(total.isnan(), PADDING)


def _pick(probs: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> tuple[Int[Tensor, "B 1"], Float[Tensor, " B"]]:
    """The first token up to which the probabilities exceed ``uniform`` of their sum, and that sum, in float64.

    Summed by blocks first: running over a large vocabulary took half as long as a forward of many rows.
    """
    blocks = pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    aim = uniform * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp(max=upto.shape[-1] - 1)
    aim = aim - pad(upto, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    within = torch.searchsorted(inside, aim, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + within).clamp(max=probs.shape[-1] - 1), upto[:, -1]


def _keep_top_p(probs: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"]:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p (transformers' rule); the likeliest stays."""
    ascending, order = probs.sort(dim=-1, stable=True)
    drop = ascending.cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    return probs.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), 0.0)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash_seed(seed, number))


def _next(waiting: deque[int], count: int) -> list[int]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _extend(one: _Live, token: int, ends: set[int], limit: int) -> Answer | None:
    """Add a token; the finished answer, once it is one."""
    if token == PADDING:
        raise UserError(
            f"the target's logits are NaN at prompt {one.index}; if its dtype is float16, use bfloat16 or float32"
        )
    one.tokens.append(token)
    if token in ends:
        return Answer(one.index, tuple(one.tokens), cut=False)
    return Answer(one.index, tuple(one.tokens), cut=True) if len(one.tokens) == limit else None
