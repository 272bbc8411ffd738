"""The target answers prompts itself: continuous batching over the decoder's own session.

A head learns from the target's answers, so they are made here by the target that will be decoded, token by token
through the same adapter. Rows are independent: as soon as one ends, the next prompt takes its place. Every prompt draws
from a generator of its own, seeded by the run's seed and the prompt's number, so its draws do not depend on its
neighbours. Its arithmetic does, in the last bits: a forward of 32 rows rounds unlike one of a single row, and one that
reads 96 slots of keys unlike one that reads 112. These shapes follow from the lengths of prompts and answers, so a job
that was killed goes on with the same ones: answers that are known already hold their rows for as long as they took, and
forwards that only they would need are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab import seeds
from eagle3_lab.data.generation import session_steps
from eagle3_lab.decode.sampling import draw
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Target
from eagle3_lab.types import PADDING, Needs

ARITHMETIC = 2
"""Raised whenever the same prompts may be answered with other last bits than before; kept answers are keyed by it."""
SETTLE_EVERY = 16  # steps between exact looks at the longest row; until then reads may span a bucket too many
FORWARD, CPU_FORWARD = 256, 32
"""What one more forward costs, in tokens of a long one: until there are so many, reading the weights takes longer than
multiplying by them."""


@dataclass(frozen=True)
class Answer:
    """One answer: token ids, the end token included unless ``cut`` at the length limit."""

    index: int
    tokens: tuple[int, ...]
    cut: bool


@dataclass
class _Live:
    """A prompt being answered in one row of the session. ``known``: an answer of so many tokens is there already, and
    only its row is held."""

    index: int
    tokens: list[int]
    generator: torch.Generator
    known: int | None = None


def answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    rows: int = 32,
    seed: int = 0,
    turn: int = 0,
    known: Mapping[int, int] | None = None,
    top_p: float | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Answer every prompt, yielding each as it ends (not in order).

    Args:
        prompts: token ids up to and including the generation prompt, each non-empty.
        temperature: 0 is greedy; otherwise logits are divided by it.
        max_new_tokens: an answer that reaches it without an end token is cut.
        rows: prompts answered side by side.
        seed: with the turn and the prompt's index, the seed of that prompt's draws (`seeds.answer_seed`).
        turn: which turn of their conversations the prompts are, from 0.
        known: how many tokens, their ends included, the answers have that an earlier call with the same arguments gave.
            They are not made again, and every other answer comes out as it would with them, to the bit where a row of
            a forward does not depend on what stands in the others (true of every kernel used here).
        top_p: tokens are drawn from the likeliest ones that together have this probability; None: from all.
        numbers: what stands for the prompts' indices in their seeds, where a call has only a part of all prompts.

    Raises:
        UserError: the target's logits are NaN.
    """
    known = {} if known is None else known
    numbers = range(len(prompts)) if numbers is None else numbers
    waiting = deque(sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i)))
    side = _Side(target, prompts, min(rows, len(prompts)), max_new_tokens, temperature, top_p)
    left = len(prompts) - len(known)
    while left:
        if waiting and (free := side.free()):
            fresh = [
                _Live(i, [], seeds.generator(seeds.answer_seed(seed, turn, numbers[i])), known.get(i))
                for i in _next(waiting, len(free))
            ]
            made = side.read(free[: len(fresh)], fresh)
        else:
            made = side.step()
        left -= len(made)
        yield from made


class _Side:
    """The rows of a session, side by side: which prompt each answers, and its newest token."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        rows: int,
        limit: int,
        temperature: float,
        top_p: float | None,
    ) -> None:
        self._target, self._prompts, self._limit = target, prompts, limit
        self._temperature, self._top_p = temperature, top_p
        capacity = max(map(len, prompts), default=1) + limit + 1
        self._session = target.open(rows, capacity, Needs(logits=True))
        self._live: list[_Live | None] = [None] * rows
        self._token = torch.zeros(rows, dtype=torch.long, device=target.device)
        self._ends = set(target.spec.end_tokens)
        self._steps = 0

    def free(self) -> list[int]:
        """Rows that answer nothing."""
        return [row for row, one in enumerate(self._live) if one is None]

    def read(self, rows: Sequence[int], fresh: Sequence[_Live]) -> list[Answer]:
        """Read prompts, in order of length, into free rows; the answers that end with their first token."""
        cost = CPU_FORWARD if self._target.device.type == "cpu" else FORWARD
        finished, begin = [], 0
        for size in together([len(self._prompts[one.index]) for one in fresh], cost):
            into, some = rows[begin : begin + size], fresh[begin : begin + size]
            prompts = [self._prompts[one.index] for one in some]
            begin += size
            if all(one.known is not None for one in some):
                session_steps.hold(self._session, into, prompts)
            else:
                logits = session_steps.prefill(self._target, self._session, into, prompts)
                self._token[into] = self._draw(logits, some)
            for row, one in zip(into, some, strict=True):
                self._live[row] = one
            finished += self._hear(into)
        return finished

    def step(self) -> list[Answer]:
        """One token more for every row; the answers that end with it."""
        active = torch.tensor([one is not None for one in self._live], device=self._target.device)
        if any(one is not None and one.known is None for one in self._live):
            logits = session_steps.step(self._session, self._token, active)
            self._token = self._draw(logits, self._live)
        else:
            session_steps.skip(self._session, active)
        finished = self._hear(range(len(self._live)))
        self._steps += 1
        if self._steps % SETTLE_EVERY == 0:
            session_steps.settle(self._session, active)
        return finished

    def _draw(self, logits: Float[Tensor, "n V"], live: Sequence[_Live | None]) -> Int[Tensor, " n"]:
        drawing = [None if one is None or one.known is not None else one.generator for one in live]
        return draw(logits, self._temperature, drawing, self._top_p)

    def _hear(self, rows: Sequence[int]) -> list[Answer]:
        """Add these rows' newest tokens; a row whose answer is whole is free again."""
        token, finished = self._token.tolist(), []
        for row in rows:
            one = self._live[row]
            if one is None:
                continue
            one.tokens.append(token[row])
            if one.known is not None:
                if len(one.tokens) == one.known:
                    self._live[row] = None
            elif answer := _whole(one, self._ends, self._limit):
                self._live[row] = None
                finished.append(answer)
        return finished


def together(lengths: Sequence[int], forward: int) -> list[int]:
    """How many prompts to read in each forward, given their lengths in ascending order: the split whose tokens, padding
    included, are fewest when every forward counts as ``forward`` more.

        [10, 12, 90], 16: [2, 1], since 2 * 12 + 90 + 2 * 16 = 146 and 3 * 90 + 16 = 286
    """
    best, last = [0], [0]  # of the first n prompts: the cost, and the size of the last forward
    for n, longest in enumerate(lengths, 1):
        cost, size = min((best[n - size] + size * longest + forward, size) for size in range(1, n + 1))
        best.append(cost)
        last.append(size)
    sizes: list[int] = []
    left = len(lengths)
    while left:
        sizes.append(last[left])
        left -= last[left]
    return sizes[::-1]


def _next(waiting: deque[int], count: int) -> list[int]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _whole(one: _Live, ends: set[int], limit: int) -> Answer | None:
    """The finished answer, if its newest token makes it one."""
    token = one.tokens[-1]
    if token == PADDING:
        raise UserError(
            f"the target's logits are NaN at prompt {one.index}; if its dtype is float16, use bfloat16 or float32"
        )
    if token in ends:
        return Answer(one.index, tuple(one.tokens), cut=False)
    return Answer(one.index, tuple(one.tokens), cut=True) if len(one.tokens) == limit else None
