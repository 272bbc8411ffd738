"""What was measured: a method on one task under one law, its means over tasks, and all that a run closes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from eagle3_lab.data.repetition import is_looping
from eagle3_lab.evaluation.bootstrap import (
    Interval,
    mean_ratio_interval,
    mean_speedup_interval,
    ratio_interval,
    ratio_intervals,
    speedup_interval,
)
from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.types import Decoded

STAGES = ("prefill", "draft", "verify", "host")


@dataclass(frozen=True)
class MethodResult:
    """One row: a method under one dtype over all prompts of ``task`` under ``law``.

    ``tau`` and ``engine_tau`` as in :mod:`eagle3_lab.evaluation.metrics`; ``tau_tidy`` without the answers that loop,
    whose share is ``looping``. ``speedup`` over vanilla in the same dtype, ``speedup_fastest`` over the fastest vanilla
    of this machine. ``n_alpha`` by depth. ``histogram[a]`` rounds that accepted a drafts, ``accepted[a]`` their share
    of all rounds. ``seconds`` of the decoder's clock in all, by stage.
    """

    name: str
    dtype: str
    lossless: bool
    prompts: int
    tokens: int
    tau: Interval
    tau_tidy: Interval
    engine_tau: float
    looping: Interval
    tokens_per_s: Interval
    speedup: Interval
    speedup_fastest: Interval
    n_alpha: tuple[Interval, ...]
    histogram: tuple[int, ...]
    accepted: tuple[Interval, ...]
    seconds: dict[str, float]
    law: str = ""
    task: str = ""


@dataclass(frozen=True)
class Overall:
    """A method under one law over several tasks: unweighted means over the tasks, as papers' tables have them, with
    intervals that resample prompts within their task; and ``pooled``, where every prompt weighs the same."""

    name: str
    dtype: str
    lossless: bool
    law: str
    tau: Interval
    tokens_per_s: Interval
    speedup: Interval
    speedup_fastest: Interval
    pooled: MethodResult


@dataclass(frozen=True)
class OnePass:
    """The hit table's two readings on held-out greedy text: all anchors, and visited anchors (with an interval over
    answers), which is what a chain decoder would give."""

    tau_expected: float
    tau_walked: Interval
    n_alpha_all: tuple[float, ...]
    n_alpha_walked: tuple[float, ...]


@dataclass(frozen=True)
class ClosingTable:
    """Everything a run closes with. ``setting`` says on what it was measured (target, device, laws, prompts);
    ``methods`` a row for each law, task and method, ``overall`` one for each law and method where there are several
    tasks; ``notes`` what a reader must know before believing a number; ``ui`` is the command that shows the store,
    ``page`` the run's place in it."""

    setting: str
    methods: tuple[MethodResult, ...]
    one_pass: OnePass | None
    run_id: str
    checkpoint: str
    ui: str
    page: str
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def laws(self) -> tuple[str, ...]:
        """In the order in which they are shown."""
        return tuple(dict.fromkeys(row.law for row in self.methods))

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order in which they are shown."""
        return tuple(dict.fromkeys(row.task for row in self.methods))

    def pooled(self, law: str) -> tuple[MethodResult, ...]:
        """One row a method, over all prompts under this law."""
        return tuple(o.pooled for o in self.overall if o.law == law) or self.rows(law)

    def rows(self, law: str) -> tuple[MethodResult, ...]:
        """The rows measured under this law, task by task."""
        return tuple(row for row in self.methods if row.law == law)


@dataclass(frozen=True)
class Answered:
    """One prompt's answers, one for each turn, and the wall seconds of decoding them. Prompts are what the bootstrap
    resamples."""

    turns: tuple[Decoded, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all turns, the prefills' included: they were waited for as well."""
        return sum(len(d.tokens) for d in self.turns)


def method_result(
    name: str,
    dtype: str,
    answered: Sequence[Answered],
    vanilla: Sequence[Answered],
    fastest: Sequence[Answered],
    depth: int,
    generator: torch.Generator,
    lossless: bool = True,
    law: str = "",
    task: str = "",
) -> MethodResult:
    """Measure one row from answers to the same prompts, in the same order.

    Args:
        name: shown in the table.
        dtype: the target's, under which ``answered`` and ``vanilla`` were made.
        answered: the method's answers.
        vanilla: vanilla's in the same dtype.
        fastest: vanilla's in the dtype in which it is fastest on this machine.
        depth: how many levels the method drafts (0 for vanilla).
        generator: of the bootstrap, on the CPU.
        lossless: the verifier's promise.
        law: the name of the law that all drew from.
        task: the name of the task that all prompts are of.

    Raises: ValueError where the three do not hold the same number of prompts.
    """
    turns = [d for prompt in answered for d in prompt.turns]
    acceptance = Acceptance.of((r for d in turns for r in d.rounds), depth)
    by_prompt = [Acceptance.of((r for d in prompt.turns for r in d.rounds), depth) for prompt in answered]
    tidy = [[d for d in prompt.turns if not is_looping(d.tokens)] for prompt in answered]
    looping = [len(prompt.turns) - len(kept) for prompt, kept in zip(answered, tidy, strict=True)]
    tokens, seconds = _costs(answered)
    return MethodResult(
        name=name,
        dtype=dtype,
        lossless=lossless,
        prompts=len(answered),
        tokens=sum(tokens),
        tau=ratio_interval(*_tau_columns([prompt.turns for prompt in answered]), generator),
        tau_tidy=ratio_interval(*_tau_columns(tidy), generator),
        engine_tau=acceptance.engine_tau,
        looping=ratio_interval(looping, [len(prompt.turns) for prompt in answered], generator),
        tokens_per_s=ratio_interval(tokens, seconds, generator),
        speedup=speedup_interval(tokens, seconds, *_costs(vanilla), generator),
        speedup_fastest=speedup_interval(tokens, seconds, *_costs(fastest), generator),
        n_alpha=_n_alpha(by_prompt, depth, generator),
        histogram=acceptance.histogram,
        accepted=_accepted(by_prompt, depth, generator),
        seconds={stage: sum(d.seconds.get(stage, 0.0) for d in turns) for stage in STAGES},
        law=law,
        task=task,
    )


def overall_result(
    rows: Sequence[MethodResult],
    answered: Sequence[Sequence[Answered]],
    vanilla: Sequence[Sequence[Answered]],
    fastest: Sequence[Sequence[Answered]],
    generator: torch.Generator,
) -> Overall:
    """A method's readings over several tasks under one law: its rows, and its answers and both baselines', task by task
    in the same order. ``generator``: of the bootstrap, on the CPU.

    Raises: ValueError where a task's answers are not as many as its baselines'.
    """
    first = rows[0]
    every, base, best = (list(chain.from_iterable(side)) for side in (answered, vanilla, fastest))
    depth = len(first.n_alpha)
    pooled = method_result(
        first.name, first.dtype, every, base, best, depth, generator, lossless=first.lossless, law=first.law
    )
    costs = [[_costs(task) for task in side] for side in (answered, vanilla, fastest)]
    return Overall(
        name=first.name,
        dtype=first.dtype,
        lossless=first.lossless,
        law=first.law,
        tau=mean_ratio_interval([_tau_columns([p.turns for p in task]) for task in answered], generator),
        tokens_per_s=mean_ratio_interval(costs[0], generator),
        speedup=mean_speedup_interval([(*own, *base) for own, base in zip(costs[0], costs[1], strict=True)], generator),
        speedup_fastest=mean_speedup_interval(
            [(*own, *base) for own, base in zip(costs[0], costs[2], strict=True)], generator
        ),
        pooled=pooled,
    )


def _costs(answered: Sequence[Answered]) -> tuple[list[int], list[float]]:
    return [prompt.tokens for prompt in answered], [prompt.seconds for prompt in answered]


def _tau_columns(prompts: Sequence[Sequence[Decoded]]) -> tuple[list[int], list[int]]:
    """Tokens emitted in rounds, and rounds, of each prompt."""
    emitted = [sum(r.emitted for d in turns for r in d.rounds) for turns in prompts]
    return emitted, [sum(len(d.rounds) for d in turns) for turns in prompts]


def _n_alpha(prompts: Sequence[Acceptance], depth: int, generator: torch.Generator) -> tuple[Interval, ...]:
    accepted = [[one.accepted[n] for one in prompts] for n in range(depth)]
    return tuple(ratio_intervals(accepted, [[one.judged[n] for one in prompts] for n in range(depth)], generator))


def _accepted(prompts: Sequence[Acceptance], depth: int, generator: torch.Generator) -> tuple[Interval, ...]:
    counts = [[one.histogram[a] for one in prompts] for a in range(depth + 1)]
    return tuple(ratio_intervals(counts, [[one.rounds for one in prompts]] * (depth + 1), generator))
