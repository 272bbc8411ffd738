"""`fit`: everything from a YAML to a measured head, making what is missing and reusing what is unchanged."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from eagle3_lab.data.module import ConversationData
from eagle3_lab.decode.methods import Head
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.answer_log import Journal
from eagle3_lab.evaluation.results import ClosingTable
from eagle3_lab.evaluation.table import as_json, as_markdown, as_text
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline import inputs, measure, train_head
from eagle3_lab.pipeline.data_card import card_text, data_card
from eagle3_lab.pipeline.estimate import estimate
from eagle3_lab.pipeline.run_folder import STATE, Work, require_writable
from eagle3_lab.pipeline.trained_heads import Heads, gather
from eagle3_lab.system import distributed
from eagle3_lab.system.files import read_object, require_place, write_text
from eagle3_lab.system.malloc import keep_freed_memory
from eagle3_lab.system.progress import stage
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.provenance import provenance
from eagle3_lab.tracking.run import Run, open_run
from eagle3_lab.training import checkpoint
from eagle3_lab.training.module import DraftModule

CLOSING_TEXT, CLOSING_JSON = "closing.txt", "closing.json"
DESCRIPTION = 8000  # characters of a run's text in MLflow, which cuts a longer one anywhere


def fit(experiment: Experiment, *, json: Path | None = None, dry_run: bool = False) -> None:
    """Train a draft head on the target's answers and measure it. Where several processes train together, the first one
    makes what is missing, logs, saves and measures.

    Args:
        experiment: what is run.
        json: also write the closing table there, for machines.
        dry_run: estimate tokens, disk, memory and hours, and stop; nothing is made or written.

    Raises:
        UserError: a mistake in the experiment, its data or its target, a disk that is full, or this training
            under way in another process.
    """
    if lacks := experiment.lacks():
        raise UserError(
            f"fit: the experiment has no {', no '.join(lacks)}, and without there is nothing to train; add what is "
            "missing, or measure what needs no head with `evaluate`"
        )
    require_place(json, "--json")
    if not dry_run:
        require_writable(experiment.tracking.folder)
        train_head.check_compiler(experiment)
        keep_freed_memory()
    target = inputs.load_target(experiment)
    data = inputs.build_data(experiment, target, answer=not dry_run)
    module = train_head.build_module(experiment, target, data)
    work = Work.of(experiment, target, data)
    if not distributed.is_first():
        if not dry_run and not work.draft.is_file():
            train_head.train_head(experiment, module, data, None, work)
        return
    train_head.check_rows(module, data)
    train_head.check_features(experiment, target, data, module)
    heads = _heads(experiment, target, module)
    parts = measure.evaluation_contents(experiment, target, data.prompts(), heads.hashes())
    work = work.measured(experiment.evaluation_key(parts))
    measure.check_evaluation(experiment, target, data, heads)
    if dry_run:
        print(estimate(experiment, module, data), end="")
        return
    if news := work.news():
        print(news, file=sys.stderr)
    with work.held(), continued(experiment, data, work) as run:
        fresh = work.run_id() is None
        work.remember(run.id)
        log_setting(experiment, data, run)
        card = data_card(data, train_head.draft_vocabulary(experiment, target, data), target.spec.vocab)
        run.log_text(card_text(card), "data_card.txt")
        run.log_text(json_module.dumps(card, indent=2) + "\n", "data_card.json")
        module = trained(experiment, target, data, module, run, work, fresh)
        text = closed(experiment, target, data, module, run, work)
    print(text, end="")
    if json is not None:
        write_text(json, (work.folder / CLOSING_JSON).read_text("utf-8"))


def continued(experiment: Experiment, data: ConversationData, work: Work) -> Run:
    """The run of this very experiment, or a new one. Raises UserError where the store has lost it."""
    run_id = work.run_id()
    tags = provenance(experiment.seed, data.hash) | work.origin()
    try:
        return open_run(experiment.named_tracking(), run_id, tags)
    except UserError as error:
        if run_id is None:
            raise
        raise UserError(f"{error}; restore it, or remove {work.folder / STATE} for a new run") from None


def trained(
    experiment: Experiment,
    target: HFTarget,
    data: ConversationData,
    module: DraftModule,
    run: Run,
    work: Work,
    fresh: bool = False,
) -> DraftModule:
    """The trained module: from its checkpoint where this very training is done, else trained now. ``fresh``: the run
    is a new one, which knows no checkpoint yet."""
    if work.draft.is_file() and not checkpoint.usable(work.draft):
        raise UserError(f"{work.draft}: is damaged; remove it, and training goes on from its last checkpoint")
    if work.draft.is_file():
        if fresh:
            run.log_artifact(work.draft, "checkpoint")
        with stage("training", "steps", budget_s=experiment.budgets.get("training")) as s:
            s.reused()
    else:
        train_head.train_head(experiment, module, data, run, work)
        run.log_artifact(work.draft, "checkpoint")
    checkpoint.restore(work.draft, target, module.source, module.draft)
    return module.to(target.device).eval()


def closed(
    experiment: Experiment, target: HFTarget, data: ConversationData, module: DraftModule, run: Run, work: Work
) -> str:
    """The closing table as text: measured now, or as it was where nothing changed."""
    told, text = work.folder / CLOSING_JSON, work.folder / CLOSING_TEXT
    before, head = read_object(told), checkpoint.content_hash(work.draft)
    if [before.get(name) for name in ("key", "run_id", "head")] == [work.key, run.id, head] and text.is_file():
        with stage("evaluation", "answers", budget_s=experiment.budgets.get("evaluation")) as s:
            s.reused()
        return text.read_text("utf-8")
    hits = measure.read_held_out(module, data)
    measured, journal, heads = measure.Measured(), None, Heads()
    if experiment.evaluate is not None:
        held_out, heads = data.prompts(), _heads(experiment, target, module)
        journal = measure.open_journal(experiment, target, held_out, work.draft, "fit", heads.hashes())
        measured = measure.decode_methods(experiment, target, heads, held_out, run, journal)
    table = measure.closing_table(experiment, target, measured, hits, run, work.draft)
    log_closing(experiment, table, run, journal, heads)
    write_text(text, as_text(table))
    found = {"key": work.key, "head": head, **json_module.loads(as_json(table))}
    write_text(told, json_module.dumps(found, indent=2) + "\n")
    if journal is not None:
        journal.remove()
    return as_text(table)


def _heads(experiment: Experiment, target: HFTarget, module: DraftModule) -> Heads:
    methods = {} if experiment.evaluate is None else experiment.evaluate.methods
    return gather(Head(module.source, module.draft, target.record), methods, experiment, target)


def log_setting(experiment: Experiment, data: ConversationData | None, run: Run) -> None:
    """What was asked for: parameters, the configuration as a file that runs again, the data's manifest."""
    run.log_params(experiment.choices())
    if experiment.config is not None:
        run.log_text(experiment.config.logged_yaml, "config.yaml")
    if data is not None:
        run.log_text(json_module.dumps(data.manifest(), indent=2) + "\n", "data.json")
        run.log_text(data.summary() + "\n", "data.txt")


def log_closing(experiment: Experiment, table: ClosingTable, run: Run, journal: Journal | None, heads: Heads) -> None:
    """The closing table, as metrics, as the text of the run's page, as files and as figures; a run below it for each
    method; and all answers."""
    run.log_metrics(measure.table_metrics(table))
    run.describe(as_markdown(table, most=DESCRIPTION))
    run.log_text(as_text(table), "closing.txt")
    run.log_text(as_json(table), "closing.json")
    if journal is not None:
        run.log_text(journal.path.read_text(), "answers.jsonl")
        measure.log_children(experiment, table, run, heads)
        measure.log_figures(table, run)
