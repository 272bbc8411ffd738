"""`fit`: train a head and measure it; what is missing is made first, what is unchanged is used again."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.context import open_training, tracked, with_heads
from eagle3_lab.pipeline.estimate import estimate
from eagle3_lab.pipeline.head_module import check_compiler
from eagle3_lab.pipeline.log_results import CLOSING_JSON, log_data_card, log_setting
from eagle3_lab.pipeline.measure import check_evaluation, evaluation_contents, measure_trained
from eagle3_lab.pipeline.run_folder import require_writable
from eagle3_lab.pipeline.train_head import check_training, load_or_train, train_head
from eagle3_lab.system import distributed
from eagle3_lab.system.files import require_place, write_text
from eagle3_lab.system.malloc import keep_freed_memory


def fit(experiment: Experiment, *, json: Path | None = None, dry_run: bool = False) -> None:
    """Train a draft head on the target's responses and measure it. Where several processes train together, the first
    one makes what is missing, logs, saves and measures.

    Args:
        experiment: that is run.
        json: also write the closing table to this file, as JSON.
        dry_run: estimate tokens, disk, memory and hours, and stop; nothing is made or written.

    Raises:
        UserError: a mistake in the experiment, its data or its target, a disk that is full, or another process that
            does this training.
    """
    if lacks := experiment.lacks():
        raise UserError(
            f"fit: the experiment has no {', no '.join(lacks)}, and without there is nothing to train; add what is "
            "missing, or measure what needs no head with `evaluate`"
        )
    require_place(json, "--json")
    if not dry_run:
        require_writable(experiment.tracking.folder)
        check_compiler(experiment)
        keep_freed_memory()
    context = open_training(experiment, "fit", answer=not dry_run)
    if not distributed.is_first():
        if not dry_run and not context.folder.draft.is_file():
            train_head(context)
        return
    check_training(context)
    context = with_heads(context)
    folder = context.folder.with_evaluation(experiment.evaluation_key(evaluation_contents(context)))
    check_evaluation(context)
    if dry_run:
        print(estimate(context), end="")
        return
    if difference := folder.difference():
        print(difference, file=sys.stderr)
    context = replace(context, folder=folder)
    with folder.lock(), tracked(context, folder.run_id(), folder.state, folder.origin()) as context:
        new_run = folder.run_id() is None
        folder.remember(context.run.id)
        log_setting(context)
        log_data_card(context)
        load_or_train(context, new_run)
        text = measure_trained(context)
    print(text, end="")
    if json is not None:
        write_text(json, (folder.folder / CLOSING_JSON).read_text("utf-8"))
