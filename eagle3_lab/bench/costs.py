"""What decoding costs on a machine: curves that predict tokens per second, each measured apart from what they predict.

    cycle(method)   = c_verify(n) + c_draft + c_host          seconds a round, medians; n the nodes scored, averaged
    tokens/s        = tokens / (prefill + rounds * cycle),     rounds = (tokens - 1) / tau

c_verify(n) is scoring n nodes, law, verdict, commit and the one read; c_forward(n) the target's forward of it alone.
c_host is what the loop does besides. The loop itself measures them, with a proposer that proposes n nodes for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab import seeds
from eagle3_lab.decode.loop import decode, room
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.watched import Watched
from eagle3_lab.decode.timing import Stopwatch
from eagle3_lab.decode.trees import extent
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.interfaces import Law, Proposer, Verifier
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Decoded, Needs, TargetOut, Tree, Verdict

T = TypeVar("T")

LOSSLESS = ExactVerifier()


class Laps(Stopwatch):
    """A stopwatch that keeps every round apart. A round's draft time is what observing the last one took, and its own
    proposal."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.rounds: list[dict[str, float]] = []

    def start(self) -> None:
        super().start()
        self.rounds, self._open = [], {}

    def lap(self, stage: str) -> None:
        before = self.seconds().get(stage, 0.0)
        super().lap(stage)
        if stage == "prefill":
            return
        self._open[stage] = self._open.get(stage, 0.0) + self.seconds()[stage] - before
        if stage == "host":
            self.rounds.append(self._open)
            self._open = {}


class Idle(Proposer):
    """Proposes ``nodes - 1`` children of the root, whatever they are: the price of a tree without a drafter's."""

    def __init__(self, nodes: int, vocab: int) -> None:
        self.nodes, self._vocab = nodes, vocab

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Nothing to learn from a prompt."""

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        tokens = (root[:, None] + torch.arange(self.nodes, device=root.device)) % self._vocab
        return Tree(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        """Nothing to learn from a verdict."""


class Sized(Watched):
    """Any proposer, with how many places of each of its trees the loop scores."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.extents: list[int] = []

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        tree = super().propose(root)
        self.extents.append(extent(tree))
        return tree


@dataclass(frozen=True)
class Cycle:
    """Median seconds of one round, by stage."""

    draft: float
    verify: float
    host: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.host

    @staticmethod
    def of(rounds: Sequence[Mapping[str, float]]) -> Cycle:
        """Raises ValueError where no round was measured."""
        if not rounds:
            raise ValueError("no round was measured: answers of two tokens at least are needed")
        return Cycle(*(statistics.median(r.get(stage, 0.0) for r in rounds) for stage in ("draft", "verify", "host")))


@dataclass
class Curves:
    """``verify[n]`` the cycle of n nodes drafted for nothing, ``forward[n]`` the target's forward alone, ``draft[w]`` a
    level of w draft rows; all in seconds, behind ``context`` tokens."""

    context: int
    verify: dict[int, Cycle] = field(default_factory=dict)
    forward: dict[int, float] = field(default_factory=dict)
    draft: dict[int, float] = field(default_factory=dict)


def answer(
    target: HFTarget,
    proposer: Proposer,
    law: Law,
    ids: Sequence[int],
    tokens: int,
    clock: Stopwatch,
    seed: int = 0,
    end_tokens: Sequence[int] = (),
    verifier: Verifier = LOSSLESS,
) -> Decoded:
    """Decode one prompt by the real loop: ``tokens`` at most, all of them where no token ends the answer."""
    capacity = room(len(ids), tokens, target.spec.max_positions, proposer)
    session = target.open(1, capacity, proposer.needs | Needs(logits=True))
    (made,) = decode(
        session,
        proposer,
        law,
        verifier,
        torch.tensor([list(ids)], device=target.device),
        torch.tensor([len(ids)], device=target.device),
        max_new_tokens=tokens,
        end_tokens=end_tokens,
        context_limit=target.spec.max_positions,
        generators=[seeds.generator(seed)],
        clock=clock,
    )
    return made


class Meter:
    """Measures the curves behind the prompt ``ids``, one :meth:`repeat` at a time: every size once, so that a machine
    that slows down slows all of them alike. Spread over whatever the curves are to predict, repeats see the same
    machine. The first one warms up and is not counted.

    ``eagle`` and ``widths``: the head's levels to time; none without a head.
    """

    def __init__(
        self,
        target: HFTarget,
        eagle: Eagle | None,
        law: Law,
        ids: Sequence[int],
        *,
        nodes: Sequence[int],
        widths: Sequence[int] = (),
        rounds: int = 6,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._law, self._ids = target, law, ids
        self._rounds, self._on_step = rounds, on_step
        self._laps: dict[int, list[dict[str, float]]] = {n: [] for n in nodes}
        self._forwards: dict[int, list[float]] = {n: [] for n in nodes}
        self._levels: dict[int, list[float]] = {w: [] for w in (() if eagle is None else widths)}
        self._level = None if eagle is None else level_step(target, eagle, ids)
        self._warm = False

    def repeat(self) -> None:
        """Every size once more, ``rounds`` rounds each."""
        target, rounds = self._target, self._rounds
        for n, laps in self._laps.items():
            clock = Laps(target.device)
            answer(target, Idle(n, target.spec.vocab), self._law, self._ids, 2 * rounds + 2, clock)
            times = self._times(forward_step(target, self._ids, n))
            if self._warm:
                laps += clock.rounds[1 : rounds + 1]
                self._forwards[n] += times
        for w, levels in self._levels.items():
            step = self._level
            assert step is not None
            times = self._times(lambda w=w, step=step: step(w))
            if self._warm:
                levels += times
        self._warm = True

    def curves(self) -> Curves:
        """Medians of all counted repeats. Raises ValueError before the second repeat."""
        return Curves(
            len(self._ids),
            {n: Cycle.of(each) for n, each in self._laps.items()},
            {n: statistics.median(each) for n, each in self._forwards.items()},
            {w: statistics.median(each) for w, each in self._levels.items()},
        )

    def _times(self, work: Callable[[], object]) -> list[float]:
        """Seconds of ``rounds`` calls, after one that is not counted."""
        times = [timed(work, self._target.device)[1] for _ in range(self._rounds + 1)]
        self._on_step()
        return times[1:]


def curves(meter: Meter, repeats: int) -> Curves:
    """``repeats`` counted repeats in a row."""
    for _ in range(repeats + 1):
        meter.repeat()
    return meter.curves()


def forward_step(target: HFTarget, ids: Sequence[int], nodes: int) -> Callable[[], object]:
    """The target's forward over one tree of ``nodes`` nodes behind ``ids``, to be called again and again."""
    session = target.open(1, len(ids) + nodes + 1, Needs(logits=True))
    session.prefill(*_row(target, ids))
    root = torch.tensor([ids[-1]], device=target.device)
    tree = Idle(nodes, target.spec.vocab).propose(root)
    return lambda: session.score(tree)


def level_step(target: HFTarget, eagle: Eagle, ids: Sequence[int]) -> Callable[[int], None]:
    """One level of a head's tree behind ``ids``, by its width, to be called again and again."""
    prompt, lengths = _row(target, ids)
    out = target.open(1, len(ids) + 1, eagle.needs | Needs(logits=True)).prefill(prompt, lengths)
    with torch.inference_mode():
        eagle.start(prompt, lengths, out, len(ids) + 64, [])
        eagle.propose(prompt[:, -1])  # reads the prompt

    def step(width: int) -> None:
        with torch.inference_mode():
            eagle.draft_once(width)

    return step


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What ``work`` returns, and its seconds of wall time, the device awaited before and after."""
    watch = Stopwatch(device)
    watch.start()
    made = work()
    watch.lap("work")
    return made, watch.seconds()["work"]


def between(curve: Mapping[int, float], at: int | float) -> float:
    """The curve at any size: straight lines between measured points, the last line's slope beyond, flat below.

    Raises ValueError for an empty curve.
    """
    points = sorted(curve.items())
    if not points:
        raise ValueError("nothing was measured")
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def answer_seconds(tokens: int, tau: float, cycle: float, prefill: float) -> float:
    """What the curves predict for one answer of ``tokens`` tokens, the prefill's own included: alone it needs no round,
    and ``tau`` may then be 0."""
    return prefill if tokens == 1 else prefill + (tokens - 1) / tau * cycle


def _row(target: HFTarget, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([list(ids)], device=target.device), torch.tensor([len(ids)], device=target.device)
