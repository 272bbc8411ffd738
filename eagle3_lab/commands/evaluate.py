"""`evaluate`: measure methods by decoding, a trained head's and those that need none, on any tasks under any laws."""

from __future__ import annotations

from pathlib import Path

from eagle3_lab.commands.fit import log_closing, log_setting
from eagle3_lab.commands.serving import ServingTable, log_serving, serve
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.tasks import HELD_OUT
from eagle3_lab.decode.methods import Head
from eagle3_lab.engine import Engine
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.answer_log import Journal
from eagle3_lab.evaluation.results import ClosingTable
from eagle3_lab.evaluation.table import as_json, as_text
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs, measure, train_head
from eagle3_lab.pipeline.run_folder import Work, beginning, find_head, require_writable
from eagle3_lab.pipeline.trained_heads import gather, require_model
from eagle3_lab.system.files import require_place, write_text
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import provenance
from eagle3_lab.tracking.run import Run, open_run
from eagle3_lab.training import checkpoint
from eagle3_lab.training.module import DraftModule


def evaluate(
    experiment: Experiment, *, checkpoint_path: Path | None = None, json: Path | None = None
) -> ClosingTable | ServingTable:
    """Measure acceptance, length and speed by decoding, in a run of its own with a run below it for each method.

    Killed, the same evaluation goes on after the last prompt that every method had answered.

    Args:
        experiment: its ``evaluate`` section says what is measured. Without ``model`` no head is, and without ``data``
            no held-out prompts are asked.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment, and before that
            the experiment's public head as it is.
        json: also write the closing table there, for machines.

    Returns:
        The closing table, which is also printed; with an ``engine``, the table of its batch sizes.

    Raises:
        UserError: no ``evaluate`` section, no trained head or one of another target, or what `measure` refuses.
    """
    _require_sections(experiment, checkpoint_path)
    require_place(json, "--json")
    require_writable(experiment.tracking.folder)
    target = inputs.load_target(experiment)
    data = None
    if experiment.data is not None:
        data = inputs.build_data(experiment, target, answer=experiment.model is not None)
    path, module = _trained(experiment, target, data, checkpoint_path)
    head = None if module is None else Head(module.source, module.draft, target.record)
    assert experiment.evaluate is not None
    if experiment.engine is not None:
        return _served(experiment, experiment.engine, target, data, path, module, json)
    heads = gather(head, experiment.evaluate.methods, experiment, target)
    measure.check_evaluation(experiment, target, data, heads)
    held_out = None if data is None else data.prompts()
    journal = measure.open_journal(experiment, target, held_out, path, "evaluate", heads.hashes())
    with _run(experiment, journal, data, path) as run:
        log_setting(experiment, data, run)
        hits = None if module is None or data is None else measure.read_held_out(module, data)
        measured = measure.decode_methods(experiment, target, heads, held_out, run, journal)
        table = measure.closing_table(experiment, target, measured, hits, run, path)
        log_closing(experiment, table, run, journal, heads)
    journal.remove()
    print(as_text(table), end="")
    if json is not None:
        write_text(json, as_json(table))
    return table


def _served(
    experiment: Experiment,
    engine: Engine,
    target: HFTarget,
    data: ConversationData | None,
    path: Path | None,
    module: DraftModule | None,
    json: Path | None,
) -> ServingTable:
    """Measure throughput and acceptance in a serving engine, in a run of its own."""
    assert experiment.evaluate is not None
    head = None if module is None else Head(module.source, module.draft, target.record)
    tags = provenance(experiment.seed, "none" if data is None else data.hash)
    tags |= {} if path is None else {"checkpoint": str(path)}
    with open_run(experiment.named_tracking(), None, tags) as run:
        log_setting(experiment, data, run)
        table = serve(engine, experiment.evaluate, target, head, data)
        log_serving(table, run)
    print(table.text(), end="")
    if json is not None:
        write_text(json, table.json())
    return table


def _require_sections(experiment: Experiment, checkpoint_path: Path | None) -> None:
    """What can be told from the YAML alone, before a target is loaded."""
    evaluation = experiment.evaluate
    if evaluation is None:
        raise UserError("evaluate: the experiment has no such section; say which tasks and methods")
    if experiment.model is None:
        for name, method in evaluation.methods.items():
            if method.needs_own_head:
                raise UserError(
                    f"evaluate.methods.{name}: needs a trained head, and the experiment has no model; name in its "
                    "`head` who trained one, add the sections it was trained with, or leave the method out"
                )
        require_model(experiment, checkpoint_path)
    elif lacks := experiment.lacks():
        raise UserError(
            f"evaluate: the experiment has a model, but no {', no '.join(lacks)}; add what it was trained with, or "
            "take the model out and measure methods that need no head"
        )
    if experiment.data is None and any(task.name == HELD_OUT and task.path is None for task in evaluation.tasks):
        raise UserError("task held_out: needs the experiment's data section, whose held-out prompts it asks")


def _trained(
    experiment: Experiment, target: HFTarget, data: ConversationData | None, given: Path | None
) -> tuple[Path | None, DraftModule | None]:
    """The experiment's head and where it lies; nothing for an experiment without a model."""
    if experiment.model is None:
        return None, None
    assert data is not None
    place = None if given is None else find_head(str(given), experiment, target)
    path = Work.of(experiment, target, data).draft if place is None else place.path
    public = None if given is not None or path.is_file() else experiment.model.public
    if given is None and not path.is_file() and public is None:
        raise UserError(f"{path}: this experiment has no trained head yet; run `fit`, or give --checkpoint-path")
    module = train_head.build_module(experiment, target, data)
    size = experiment.model.vocabulary_size(target.spec)
    if place is not None:
        place.load(target, module.source, module.draft, draft_vocab=size)
    elif public is None:
        checkpoint.restore(path, target, module.source, module.draft, draft_vocab=size)
    else:
        start = beginning(experiment, target)  # `build_module` has read it
        assert start is not None
        path = start.path
    return path, module.to(target.device).eval()


def _run(experiment: Experiment, journal: Journal, data: ConversationData | None, path: Path | None) -> Run:
    """A new run, or that of the killed process that began this evaluation."""
    tags = provenance(experiment.seed, "none" if data is None else data.hash)
    tags |= {} if path is None else {"checkpoint": str(path)}
    try:
        return open_run(experiment.named_tracking(), journal.run_id, tags)
    except UserError as error:
        if journal.run_id is None:
            raise
        raise UserError(f"{error}; restore it, or remove {journal.path} for a new run") from None
