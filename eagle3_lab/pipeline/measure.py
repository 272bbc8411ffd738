"""Measuring an experiment's methods: answers that survive a kill, rows of the closing table, the hit table over
held-out text, and runs, metrics and figures of all of it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from eagle3_lab import seeds
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.tasks import Prompt
from eagle3_lab.decode.methods import Vanilla
from eagle3_lab.evaluation.answer_log import Journal, Place, Turn
from eagle3_lab.evaluation.bootstrap import Interval, ratio_interval
from eagle3_lab.evaluation.figures import figures
from eagle3_lab.evaluation.results import (
    Answered,
    ClosingTable,
    MethodResult,
    OnePass,
    Overall,
    method_result,
    overall_result,
)
from eagle3_lab.evaluation.runner import MEAN, VANILLA, Contestant, Evaluation, check, measure, questions
from eagle3_lab.experiment import Experiment
from eagle3_lab.formats import loading
from eagle3_lab.pipeline.run_folder import identity
from eagle3_lab.pipeline.trained_heads import Heads
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import machine, source_hash
from eagle3_lab.tracking.run import Run, ui_command
from eagle3_lab.training import checkpoint
from eagle3_lab.training.hit_reading import HitReading, read_hits
from eagle3_lab.training.module import DraftModule


@dataclass(frozen=True)
class Measured:
    """What decoding gave: rows as in :class:`ClosingTable`, and what a reader must know of them."""

    rows: tuple[MethodResult, ...] = ()
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ answers


def open_journal(
    experiment: Experiment,
    target: HFTarget,
    held_out: Sequence[Prompt] | None,
    head: Path | None,
    verb: str,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Journal:
    """The journal of this very evaluation, with what earlier processes left in it.

    It is another one for anything that decides an answer or its seconds: the experiment's choices, the target, the
    head and those that methods name (``named``: their hashes), the prompts, this package's code, torch, the machine
    and its threads.

    Raises:
        UserError: a task that cannot be read, or a journal that cannot.
    """
    parts = evaluation_contents(experiment, target, held_out, named) | {
        "verb": verb,
        "head": "" if head is None else _identity(head),
        "code": [source_hash(), torch.__version__, machine()],
    }
    key = experiment.evaluation_key(parts)
    return Journal(experiment.tracking.folder / "work" / f"{experiment.name}-answers-{key}.jsonl")


def evaluation_contents(
    experiment: Experiment, target: HFTarget, held_out: Sequence[Prompt] | None, named: Mapping[str, str]
) -> dict[str, object]:
    """What an evaluation depends on beside its options: the target, every prompt, and the heads that methods name.

    Raises:
        UserError: a task that cannot be read.
    """
    evaluation = experiment.evaluate
    if evaluation is None:
        return {}
    asked = questions(evaluation, held_out)
    return {
        "target": identity(target),
        "asked": [(*place, asdict(prompt)) for place, prompt in asked.items()],
        "methods": {name: named.get(method.head or "", "") for name, method in evaluation.methods.items()},
    }


def _identity(head: Path) -> str:
    """Of a trained head's file, or of a public one's folder or hub id."""
    return checkpoint.content_hash(head) if head.is_file() else loading.content_hash(str(head))


def decode_methods(
    experiment: Experiment,
    target: HFTarget,
    heads: Heads,
    held_out: Sequence[Prompt] | None,
    run: Run,
    journal: Journal,
) -> Measured:
    """Every method on every task under every law, vanilla's rows first. Goes on behind what ``journal`` knows; whether
    it did is tagged and noted."""
    evaluation = experiment.evaluate
    assert evaluation is not None
    notes = [f"head of {name}: {one.path}, sha256 {one.hash[:16]}" for name, one in heads.others.items()]
    plain = _baselines(experiment, evaluation, target)
    contestants = plain + [Contestant(n, method, target, heads.of(method)) for n, method in evaluation.methods.items()]
    asked = questions(evaluation, held_out)
    left = [prompt for place, prompt in asked.items() if place not in journal.known]
    earlier, before = len(asked) - len(left), journal.processes
    if earlier:
        by = "an earlier process" if before == 1 else f"{before} earlier processes"
        notes.append(f"resumed: {earlier} of {len(asked)} prompts were answered and timed by {by}")
        print(f"evaluation: {notes[-1]}; to measure all anew, remove {journal.path}", file=sys.stderr)
    run.set_tags({"evaluation_resumed": f"{earlier} of {len(asked)} prompts" if earlier else "false"})
    if left:
        journal.begin(run.id)
    total = sum(len(prompt.turns) for prompt in left) * len(contestants)
    with stage("evaluation", "answers", total, experiment.budgets.get("evaluation")) as s:
        turns = measure(
            contestants, evaluation, held_out, lambda turn: s.advance(1, tokens=len(turn.decoded.tokens)), journal
        )
    draw = seeds.generator(seeds.bootstrap_seed(experiment.seed, "evaluation"))
    rows, overall = _results(contestants, len(plain), turns, draw)
    return Measured(tuple(rows), tuple(overall), tuple(notes))


def _baselines(experiment: Experiment, evaluation: Evaluation, target: HFTarget) -> list[Contestant]:
    """Vanilla in the target's dtype, and in the other one."""
    found = [Contestant(VANILLA, Vanilla(), target)]
    other = evaluation.other_dtype
    if other is not None and other != target.dtype:
        found.append(Contestant(f"{VANILLA} {_name(other)}", Vanilla(), experiment.target.load(other)))
    return found


# --------------------------------------------------------------------------------------------------------------- rows

Cells = dict[tuple[str, str], list[Answered]]
"""A contestant's answers by law and task."""


def _results(
    contestants: Sequence[Contestant], baselines: int, turns: dict[str, list[Turn]], draw: torch.Generator
) -> tuple[list[MethodResult], list[Overall]]:
    """``baselines``: so many contestants, the first ones, are vanilla, each in a dtype of its own."""
    cells = {name: _by_cell(made) for name, made in turns.items()}
    places = list(cells[contestants[0].name])
    laws, tasks = list(dict.fromkeys(law for law, _ in places)), list(dict.fromkeys(task for _, task in places))
    plain = [c.name for c in contestants[:baselines]]
    shown = {c.name: VANILLA if c.name in plain else c.name for c in contestants}
    base = {c.name: c.name if c.name in plain else VANILLA for c in contestants}
    rows: list[MethodResult] = []
    overall: list[Overall] = []
    for law in laws:
        fastest = max(plain, key=lambda name: _rate([one for task in tasks for one in cells[name][law, task]]))
        own: dict[str, list[MethodResult]] = {c.name: [] for c in contestants}
        for task in tasks:
            for c in contestants:
                sides = (cells[name][law, task] for name in (c.name, base[c.name], fastest))
                row = method_result(
                    shown[c.name],
                    _name(c.target.dtype),
                    *sides,
                    depth=c.method.levels,
                    lossless=c.method.verifier.lossless,
                    generator=draw,
                    law=law,
                    task=task,
                )
                own[c.name].append(row)
                rows.append(row)
        if len(tasks) > 1:
            for c in contestants:
                names = (c.name, base[c.name], fastest)
                sides = ([cells[name][law, task] for task in tasks] for name in names)
                overall.append(overall_result(own[c.name], *sides, generator=draw))
    return rows, overall


def _by_cell(turns: Sequence[Turn]) -> Cells:
    """A prompt's turns together, in the order in which they were asked."""
    prompts: dict[Place, list[Turn]] = {}
    for turn in turns:
        prompts.setdefault(turn.place, []).append(turn)
    cells: Cells = {}
    for place, one in prompts.items():
        answered = Answered(tuple(turn.decoded for turn in one), sum(turn.seconds for turn in one))
        cells.setdefault((place.law, place.task), []).append(answered)
    return cells


def _rate(answered: Sequence[Answered]) -> float:
    return sum(a.tokens for a in answered) / sum(a.seconds for a in answered)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------- logging


def table_metrics(table: ClosingTable) -> dict[str, float]:
    """The closing table as metrics of its run: what the UI compares. ``eval/tau/METHOD`` where one task was measured
    under one law, else ``eval/LAW/TASK/tau/METHOD``, so that a page of charts shows the methods of a quantity side by
    side; of several tasks the mean alone. Bounds and all else of a row are in the runs below, once: that page has a bar
    for every value."""
    found: dict[str, float] = {}
    single = len(table.laws) == len(table.tasks) == 1
    for row in table.overall or table.methods:
        name = row.name if row.name != VANILLA else f"{VANILLA}_{row.dtype}"
        place = "eval" if single else f"eval/{_place(row)}"
        found |= {f"{place}/{quantity}/{name}": value.value for quantity, value in headline(row).items()}
    if table.one_pass is not None:
        walked = table.one_pass.tau_walked
        found |= _bounds("eval/one_pass/tau_walked", walked)
        found["eval/one_pass/tau_expected"] = table.one_pass.tau_expected
        both = zip(table.one_pass.n_alpha_all, table.one_pass.n_alpha_walked, strict=True)
        for n, (every, visited) in enumerate(both):
            found |= {f"eval/one_pass/n_alpha_all/{n}": every, f"eval/one_pass/n_alpha_walked/{n}": visited}
    return found


def _place(row: MethodResult | Overall) -> str:
    return f"{row.law}/{MEAN if isinstance(row, Overall) else row.task}"


def headline(row: MethodResult | Overall) -> dict[str, Interval]:
    """Tau, rate and speed-ups of a row by name."""
    return {
        "tau": row.tau,
        "tokens_per_s": row.tokens_per_s,
        "speedup": row.speedup,
        "speedup_over_fastest": row.speedup_fastest,
    }


def row_metrics(prefix: str, row: MethodResult | Overall) -> dict[str, float]:
    """All of a row's numbers with their bounds, below ``prefix``."""
    found: dict[str, float] = {}
    for quantity, value in headline(row).items():
        found |= _bounds(f"{prefix}/{quantity}", value)
    if isinstance(row, MethodResult):
        found |= _bounds(f"{prefix}/tau_without_loops", row.tau_tidy) | _bounds(f"{prefix}/looping", row.looping)
        found[f"{prefix}/engine_tau"] = row.engine_tau
        for n, alpha in enumerate(row.n_alpha):
            found |= _bounds(f"{prefix}/n_alpha_{n}", alpha)
    return found


def _bounds(name: str, value: Interval) -> dict[str, float]:
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def log_children(experiment: Experiment, table: ClosingTable, run: Run, heads: Heads) -> None:
    """A run below ``run`` for each method: its own configuration as parameters, the file and identity of a head that it
    names as tags, ``LAW/TASK/tau`` and the rest as metrics, whose names are the same for all, so that the UI compares
    them."""
    assert experiment.evaluate is not None
    asked = experiment.choices()["evaluate"]["init_args"]["methods"]
    rows: dict[tuple[str, str], list[MethodResult | Overall]] = {}
    for row in (*table.methods, *table.overall):
        rows.setdefault((row.name, row.dtype), []).append(row)
    for (name, dtype), own in rows.items():
        method = experiment.evaluate.methods.get(name, Vanilla())
        chosen = asked.get(name, {"class_path": type(method).__name__})  # vanilla, or one that a notebook put in
        label = name if name != VANILLA else f"{VANILLA} {dtype}"
        tags = {"lossless": str(own[0].lossless).lower()}
        if method.head is not None:
            tags |= {"checkpoint": str(heads.others[method.head].path), "sha256": heads.others[method.head].hash}
        with run.continued_child(label, tags) as child:
            child.log_params({"method": chosen, "dtype": dtype, "levels": method.levels})
            child.log_metrics({k: v for row in own for k, v in row_metrics(_place(row), row).items()})


def log_figures(table: ClosingTable, run: Run) -> None:
    """Figures as artifacts ``figures/NAME.png``, what they show as ``figures/NAME.json``."""
    for figure in figures(table):
        run.log_figure(figure.draw(figure.records), f"figures/{figure.name}.png")
        run.log_text(json.dumps(figure.records, indent=1) + "\n", f"figures/{figure.name}.json")


def read_held_out(module: DraftModule, data: ConversationData) -> HitReading | None:
    """The hit table over all held-out greedy conversations, by the target itself in its dtype, wherever training read
    its features; None where nothing is held out."""
    if not data.held_out:
        return None
    total = sum(map(len, data.held_out))
    with stage("hit table", "tokens", total) as s:
        batches = (batch for loader in data.val_dataloader() for batch in loader)
        return read_hits(module, batches, on_tokens=s.advance)


def check_evaluation(experiment: Experiment, target: HFTarget, data: ConversationData | None, heads: Heads) -> None:
    """Refuse before training what could not be measured after it. Raises UserError."""
    if experiment.evaluate is not None:
        check(experiment.evaluate, target, heads.of, None if data is None else data.prompts())


def closing_table(
    experiment: Experiment,
    target: HFTarget,
    measured: Measured,
    hits: HitReading | None,
    run: Run,
    draft: Path | None,
) -> ClosingTable:
    """Everything a run closes with; ``draft`` None: no head was measured."""
    evaluation = experiment.evaluate
    said = []
    if evaluation is not None:
        tasks = ", ".join(task.name for task in evaluation.tasks)
        laws = evaluation.by_law
        said = [str(law) if len(laws) == 1 else f"{name}: {law}" for name, law in laws.items()]
        said.append(f"{tasks}: at most {evaluation.max_new_tokens} tokens an answer")
    return ClosingTable(
        setting="; ".join([f"{experiment.name}: target {target.spec.name}", machine_name(target), *said]),
        methods=measured.rows,
        one_pass=None if hits is None else one_pass(hits, experiment.seed),
        run_id=run.id,
        checkpoint="none" if draft is None else str(draft),
        ui=shlex.join(ui_command(experiment.tracking.folder)),
        page=run.page,
        overall=measured.overall,
        notes=measured.notes,
    )


def machine_name(target: HFTarget) -> str:
    """What the target runs on, in words."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"CPU, {torch.get_num_threads()} threads"


def one_pass(hits: HitReading, seed: int) -> OnePass:
    """The hit table's two readings, with an interval over answers for the walked one."""
    depth = len(hits.visited.judged)
    emitted = [sum(r.emitted for r in rounds) for rounds in hits.answers]
    rounds = [len(made) for made in hits.answers]
    return OnePass(
        tau_expected=hits.readings["tau_expected"],
        tau_walked=ratio_interval(emitted, rounds, seeds.generator(seeds.bootstrap_seed(seed, "hits"))),
        n_alpha_all=tuple(hits.readings[f"step_{n}/n_alpha_all"] for n in range(depth)),
        n_alpha_walked=hits.visited.n_alpha,
    )
