"""`evaluate`: measure methods by decoding on any tasks, with and without trained heads."""

from __future__ import annotations

from pathlib import Path

from eagle3_lab.data.tasks import HELD_OUT
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.results import ClosingTable
from eagle3_lab.evaluation.table import as_json, as_text
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.context import open_evaluation, tracked, with_heads
from eagle3_lab.pipeline.find_head import check_model
from eagle3_lab.pipeline.log_results import log_setting
from eagle3_lab.pipeline.measure import check_evaluation, measure, open_answer_log
from eagle3_lab.pipeline.run_folder import require_writable
from eagle3_lab.pipeline.serving import ServingTable, log_serving, serve
from eagle3_lab.system.files import require_place, write_text


def evaluate(
    experiment: Experiment, *, checkpoint_path: Path | None = None, json: Path | None = None
) -> ClosingTable | ServingTable:
    """Measure acceptance, length and speed by decoding, in a run of its own with a nested run for each method.

    A killed evaluation continues after the last prompt that every method had answered.

    Args:
        experiment: its ``evaluate`` section lists what is measured. Without ``model`` no head is measured, and without
            ``data`` there are no held-out prompts.
        checkpoint_path: the trained head; by default the one that `fit` trained of this experiment, and before that
            the experiment's public head as it is.
        json: also write the table to this file, as JSON.

    Returns:
        The closing table, which is also printed; with an ``engine``, the table of its batch sizes.

    Raises:
        UserError: no ``evaluate`` section, no trained head or one for another target, or as `runner.measure`.
    """
    _check_sections(experiment, checkpoint_path)
    require_place(json, "--json")
    require_writable(experiment.tracking.folder)
    context = open_evaluation(experiment, checkpoint_path)
    tags = {} if context.head_place is None else {"checkpoint": str(context.head_place.path)}
    if experiment.engine is not None:
        with tracked(context, None, None, tags) as context:
            log_setting(context)
            serving = serve(context, experiment.engine)
            log_serving(serving, context.run)
        _finish(serving.text(), serving.json(), json)
        return serving
    context = with_heads(context)
    check_evaluation(context)
    log = open_answer_log(context, "evaluate")
    with tracked(context, log.run_id, log.path, tags) as context:
        log_setting(context)
        table = measure(context, log)
    log.remove()
    _finish(as_text(table), as_json(table), json)
    return table


def _finish(text: str, json_text: str, json: Path | None) -> None:
    print(text, end="")
    if json is not None:
        write_text(json, json_text)


def _check_sections(experiment: Experiment, checkpoint_path: Path | None) -> None:
    """Check, before a target is loaded, that no section is missing. Raises UserError."""
    evaluation = experiment.evaluate
    if evaluation is None:
        raise UserError("evaluate: the experiment has no such section; add it, with its tasks and methods")
    if experiment.model is None:
        for name, method in evaluation.methods.items():
            if method.needs_own_head:
                raise UserError(
                    f"evaluate.methods.{name}: needs a trained head, and the experiment has no model; name in its "
                    "`head` who trained one, add the sections it was trained with, or leave the method out"
                )
        check_model(experiment, checkpoint_path)
    elif lacks := experiment.lacks():
        raise UserError(
            f"evaluate: the experiment has a model, but no {', no '.join(lacks)}; add what it was trained with, or "
            "take the model out and measure methods that need no head"
        )
    if experiment.data is None and any(task.name == HELD_OUT and task.path is None for task in evaluation.tasks):
        raise UserError("task held_out: needs the experiment's data section, whose held-out prompts it uses")
