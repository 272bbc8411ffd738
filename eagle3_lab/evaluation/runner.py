"""Measuring methods by decoding: the same target, the same prompts, one process, vanilla interleaved.

Every method answers every prompt under every law, turn by turn, in an order that rotates from prompt to prompt, so that
a machine that slows down slows all of them. A short answer of each method under each law warms it up outside the clock,
and an answer in which something was recorded to be replayed is given and timed again.
Seconds are wall time of decoding (prefill included), device synchronised; making the draft's tokens is part of it,
reading text is not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eagle3_lab import seeds
from eagle3_lab.backend.cuda_graphs import settled
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.tasks import Prompt, Task
from eagle3_lab.decode.loop import decode, room
from eagle3_lab.decode.methods import Head, Method, Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.timing import Stopwatch
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.answer_log import AnswerLog, Answers, Place, Turn
from eagle3_lab.interfaces import Law, Proposer, Verifier
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Decoded, Needs, require_dtype

WARM_UP_TOKENS = 8
NAME = re.compile(r"\w[\w. -]*")  # a part of a metric's name in the run store
MEAN = "mean"
VANILLA = "vanilla"


@dataclass(frozen=True)
class Evaluation:
    """What is measured, by which methods.

    Args:
        tasks: where the prompts come from.
        methods: name -> method; plain decoding always runs beside them, as ``vanilla``.
        max_new_tokens: longest answer, a turn.
        laws: name -> penalties, temperature and filters, the same for every method; each is measured on every task;
            null is greedy alone, as ``T0``.
        other_dtype: also run vanilla in this dtype, for the fastest baseline; null: not.
        seed: of the draws at temperature > 0: each law, task, prompt and turn has a stream of its own, which all
            methods share.
    """

    tasks: list[Task]
    methods: dict[str, Method]
    max_new_tokens: int = 128
    laws: dict[str, Law] | None = None
    other_dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"evaluate.max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"evaluate.seed must be within 0 .. 2**63 - 1, got {self.seed}")
        if self.other_dtype is not None:
            require_dtype("evaluate.other_dtype", self.other_dtype)
        self._require_parts()

    def _require_parts(self) -> None:
        """Raises ValueError for tasks, laws or methods of names that no table could show."""
        for name in self.methods:
            if name.split()[:1] == [VANILLA]:
                raise ValueError(
                    f"evaluate.methods: {name!r}: {VANILLA} always runs; leave it out, or choose another name"
                )
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"evaluate.tasks must be at least one, each of a name of its own, got {names}")
        if MEAN in names:
            raise ValueError(f"evaluate.tasks: {MEAN!r} is the mean over tasks in every table; choose another name")
        if self.laws is not None and not self.laws:
            raise ValueError("evaluate.laws must be at least one, by name, or null, got none")
        for key, found in (("tasks", names), ("laws", self.by_law), ("methods", self.methods)):
            _require_names(key, found)

    @property
    def by_law(self) -> dict[str, Law]:
        """The laws by name, the default's included."""
        return {"T0": SamplingLaw()} if self.laws is None else self.laws


def _require_names(key: str, names: Iterable[str]) -> None:
    """Told when the YAML is read, not by the run store after hours of measuring."""
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"evaluate.{key}: a name is letters, digits, '_', '-', '.' and spaces, a letter or digit first, got "
                f"{name!r}"
            )


@dataclass(frozen=True)
class Contestant:
    """One line of the table while it is measured: a method on a target."""

    name: str
    method: Method
    target: HFTarget
    head: Head | None = None


def measure(
    contestants: Sequence[Contestant],
    evaluation: Evaluation,
    held_out: Sequence[Prompt] | None,
    on_turn: Callable[[Turn], None] = lambda turn: None,
    journal: AnswerLog | None = None,
) -> dict[str, list[Turn]]:
    """Let every contestant answer every prompt under every law; the turns of each by its name, in one order.

    Args:
        contestants: who answers.
        evaluation: what is asked, and how it is answered.
        held_out: prompts of the data, for the task of that name.
        on_turn: told each turn that is answered now.
        journal: keeps every prompt's answers as they are made; what it knows is not asked again.

    Raises:
        UserError: a prompt longer than the context, a task that cannot be read, a method without its head, a journal
            that cannot be written.
    """
    asked = questions(evaluation, held_out)
    known = {} if journal is None else journal.known
    turns: dict[str, list[Turn]] = {c.name: [] for c in contestants}
    players = [_Player(c, evaluation) for c in contestants]
    if any(place not in known for place in asked):
        for player in players:
            player.warm_up(*next(iter(asked.items())))
    laws = list(evaluation.by_law)
    for i, (place, prompt) in enumerate(asked.items()):
        answers = known.get(place)
        if answers is None:
            first = (i // len(laws) + laws.index(place.law)) % len(players)
            answers = _answer(players[first:] + players[:first], place, prompt, on_turn)
            if journal is not None:
                journal.add(place, answers)
        for name, made in turns.items():
            made += answers[name]
    return turns


def _answer(players: Sequence[_Player], place: Place, prompt: Prompt, on_turn: Callable[[Turn], None]) -> Answers:
    answers: Answers = {}
    for player in players:
        answers[player.name] = []
        for turn in player.answer(place, prompt):
            answers[player.name].append(turn)
            on_turn(turn)
    return answers


def check(
    evaluation: Evaluation,
    target: HFTarget,
    head_of: Callable[[Method], Head | None],
    held_out: Sequence[Prompt] | None,
) -> None:
    """Refuse what `measure` would refuse, as far as it can be known before a head is trained; ``head_of`` gives each
    method's.

    Raises:
        UserError: a task that cannot be read, a first turn longer than the context, a tree that does not fit the head,
            a method that needs a head where there is none.
    """
    for name, method in evaluation.methods.items():
        if method.needs_head:
            _Player(Contestant(name, method, target, head_of(method)), evaluation)
    vanilla = _Player(Contestant(VANILLA, Vanilla(), target), evaluation)
    for place, prompt in questions(evaluation, held_out).items():
        vanilla.ids(place, prompt)


def questions(evaluation: Evaluation, held_out: Sequence[Prompt] | None) -> dict[Place, Prompt]:
    """What one contestant is asked, in the order in which it answers: a prompt under all laws, then the next one.

    Raises:
        UserError: a task that cannot be read.
    """
    asked = [(task.name, list(enumerate(task.prompts(held_out)))) for task in evaluation.tasks]
    return {
        Place(law, task, number): prompt
        for task, prompts in asked
        for number, prompt in prompts
        for law in evaluation.by_law
    }


class _Player:
    """A contestant with its proposer made, and the chat of its target."""

    def __init__(self, contestant: Contestant, evaluation: Evaluation) -> None:
        self.name = contestant.name
        self._target = contestant.target
        try:
            self._proposer: Proposer = contestant.method.proposer(self._target.spec, contestant.head)
        except (ValueError, UserError) as error:  # a draft model that cannot be loaded among them
            raise UserError(f"evaluate.methods.{contestant.name}: {error}") from None
        self._chat = Chat(self._target.tokenizer)
        self._verifier: Verifier = contestant.method.verifier
        self._evaluation = evaluation

    def ids(self, place: Place, prompt: Prompt, said: Sequence[str] = ()) -> list[int]:
        """The prompt behind the answers it has so far. Raises UserError where that fills the context."""
        ids, context = self._chat.prompt_ids(prompt.messages(said), prompt.tools), self._target.spec.max_positions
        if len(ids) >= context:
            raise UserError(
                f"task {place.task}: turn {len(said)} of prompt {prompt.id} has {len(ids)} tokens, which leaves no "
                f"room for an answer in {self._target.spec.name}'s context of {context}; leave the prompt out"
            )
        return ids

    def warm_up(self, place: Place, prompt: Prompt) -> None:
        """One short answer under each law, for memory, caches and lazy kernels."""
        for law in self._evaluation.by_law.values():
            self._decode(law, self.ids(place, prompt), WARM_UP_TOKENS, seed=0)

    def answer(self, place: Place, prompt: Prompt) -> Iterator[Turn]:
        """All turns of one prompt; the method's own earlier answers are its context."""
        law = self._evaluation.by_law[place.law]
        said: list[str] = []
        for number in range(len(prompt.turns)):
            ids = self.ids(place, prompt, said)
            seed = seeds.evaluation_seed(self._evaluation.seed, *place, number)
            decoded, seconds = settled(partial(self._decode, law, ids, self._evaluation.max_new_tokens, seed))
            yield Turn(place, number, decoded, seconds)
            said.append(self._text(decoded))

    def _decode(self, law: Law, ids: Sequence[int], limit: int, seed: int) -> tuple[Decoded, float]:
        spec, device = self._target.spec, self._target.device
        limit = min(limit, self._evaluation.max_new_tokens)
        capacity = room(len(ids), limit, spec.max_positions, self._proposer)
        session = self._target.open(1, capacity, self._proposer.needs | Needs(logits=True))
        prompt, length = torch.tensor([list(ids)], device=device), torch.tensor([len(ids)], device=device)
        watch = Stopwatch(device)
        began = _now(device)
        (decoded,) = decode(
            session,
            self._proposer,
            law,
            self._verifier,
            prompt,
            length,
            max_new_tokens=limit,
            end_tokens=spec.end_tokens,
            context_limit=spec.max_positions,
            generators=[seeds.generator(seed)],
            clock=watch,
        )
        return decoded, _now(device) - began

    def _text(self, decoded: Decoded) -> str:
        ends = self._target.spec.end_tokens
        tokens = [t for t in decoded.tokens if t not in ends]
        text = self._target.tokenizer.decode(tokens)
        assert isinstance(text, str)
        return text


def _now(device: torch.device) -> float:
    """Seconds, once the device has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
