"""What a run closes with: the hit table over held-out text, and one table of all that was measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from eagle3_lab import seeds
from eagle3_lab.commands.heads import Heads
from eagle3_lab.commands.measuring import Measured
from eagle3_lab.data.module import ConversationData
from eagle3_lab.evaluation import check
from eagle3_lab.experiment import Experiment
from eagle3_lab.hits import HitReading, read_hits
from eagle3_lab.intervals import ratio_interval
from eagle3_lab.progress import stage
from eagle3_lab.report.results import ClosingTable, OnePass
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.tracking import Run, ui_command
from eagle3_lab.train import DraftModule


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
        setting="; ".join([f"{experiment.name}: target {target.spec.name}", machine(target), *said]),
        methods=measured.rows,
        one_pass=None if hits is None else one_pass(hits, experiment.seed),
        run_id=run.id,
        checkpoint="none" if draft is None else str(draft),
        ui=shlex.join(ui_command(experiment.tracking.folder)),
        page=run.page,
        overall=measured.overall,
        notes=measured.notes,
    )


def machine(target: HFTarget) -> str:
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
