"""Measuring methods by decoding: the same target, the same prompts, one process, vanilla interleaved.

Every method answers every prompt, turn by turn, in an order that rotates from prompt to prompt, so that a machine that
slows down slows all of them. A short answer of each method warms it up outside the clock. Seconds are wall time of
decoding (prefill included), device synchronised; making the draft's tokens is part of it, reading text is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.tasks import Prompt, Task
from eagle3_lab.decode.clock import Stopwatch
from eagle3_lab.decode.law import SamplingLaw
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.methods import Head, Method, Vanilla
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.types import Decoded, Law, Needs, Proposer, Verifier

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Evaluation:
    """What is measured, by which methods.

    Args:
        tasks: where the prompts come from.
        methods: name -> method; plain decoding always runs beside them, as ``vanilla``.
        max_new_tokens: longest answer, a turn.
        law: penalties, temperature and filters, the same for every method; null is greedy.
        other_dtype: also run vanilla in this dtype, for the fastest baseline; null: not.
        seed: of the draws at temperature > 0.
    """

    tasks: list[Task]
    methods: dict[str, Method]
    max_new_tokens: int = 128
    law: Law | None = None
    other_dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"evaluate.max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if VANILLA in self.methods:
            raise ValueError(f"evaluate.methods: {VANILLA!r} always runs; leave it out")
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"evaluate.tasks must be at least one, each of a name of its own, got {names}")


VANILLA = "vanilla"


@dataclass(frozen=True)
class Contestant:
    """One line of the table while it is measured: a method on a target."""

    name: str
    method: Method
    target: HFTarget
    head: Head | None = None


@dataclass(frozen=True)
class Turn:
    """One answered turn: which task and prompt, what was decoded, and how long decoding took, in seconds of wall
    time."""

    task: str
    prompt: str
    turn: int
    decoded: Decoded
    seconds: float


def measure(
    contestants: Sequence[Contestant],
    evaluation: Evaluation,
    held_out: Sequence[Prompt] | None,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> dict[str, list[Turn]]:
    """Let every contestant answer every prompt; the turns of each by its name, in one order.

    Raises:
        UserError: a prompt longer than the context, a task that cannot be read, a method without its head.
    """
    players = {c.name: _Player(c, evaluation) for c in contestants}
    asked = _asked(evaluation, held_out)
    for player in players.values():
        player.warm_up(*asked[0])
    turns: dict[str, list[Turn]] = {name: [] for name in players}
    for i, (task, prompt) in enumerate(asked):
        names = list(players)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            for turn in players[name].answer(task, prompt, evaluation.seed + i):
                turns[name].append(turn)
                on_turn(turn)
    return turns


def check(evaluation: Evaluation, target: HFTarget, head: Head, held_out: Sequence[Prompt] | None) -> None:
    """Refuse what `measure` would refuse, as far as it can be known before ``head`` is trained.

    Raises:
        UserError: a task that cannot be read, a first turn longer than the context, a tree that does not fit the head.
    """
    for name, method in evaluation.methods.items():
        if method.needs_head:
            _Player(Contestant(name, method, target, head), evaluation)
    vanilla = _Player(Contestant(VANILLA, Vanilla(), target), evaluation)
    for task, prompt in _asked(evaluation, held_out):
        vanilla.ids(task, prompt)


def count_turns(evaluation: Evaluation, held_out: Sequence[Prompt] | None) -> int:
    """How many turns one contestant answers."""
    return sum(len(prompt.turns) for _, prompt in _asked(evaluation, held_out))


def _asked(evaluation: Evaluation, held_out: Sequence[Prompt] | None) -> list[tuple[str, Prompt]]:
    return [(task.name, prompt) for task in evaluation.tasks for prompt in task.prompts(held_out)]


class _Player:
    """A contestant with its proposer made, and the chat of its target."""

    def __init__(self, contestant: Contestant, evaluation: Evaluation) -> None:
        self._target = contestant.target
        try:
            self._proposer: Proposer = contestant.method.proposer(self._target.spec, contestant.head)
        except ValueError as error:
            raise UserError(f"evaluate.methods.{contestant.name}: {error}") from None
        self._chat = Chat(self._target.tokenizer)
        self._verifier: Verifier = ExactVerifier()
        self._law = evaluation.law or SamplingLaw()
        self._evaluation = evaluation

    def ids(self, task: str, prompt: Prompt, said: Sequence[str] = ()) -> list[int]:
        """The prompt behind the answers it has so far. Raises UserError where that fills the context."""
        ids, room = self._chat.prompt_ids(prompt.messages(said)), self._target.spec.max_positions
        if len(ids) >= room:
            raise UserError(
                f"task {task}: turn {len(said)} of prompt {prompt.id} has {len(ids)} tokens, which leaves no room for "
                f"an answer in {self._target.spec.name}'s context of {room}; leave the prompt out"
            )
        return ids

    def warm_up(self, task: str, prompt: Prompt) -> None:
        """One short answer, for memory, caches and lazy kernels."""
        self._decode(self.ids(task, prompt), WARM_UP_TOKENS, seed=0)

    def answer(self, task: str, prompt: Prompt, seed: int) -> list[Turn]:
        """All turns of one prompt; the method's own earlier answers are its context."""
        said: list[str] = []
        turns = []
        for number in range(len(prompt.turns)):
            ids = self.ids(task, prompt, said)
            decoded, seconds = self._decode(ids, self._evaluation.max_new_tokens, seed)
            turns.append(Turn(task, prompt.id, number, decoded, seconds))
            said.append(self._text(decoded))
        return turns

    def _decode(self, ids: Sequence[int], limit: int, seed: int) -> tuple[Decoded, float]:
        spec, device = self._target.spec, self._target.device
        limit = min(limit, self._evaluation.max_new_tokens)
        capacity = len(ids) + limit + self._proposer.nodes + 1
        session = self._target.open(1, capacity, self._proposer.needs | Needs(logits=True))
        watch = Stopwatch(device)
        began = time.perf_counter()
        (decoded,) = decode(
            session,
            self._proposer,
            self._law,
            self._verifier,
            torch.tensor([list(ids)], device=device),
            torch.tensor([len(ids)], device=device),
            max_new_tokens=limit,
            end_tokens=spec.end_tokens,
            context_limit=spec.max_positions,
            generators=[torch.Generator().manual_seed(seed)],
            clock=watch,
        )
        return decoded, time.perf_counter() - began

    def _text(self, decoded: Decoded) -> str:
        ends = self._target.spec.end_tokens
        tokens = [t for t in decoded.tokens if t not in ends]
        text = self._target.tokenizer.decode(tokens)
        assert isinstance(text, str)
        return text
