"""`bench decode`: what decoding costs on this machine, what that predicts, and what is measured, transformers beside.

The curves are measured behind one prompt, the cost of drafting on calibration prompts, the speed on other prompts, all
in turns: a prediction never sees what it predicts, but for tau and the prefill, which are the method's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3_lab.bench.costs import Curves, Laps, Meter, answer, between
from eagle3_lab.bench.speeds import Contestant, speeds
from eagle3_lab.bench.table import BenchTable, as_json, as_text
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.decode.auto_tree import Choice, Watching, choose_tree
from eagle3_lab.decode.methods import Head, HeadTree, Method, Vanilla
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.tree_shapes import DynamicTree
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.runner import VANILLA, Evaluation
from eagle3_lab.experiment import Experiment
from eagle3_lab.interfaces import Law
from eagle3_lab.pipeline import measure
from eagle3_lab.pipeline.context import RunContext, open_evaluation, with_heads
from eagle3_lab.pipeline.find_head import check_model
from eagle3_lab.pipeline.trained_heads import Heads
from eagle3_lab.system.files import require_place, write_text
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget

NODES = (1, 2, 4, 8, 16, 32, 60)
WIDE = DynamicTree(levels=7, width=6, budget=48)  # the tree whose rounds tell what narrower ones would accept
KEPT = 20  # of the most promising trees
MOST_TIMES = 1000  # of rounds and of repeats: a median needs a handful, and more only cost hours

_Step = Callable[[], None]


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
        experiment: its ``evaluate`` section names methods, prompts, length and law (the first of several); first
            turns are asked.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment, before that the
            experiment's public head as it is, and without one a head as it is before training: its costs are true, its
            tau is not.
        json: also write everything there, for machines.
        prompts: how many are measured; half as many more, one at least, calibrate the cost of drafting.
        rounds: of every size, at each repeat of a curve.
        repeats: of every curve at least, spread evenly between the prompts; one more warms up.

    Raises:
        UserError: no ``evaluate`` section, a number out of range, too few prompts, a head of another target or for no
            model, or a method that does not fit or never drafts.
    """
    evaluation = experiment.evaluate
    if evaluation is None:
        raise UserError("evaluate: the experiment has no such section; add it, with its tasks and methods")
    for name, value in (("prompts", prompts), ("rounds", rounds), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"--{name}: must be >= 1, got {value}")
        if name != "prompts" and value > MOST_TIMES:
            raise UserError(f"--{name}: must be at most {MOST_TIMES}, got {value}")
    check_model(experiment, checkpoint_path)
    require_place(json, "--json")
    context = with_heads(open_evaluation(experiment, checkpoint_path, answer=False, untrained=True))
    target, data, heads = context.target, context.data, context.heads
    own, trained = heads.own, _described(context)
    law = next(iter(evaluation.by_law.values()))
    asked = _asked(evaluation, target, data, prompts + max(prompts // 2, 1))
    measured, calibration = asked[:prompts], asked[prompts:]
    contestants = _contestants(evaluation, target, heads)
    meter = _meter(target, contestants, evaluation, law, calibration[0], rounds)
    methods, rivals, made = speeds(
        experiment.target, target, contestants, law, evaluation, measured, calibration, meter, repeats
    )
    trees = []
    if own is not None and _own(contestants, evaluation) is not None:
        trees = _trees(target, own, law, calibration, evaluation, made)
    table = BenchTable(
        setting=f"{experiment.name}: target {target.spec.name} in {target.dtype}, {measure.machine_name(target)}",
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


def _described(context: RunContext) -> str:
    """Return the place of the experiment's own head, in words."""
    if context.module is None:
        return "none of its own"
    if context.head_place is None:
        return "untrained (no checkpoint): costs are true, tau is not"
    return context.head_place.place


def _asked(evaluation: Evaluation, target: HFTarget, data: ConversationData | None, count: int) -> list[list[int]]:
    """First turns, task by task. Raises UserError where there are too few, or one that fills the context."""
    chat, held_out = Chat(target.tokenizer), None if data is None else data.prompts()
    ids = [
        chat.prompt_ids(prompt.messages(), prompt.tools)
        for task in evaluation.tasks
        for prompt in task.prompts(held_out)
    ]
    if len(ids) < count:
        raise UserError(f"evaluate.tasks: {len(ids)} prompts, {count} are needed; raise the limit, or lower --prompts")
    context = target.spec.max_positions
    if (longest := max(map(len, ids[:count]))) >= context:
        raise UserError(
            f"evaluate.tasks: a prompt of {longest} tokens leaves no room for an answer in {target.spec.name}'s "
            f"context of {context}; leave it out"
        )
    return ids[:count]


def _contestants(evaluation: Evaluation, target: HFTarget, heads: Heads) -> list[Contestant]:
    made = []
    methods: dict[str, Method] = {VANILLA: Vanilla(), **evaluation.methods}
    for name, method in methods.items():
        try:
            made.append(Contestant(name, method.proposer(target.spec, heads.of(method)), method.verifier))
        except ValueError as error:
            raise UserError(f"evaluate.methods.{name}: {error}") from None
    return made


def _meter(
    target: HFTarget,
    contestants: Sequence[Contestant],
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


def _own(contestants: Sequence[Contestant], evaluation: Evaluation) -> Eagle | None:
    """The first that drafts with the experiment's own head and not with a named one: trees are chosen for it, so the
    levels timed are its."""
    drafting = [(c.name, c.proposer) for c in contestants if isinstance(c.proposer, Eagle)]
    return next((eagle for name, eagle in drafting if evaluation.methods[name].head is None), None)


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
