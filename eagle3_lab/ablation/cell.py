"""One cell: train its head, read the hit table, write the result. Everything is made once and reused: target, answers,
features, a head that another cell of the same configuration trained, a training that was killed."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime

import torch

from eagle3_lab.ablation import decoding, results, runs
from eagle3_lab.ablation.identity import cell_options
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.ablation.results import Result
from eagle3_lab.config import build
from eagle3_lab.config.reading import label
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import measure
from eagle3_lab.pipeline.context import open_training
from eagle3_lab.pipeline.head_module import check_compiler
from eagle3_lab.pipeline.log_results import log_setting
from eagle3_lab.pipeline.run_folder import require_writable
from eagle3_lab.pipeline.train_head import check_training, load_or_train
from eagle3_lab.system.malloc import keep_freed_memory
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import machine, provenance
from eagle3_lab.tracking.run import Run
from eagle3_lab.training.hit_reading import HitReading


def run_cell(ablation: Ablation, cell: Cell) -> Result:
    """Return the result of a cell: the one that is there, that of a cell of the same configuration, or a new one, which
    is then written into the ablation's folder.

    Raises:
        UserError: a mistake in the cell's experiment, its data or its target, no held-out conversation, a disk that is
            full, or this training under way in another process.
    """
    path = results.place(ablation, cell)
    before = results.find(ablation, cell)
    sibling = None if before is not None else results.of_a_sibling(ablation, cell)
    experiment = build(cell.config)
    require_writable(ablation.tracking.folder)
    with runs.parent_run(ablation) as parent:
        if before is None and sibling is None:
            return _measured(ablation, cell, experiment, parent)
        if sibling is not None:
            there, same = sibling
            facts = {**same.facts, "reused_from": "/".join(there.parts[-3:])}
            before = replace(same, cell=cell.name, scale=cell.scale, settings=cell.settings, facts=facts)
            results.write(path, before)
        assert before is not None
        runs.log_reused(parent, ablation, cell, before, experiment)
    return before


def _measured(ablation: Ablation, cell: Cell, experiment: Experiment, parent: Run) -> Result:
    """Train and measure a cell, in its run below ``parent``."""
    began = time.monotonic()
    if lacks := experiment.lacks():
        raise UserError(
            f"cells.{cell.name}: the experiment has no {', no '.join(lacks)}; add what a head is trained with"
        )
    check_compiler(experiment)
    keep_freed_memory()
    context = open_training(experiment, "ablate")
    target, data, folder = context.target, context.data, context.folder
    if not data.held_out:
        raise UserError(
            f"cells.{cell.name}: data holds out no conversation, and cells are compared by those; see held_out"
        )
    check_training(context)
    decoding.check_cell(ablation, cell, target, data, context.module)
    with folder.lock():
        new_run = folder.run_id() is None
        tags = provenance(experiment.seed, data.hash) | folder.origin()
        with runs.cell_run(parent, ablation, cell, tags) as run:
            folder.remember(run.id)
            context = replace(context, tracker=run)
            log_setting(context)
            load_or_train(context, new_run)
            hits = measure.read_held_out(context)
            assert hits is not None
            result = _result(cell, experiment, target, data, hits, run, time.monotonic() - began)
            results.write(results.place(ablation, cell), result)
            runs.log_result(run, result)
    return result


def _result(
    cell: Cell,
    experiment: Experiment,
    target: HFTarget,
    data: ConversationData,
    hits: HitReading,
    run: Run,
    seconds: float,
) -> Result:
    ids = [data.held_out[i].conversation.id for i in data.held_out_order()]
    result = Result(
        cell=cell.name,
        scale=cell.scale,
        seed=cell.seed,
        key=cell.key,
        settings=cell.settings,
        configuration=cell_options(cell.config),
        values={},
        conversations=results.by_conversation(ids, hits.documents),
        facts=_facts(experiment, target, data, run, seconds),
    )
    losses = {name: run.values(f"{name}/loss")[-1:] for name in ("train", "val")}
    found = {f"{name}_loss": round(last[0], 6) for name, last in losses.items() if last}
    return replace(result, values={**results.values_of(result), **found})


def _facts(
    experiment: Experiment, target: HFTarget, data: ConversationData, run: Run, seconds: float
) -> dict[str, object]:
    """What a reader of the file must know; seconds of training are its steps at their median rate."""
    trainer, loader = experiment.trainer, data.train_dataloader()
    assert trainer is not None
    steps, a_pass = trainer.steps(len(loader)), sum(map(len, data.train))
    tokens = round(a_pass * steps / trainer.steps_a_pass(len(loader)))
    rates = run.values("train/tokens_per_second")
    rate = statistics.median(rates) if rates else None
    return {
        "data": data.hash,
        "file": label(data.file),
        "conversations": len({one.conversation.id for one in data.train}),
        "held_out": len({one.conversation.id for one in data.held_out}),
        "steps": steps,
        "tokens": tokens,
        "tokens_per_second": None if rate is None else round(rate, 1),
        "training_seconds": None if rate is None else round(tokens / rate, 1),
        "process_seconds": round(seconds, 1),
        "target": target.spec.name,
        "weights": target.spec.weights_hash,
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "run": run.id,
        **machine(),
        **runs.commit(),
    }
