"""Measuring an experiment: its methods by decoding, and the hit table over held-out text in one pass.

Responses are logged as they come, so a killed evaluation continues.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass

import torch

from eagle3_lab import seeds
from eagle3_lab.decode.methods import Vanilla
from eagle3_lab.evaluation import runner
from eagle3_lab.evaluation.answer_log import AnswerLog
from eagle3_lab.evaluation.bootstrap import ratio_interval
from eagle3_lab.evaluation.results import ClosingTable, MethodResult, OnePass, Overall
from eagle3_lab.evaluation.runner import VANILLA, Contestant, questions
from eagle3_lab.evaluation.table import as_json, as_text
from eagle3_lab.pipeline.context import RunContext, TrainingContext
from eagle3_lab.pipeline.find_head import target_identity
from eagle3_lab.pipeline.log_results import CLOSING_JSON, CLOSING_TEXT, log_closing
from eagle3_lab.pipeline.method_rows import dtype_name, method_rows
from eagle3_lab.system.files import read_object, write_text
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import machine, source_hash
from eagle3_lab.tracking.run import ui_command
from eagle3_lab.training import checkpoint
from eagle3_lab.training.hit_reading import HitReading, read_hits


@dataclass(frozen=True)
class Measured:
    """Results of decoding: rows as in :class:`ClosingTable`, and notes for its reader."""

    rows: tuple[MethodResult, ...] = ()
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...] = ()


def check_evaluation(context: RunContext) -> None:
    """Check, before training, that the evaluation can be done after it. Raises UserError."""
    if context.experiment.evaluate is not None:
        runner.check(context.experiment.evaluate, context.target, context.heads.of, context.held_out)


def evaluation_contents(context: RunContext) -> dict[str, object]:
    """Return what an evaluation depends on beside its options: the target, every prompt, and the heads that methods
    name. Raises UserError for a task that cannot be read."""
    evaluation = context.experiment.evaluate
    if evaluation is None:
        return {}
    hashes = context.heads.hashes()
    return {
        "target": target_identity(context.target),
        "asked": [(*place, asdict(prompt)) for place, prompt in questions(evaluation, context.held_out).items()],
        "methods": {name: hashes.get(method.head or "", "") for name, method in evaluation.methods.items()},
    }


def open_answer_log(context: RunContext, verb: str) -> AnswerLog:
    """Open the append log of this evaluation, with the responses of earlier processes.

    The file's name depends on everything that decides a response or its seconds: the experiment's options, the target,
    all heads, the prompts, this package's code, torch, the machine and its threads.

    Raises:
        UserError: a task or a log that cannot be read.
    """
    parts = evaluation_contents(context) | {
        "verb": verb,
        "head": "" if context.head_place is None else context.head_place.content_hash(),
        "code": [source_hash(), torch.__version__, machine()],
    }
    experiment = context.experiment
    key = experiment.evaluation_key(parts)
    return AnswerLog(experiment.tracking.folder / "work" / f"{experiment.name}-answers-{key}.jsonl")


def measure(context: RunContext, log: AnswerLog | None) -> ClosingTable:
    """Read the hit table, decode with every method if there is an answer ``log``, log all results and return the
    closing table. Raises UserError as `runner.measure`."""
    hits = read_held_out(context)
    measured = Measured() if log is None else decode_methods(context, log)
    table = closing_table(context, measured, hits)
    log_closing(context, table, log)
    return table


def measure_trained(context: TrainingContext) -> str:
    """Return the closing table of a trained head as text: the files in its folder where nothing changed, else measured
    now. Raises UserError as `measure`."""
    folder, run, evaluation = context.folder, context.run, context.experiment.evaluate
    text, json_file = folder.folder / CLOSING_TEXT, folder.folder / CLOSING_JSON
    identity = {"key": folder.key, "run_id": run.id, "head": checkpoint.content_hash(folder.draft)}
    earlier = read_object(json_file)
    if all(earlier.get(name) == value for name, value in identity.items()) and text.is_file():
        with stage("evaluation", "answers", budget_s=context.experiment.budgets.get("evaluation")) as s:
            s.reused()
        return text.read_text("utf-8")
    log = None if evaluation is None else open_answer_log(context, "fit")
    table = measure(context, log)
    write_text(text, as_text(table))
    result = {"key": folder.key, "head": identity["head"], **json.loads(as_json(table))}
    write_text(json_file, json.dumps(result, indent=2) + "\n")
    if log is not None:
        log.remove()
    return as_text(table)


def decode_methods(context: RunContext, log: AnswerLog) -> Measured:
    """Decode with every method on every task under every sampling setting; vanilla's rows come first. Prompts that
    ``log`` contains are not answered again, which a tag and a note report. Raises UserError as `runner.measure`."""
    experiment, heads, held_out = context.experiment, context.heads, context.held_out
    evaluation = experiment.evaluate
    assert evaluation is not None
    notes = [f"head of {name}: {named.path}, sha256 {named.hash[:16]}" for name, named in heads.others.items()]
    baselines = _baselines(context)
    methods = [Contestant(n, method, context.target, heads.of(method)) for n, method in evaluation.methods.items()]
    contestants = baselines + methods
    prompts = questions(evaluation, held_out)
    left = [prompt for place, prompt in prompts.items() if place not in log.known]
    earlier = len(prompts) - len(left)
    if earlier:
        by = "an earlier process" if log.processes == 1 else f"{log.processes} earlier processes"
        notes.append(f"resumed: {earlier} of {len(prompts)} prompts were answered and timed by {by}")
        print(f"evaluation: {notes[-1]}; to measure all anew, remove {log.path}", file=sys.stderr)
    context.run.set_tags({"evaluation_resumed": f"{earlier} of {len(prompts)} prompts" if earlier else "false"})
    if left:
        log.begin(context.run.id)
    total = sum(len(prompt.turns) for prompt in left) * len(contestants)
    with stage("evaluation", "answers", total, experiment.budgets.get("evaluation")) as s:
        turns = runner.measure(
            contestants, evaluation, held_out, lambda turn: s.advance(1, tokens=len(turn.decoded.tokens)), log
        )
    generator = seeds.generator(seeds.bootstrap_seed(experiment.seed, "evaluation"))
    rows, overall = method_rows(contestants, len(baselines), turns, generator)
    return Measured(tuple(rows), tuple(overall), tuple(notes))


def _baselines(context: RunContext) -> list[Contestant]:
    """Return vanilla decoding in the target's dtype, and in ``evaluate.other_dtype``."""
    baselines = [Contestant(VANILLA, Vanilla(), context.target)]
    assert context.experiment.evaluate is not None
    other = context.experiment.evaluate.other_dtype
    if other is not None and other != context.target.dtype:
        target = context.experiment.target.load(other)
        baselines.append(Contestant(f"{VANILLA} {dtype_name(other)}", Vanilla(), target))
    return baselines


def read_held_out(context: RunContext) -> HitReading | None:
    """Read the hit table over all held-out greedy conversations, with features that the target computes now in its
    dtype; None without a head or held-out data."""
    module, data = context.module, context.data
    if module is None or data is None or not data.held_out:
        return None
    with stage("hit table", "tokens", sum(map(len, data.held_out))) as s:
        batches = (batch for loader in data.val_dataloader() for batch in loader)
        return read_hits(module, batches, on_tokens=s.advance)


def closing_table(context: RunContext, measured: Measured, hits: HitReading | None) -> ClosingTable:
    """Return the closing table of a run."""
    experiment, target, evaluation = context.experiment, context.target, context.experiment.evaluate
    setting = [f"{experiment.name}: target {target.spec.name}", machine_name(target)]
    if evaluation is not None:
        laws, tasks = evaluation.by_law, ", ".join(task.name for task in evaluation.tasks)
        setting += [str(law) if len(laws) == 1 else f"{name}: {law}" for name, law in laws.items()]
        setting.append(f"{tasks}: at most {evaluation.max_new_tokens} tokens an answer")
    return ClosingTable(
        setting="; ".join(setting),
        methods=measured.rows,
        one_pass=None if hits is None else one_pass(hits, experiment.seed),
        run_id=context.run.id,
        checkpoint="none" if context.head_place is None else str(context.head_place.path),
        ui=shlex.join(ui_command(experiment.tracking.folder)),
        page=context.run.page,
        overall=measured.overall,
        notes=measured.notes,
    )


def machine_name(target: HFTarget) -> str:
    """Return the name of the device that the target runs on."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"CPU, {torch.get_num_threads()} threads"


def one_pass(hits: HitReading, seed: int) -> OnePass:
    """Return both readings of the hit table; the walked one's interval resamples answers."""
    depth = len(hits.visited.judged)
    emitted = [sum(r.emitted for r in rounds) for rounds in hits.answers]
    rounds = [len(answer) for answer in hits.answers]
    return OnePass(
        tau_expected=hits.readings["tau_expected"],
        tau_walked=ratio_interval(emitted, rounds, seeds.generator(seeds.bootstrap_seed(seed, "hits"))),
        n_alpha_all=tuple(hits.readings[f"step_{n}/n_alpha_all"] for n in range(depth)),
        n_alpha_walked=hits.visited.n_alpha,
    )
