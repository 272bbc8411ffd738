"""`bench decode`: what decoding costs on this machine, what that predicts, and what is measured, transformers beside.

The curves are measured behind one prompt, the cost of drafting on calibration prompts, the speed on other prompts, all
in turns: a prediction never sees what it predicts, but for tau and the prefill, which are the method's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle3_lab import checkpoint
from eagle3_lab.captured import settled
from eagle3_lab.commands import inputs, stages
from eagle3_lab.commands.bench_rivals import WARM_UP, fastest, offered, timed_answer
from eagle3_lab.commands.files import require_place, write_text
from eagle3_lab.commands.heads import Heads, gather
from eagle3_lab.commands.work import Work
from eagle3_lab.costs import Curves, Cycle, Laps, Meter, Sized, answer, answer_seconds, between, timed
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.decode.auto import Choice, Watching, choose_tree
from eagle3_lab.decode.grow import DynamicTree
from eagle3_lab.decode.law import SamplingLaw
from eagle3_lab.decode.methods import Head, HeadTree, Method, Vanilla
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation import VANILLA, Evaluation
from eagle3_lab.experiment import Experiment
from eagle3_lab.progress import stage
from eagle3_lab.report.bench import BenchTable, MethodSpeed, RivalSpeed, as_json, as_text
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.target.load import TargetChoice
from eagle3_lab.target.rivals import Rival
from eagle3_lab.types import Decoded, Law, Proposer

NODES = (1, 2, 4, 8, 16, 32, 60)
WIDE = DynamicTree(levels=7, width=6, budget=48)  # the tree whose rounds tell what narrower ones would accept
KEPT = 20  # of the most promising trees
MOST_TIMES = 1000  # of rounds and of repeats: a median needs a handful, and more only cost hours

_Step = Callable[[], None]


@dataclass(frozen=True)
class _Contestant:
    name: str
    proposer: Proposer


def bench_decode(
    experiment: Experiment,
    *,
    checkpoint_path: Path | None = None,
    json: Path | None = None,
    prompts: int = 4,
    rounds: int = 6,
    repeats: int = 3,
) -> None:
    """Measure cost curves and speeds of the experiment's methods, vanilla and transformers' own generation beside them.

    Args:
        experiment: its ``evaluate`` section names methods, prompts, law and length; first turns are asked.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment, and without one
            a head as it is before training: its costs are true, its tau is not.
        json: also write everything there, for machines.
        prompts: how many are measured; half as many more, one at least, calibrate the cost of drafting.
        rounds: of every size, at each repeat of a curve.
        repeats: of every curve at least, spread evenly between the prompts; one more warms up.

    Raises:
        UserError: no ``evaluate`` section, a number out of range, too few prompts, a head of another target, or a
            method that does not fit or never drafts.
    """
    evaluation = experiment.evaluate
    if evaluation is None:
        raise UserError("evaluate: the experiment has no such section; say which tasks and methods")
    for name, value in (("prompts", prompts), ("rounds", rounds), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"--{name}: must be >= 1, got {value}")
        if name != "prompts" and value > MOST_TIMES:
            raise UserError(f"--{name}: must be at most {MOST_TIMES}, got {value}")
    require_place(json, "--json")
    target = inputs.load_target(experiment)
    data = None if experiment.data is None else inputs.build_data(experiment, target, answer=False)
    own, trained = None, "none of its own"
    if experiment.model is not None:
        own, trained = _head(experiment, target, checkpoint_path)
    heads = gather(own, evaluation.methods, experiment, target)
    law = next(iter(evaluation.by_law.values()))
    asked = _asked(evaluation, target, data, prompts + max(prompts // 2, 1))
    measured, calibration = asked[:prompts], asked[prompts:]
    contestants = _contestants(evaluation, target, heads)
    meter = _meter(target, contestants, evaluation, law, calibration[0], rounds)
    methods, rivals, made = _speeds(
        experiment.target, target, contestants, law, evaluation, measured, calibration, meter, repeats
    )
    trees = []
    if own is not None and _own(contestants, evaluation) is not None:
        trees = _trees(target, own, law, calibration, evaluation, made)
    table = BenchTable(
        setting=f"{experiment.name}: target {target.spec.name} in {target.dtype}, {stages.machine(target)}",
        head="; ".join([trained, *(f"{name}: {one.path}" for name, one in heads.others.items())]),
        context=made.context,
        curves=made,
        methods=methods,
        rivals=rivals,
        trees=trees,
    )
    print(as_text(table), end="")
    if json is not None:
        write_text(json, as_json(table))


def _head(experiment: Experiment, target: HFTarget, path: Path | None) -> tuple[Head, str]:
    """The experiment's own head and what to say of it."""
    data, *_ = experiment.require_training("bench decode")
    own = Work.of(experiment, target, data).draft
    module = stages.build_module(experiment, target, data)
    found = own if path is None else path
    if path is None and not own.is_file():
        said = "untrained (no checkpoint): costs are true, tau is not"
    else:
        checkpoint.restore(found, target, module.source, module.draft)
        said = str(found)
    module = module.to(target.device).eval()
    return Head(module.source, module.draft, target.record), said


def _asked(evaluation: Evaluation, target: HFTarget, data: ConversationData | None, count: int) -> list[list[int]]:
    """First turns, task by task. Raises UserError where there are too few."""
    chat, held_out = Chat(target.tokenizer), None if data is None else data.prompts()
    ids = [chat.prompt_ids(prompt.messages()) for task in evaluation.tasks for prompt in task.prompts(held_out)]
    if len(ids) < count:
        raise UserError(f"evaluate.tasks: {len(ids)} prompts, {count} are needed; raise the limit, or --prompts 1")
    return ids[:count]


def _contestants(evaluation: Evaluation, target: HFTarget, heads: Heads) -> list[_Contestant]:
    made = []
    methods: dict[str, Method] = {VANILLA: Vanilla(), **evaluation.methods}
    for name, method in methods.items():
        try:
            made.append(_Contestant(name, method.proposer(target.spec, heads.of(method))))
        except ValueError as error:
            raise UserError(f"evaluate.methods.{name}: {error}") from None
    return made


def _meter(
    target: HFTarget,
    contestants: Sequence[_Contestant],
    evaluation: Evaluation,
    law: Law,
    ids: Sequence[int],
    rounds: int,
) -> Meter:
    own = [c.proposer.nodes for c in contestants]
    nodes = sorted({n for n in NODES if n <= max(*own, 16)} | set(own))
    eagle = _own(contestants, evaluation)
    eagle = eagle or next((c.proposer for c in contestants if isinstance(c.proposer, Eagle)), None)
    grown = [m.grow for m in evaluation.methods.values() if isinstance(m, HeadTree)]
    widths = sorted({1, 2, 4, 8, *(w for grow in grown for w in grow.widths)}) if eagle is not None else []
    return Meter(target, eagle, law, ids, nodes=nodes, widths=widths, rounds=rounds)


def _own(contestants: Sequence[_Contestant], evaluation: Evaluation) -> Eagle | None:
    """The first that drafts with the experiment's own head and not with a named one: trees are chosen for it, so the
    levels timed are its."""
    drafting = [(c.name, c.proposer) for c in contestants if isinstance(c.proposer, Eagle)]
    return next((eagle for name, eagle in drafting if evaluation.methods[name].head is None), None)


def _speeds(
    choice: TargetChoice,
    target: HFTarget,
    contestants: Sequence[_Contestant],
    law: Law,
    evaluation: Evaluation,
    measured: Sequence[Sequence[int]],
    calibration: Sequence[Sequence[int]],
    meter: Meter,
    repeats: int,
) -> tuple[list[MethodSpeed], list[RivalSpeed], Curves]:
    """Let everyone answer every measured prompt, in an order that rotates; the curves' repeats and the calibration are
    spread between the prompts, so that all see one machine."""
    limit = evaluation.max_new_tokens
    greedy = isinstance(law, SamplingLaw) and law.temperature == 0 and law.repetition_penalty == 1
    entered = offered(evaluation, choice, target) if greedy else []
    with stage("warm-up", "answers", len(contestants) + len(entered) * len(calibration)) as s:
        meter.repeat()
        for c in contestants:
            answer(target, c.proposer, law, calibration[0], WARM_UP, Laps(target.device))
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
                    drafting[one.name] += _rounds(target, one, law, calibration[i % len(calibration)], limit)
                    answered, extents = settled(partial(_answer, target, one, law, ids, limit, evaluation.seed + i))
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


def _rounds(target: HFTarget, one: _Contestant, law: Law, ids: Sequence[int], limit: int) -> list[tuple[int, float]]:
    """A method's own rounds on a calibration prompt: places scored, and seconds of drafting, which alone go into a
    prediction."""
    clock, sized = Laps(target.device), Sized(one.proposer)
    answer(target, sized, law, ids, limit, clock, end_tokens=target.spec.end_tokens)
    drafted = [round.get("draft", 0.0) for round in clock.rounds]
    return list(zip(sized.extents, drafted, strict=False))[1:]  # plain rounds, if any, come last


def _by_size(rounds: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median seconds of drafting, by how many places were scored: what drafts more takes longer."""
    sizes = {size for size, _ in rounds}
    return {size: statistics.median(s for n, s in rounds if n == size) for size in sizes}


def _answer(
    target: HFTarget, one: _Contestant, law: Law, ids: Sequence[int], limit: int, seed: int
) -> tuple[tuple[Decoded, float], list[int]]:
    """An answer with its seconds, and how many places its rounds scored."""
    clock, sized, ends = Laps(target.device), Sized(one.proposer), target.spec.end_tokens
    return timed(lambda: answer(target, sized, law, ids, limit, clock, seed, ends), target.device), sized.extents


def _trees(
    target: HFTarget,
    head: Head,
    law: Law,
    calibration: Sequence[Sequence[int]],
    evaluation: Evaluation,
    made: Curves,
) -> list[Choice]:
    """The most promising dynamic trees, by a wide tree's rounds on the calibration prompts."""
    width = min(WIDE.width, len(head.draft.vocab))
    grow = DynamicTree(WIDE.levels, width, min(WIDE.budget, 1 + width + (WIDE.levels - 1) * width**2))
    with stage("trees", "answers", len(calibration)) as s:
        watching = Watching(Eagle(head.source, head.draft, grow, target.spec.layers, target.spec.max_positions))
        for ids in calibration:
            ends = target.spec.end_tokens
            answer(target, watching, law, ids, evaluation.max_new_tokens, Laps(target.device), end_tokens=ends)
            s.advance()
    cycle = {n: c.verify + c.host for n, c in made.verify.items()}
    found = choose_tree(
        watching.rounds,
        lambda n: between(cycle, n),
        lambda w: between(made.draft, w),
        levels=grow.levels,
        width=width,
        budgets=range(2, grow.budget + 1),
    )
    return found[:KEPT]


def _speed(
    contestant: _Contestant,
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
        nodes=nodes,
        tau=tau,
        cycle=cycle,
        host_share=(cycle.host + max(cycle.verify - forward, 0.0)) / cycle.seconds,
        tokens_per_s=rate,
        predicted=sum(tokens) / sum(predicted),
        speedup=rate / base,
        seconds=statistics.median(s for _, s in answers),
    )
