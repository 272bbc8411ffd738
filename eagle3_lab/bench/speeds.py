"""The speeds of a bench: everyone answers every measured prompt in turns, and what the curves predict for each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from eagle3_lab import seeds
from eagle3_lab.backend.cuda_graphs import settled
from eagle3_lab.bench.costs import LOSSLESS, Curves, Cycle, Laps, Meter, Sized, answer, answer_seconds, between, timed
from eagle3_lab.bench.rival_generation import WARM_UP, fastest, offered, timed_answer
from eagle3_lab.bench.table import MethodSpeed, RivalSpeed
from eagle3_lab.bench.transformers_generate import Rival
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.runner import VANILLA, Evaluation
from eagle3_lab.interfaces import Law, Proposer, Verifier
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import Decoded


@dataclass(frozen=True)
class Contestant:
    """A method on the target, while it is measured."""

    name: str
    proposer: Proposer
    verifier: Verifier = LOSSLESS


def speeds(
    choice: TargetChoice,
    target: HFTarget,
    contestants: Sequence[Contestant],
    law: Law,
    evaluation: Evaluation,
    measured: Sequence[Sequence[int]],
    calibration: Sequence[Sequence[int]],
    meter: Meter,
    repeats: int,
) -> tuple[list[MethodSpeed], list[RivalSpeed], Curves]:
    """Let everyone answer every measured prompt, in an order that rotates; the curves' repeats and the calibration are
    spread between the prompts, so that all see one machine. Raises UserError for a method that drafts in no round."""
    limit = evaluation.max_new_tokens
    greedy = isinstance(law, SamplingLaw) and law.temperature == 0 and law.repetition_penalty == 1
    entered = offered(evaluation, choice, target) if greedy else []
    with stage("warm-up", "answers", len(contestants) + len(entered) * len(calibration)) as s:
        meter.repeat()
        for c in contestants:
            answer(target, c.proposer, law, calibration[0], WARM_UP, Laps(target.device), verifier=c.verifier)
            s.advance()
        rivals = fastest(target, entered, calibration, limit, s.advance)
    drafting: dict[str, list[tuple[int, float]]] = {c.name: [] for c in contestants}
    answers: dict[str, list[tuple[Decoded, float]]] = {c.name: [] for c in contestants}
    sizes: dict[str, list[int]] = {c.name: [] for c in contestants}
    theirs: dict[str, list[tuple[int, float]]] = {r.name: [] for r in rivals}
    everyone = [*contestants, *rivals]
    with stage("decoding", "answers", len(measured) * len(everyone)) as s:
        for i, ids in enumerate(measured):
            for _ in range(-(-repeats // len(measured))):
                meter.repeat()
            for one in everyone[i % len(everyone) :] + everyone[: i % len(everyone)]:
                if isinstance(one, Rival):
                    theirs[one.name].append(timed_answer(target, one, ids, limit))
                else:
                    known, drawn = (seeds.bench_seed(evaluation.seed, part, i) for part in ("calibration", "measured"))
                    drafting[one.name] += _rounds(target, one, law, calibration[i % len(calibration)], limit, known)
                    answered, extents = settled(partial(_answer, target, one, law, ids, limit, drawn))
                    answers[one.name].append(answered)
                    sizes[one.name] += extents
                s.advance()
    for name, rounds in drafting.items():
        if not rounds:
            raise UserError(
                f"evaluate.methods.{name}: no calibration answer has a second round that drafts; answers of more "
                "tokens, shorter prompts, or a tree that fits the context are needed"
            )
    made = meter.curves()
    base = sum(len(d.tokens) for d, _ in answers[VANILLA]) / sum(s for _, s in answers[VANILLA])
    ours = {c.name: [(len(d.tokens), s) for d, s in answers[c.name]] for c in contestants}
    return (
        [_speed(c, answers[c.name], sizes[c.name], _by_size(drafting[c.name]), made, base) for c in contestants],
        [RivalSpeed.of(r.name, r.setting, theirs[r.name], base, {k: ours[k] for k in r.beside}) for r in rivals],
        made,
    )


def _rounds(
    target: HFTarget, one: Contestant, law: Law, ids: Sequence[int], limit: int, seed: int
) -> list[tuple[int, float]]:
    """A method's own rounds on a calibration prompt: places scored, and seconds of drafting, which alone go into a
    prediction."""
    clock, sized = Laps(target.device), Sized(one.proposer)
    answer(target, sized, law, ids, limit, clock, seed, target.spec.end_tokens, one.verifier)
    drafted = [round.get("draft", 0.0) for round in clock.rounds]
    return list(zip(sized.extents, drafted, strict=False))[1:]  # plain rounds, if any, come last


def _by_size(rounds: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median seconds of drafting, by how many places were scored: what drafts more takes longer."""
    sizes = {size for size, _ in rounds}
    return {size: statistics.median(s for n, s in rounds if n == size) for size in sizes}


def _answer(
    target: HFTarget, one: Contestant, law: Law, ids: Sequence[int], limit: int, seed: int
) -> tuple[tuple[Decoded, float], list[int]]:
    """An answer with its seconds, and how many places its rounds scored."""
    clock, sized, ends = Laps(target.device), Sized(one.proposer), target.spec.end_tokens
    work = partial(answer, target, sized, law, ids, limit, clock, seed, ends, one.verifier)
    return timed(work, target.device), sized.extents


def _speed(
    contestant: Contestant,
    answers: Sequence[tuple[Decoded, float]],
    sizes: Sequence[int],
    drafting: dict[int, float],
    made: Curves,
    base: float,
) -> MethodSpeed:
    nodes = contestant.proposer.nodes
    scored = sizes or [nodes]  # no tree was proposed where every answer was one token
    draft, verify, host, forward = (
        statistics.fmean(between(curve, n) for n in scored)
        for curve in (
            drafting,
            {n: c.verify for n, c in made.verify.items()},
            {n: c.host for n, c in made.verify.items()},
            made.forward,
        )
    )
    cycle = Cycle(draft, verify, host)
    tokens = [len(d.tokens) for d, _ in answers]
    rounds = sum(len(d.rounds) for d, _ in answers)
    tau = sum(r.emitted for d, _ in answers for r in d.rounds) / max(rounds, 1)
    predicted = [answer_seconds(len(d.tokens), tau, cycle.seconds, d.seconds["prefill"]) for d, _ in answers]
    rate = sum(tokens) / sum(s for _, s in answers)
    return MethodSpeed(
        name=contestant.name,
        lossless=contestant.verifier.lossless,
        nodes=nodes,
        tau=tau,
        cycle=cycle,
        host_share=(cycle.host + max(cycle.verify - forward, 0.0)) / cycle.seconds,
        tokens_per_s=rate,
        predicted=sum(tokens) / sum(predicted),
        speedup=rate / base,
        seconds=statistics.median(s for _, s in answers),
    )
