"""`fit`: everything from a YAML to a measured head, making what is missing and reusing what is unchanged."""

from __future__ import annotations

import json as json_module
import logging
import warnings
from pathlib import Path

from eagle3_lab.commands import stages
from eagle3_lab.commands.estimate import estimate
from eagle3_lab.commands.files import write_text
from eagle3_lab.data.module import ConversationData
from eagle3_lab.decode.methods import Head
from eagle3_lab.experiment import Experiment
from eagle3_lab.progress import stage
from eagle3_lab.provenance import provenance
from eagle3_lab.report.table import ClosingTable, as_json, as_markdown, as_text
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.tracking import Run, open_run
from eagle3_lab.train import DraftModule

CLOSING_TEXT, CLOSING_JSON = "closing.txt", "closing.json"


def fit(experiment: Experiment, *, json: Path | None = None, dry_run: bool = False) -> None:
    """Train a draft head on the target's answers and measure it.

    Args:
        experiment: what is run.
        json: also write the closing table there, for machines.
        dry_run: estimate tokens, disk, memory and hours, and stop.
    """
    quiet_lightning()
    target = stages.load_target(experiment)
    data = stages.build_data(experiment, target)
    work = stages.Work.of(experiment, target, data)
    if dry_run:
        print(estimate(experiment, stages.build_module(experiment, target, data), data), end="")
        return
    with open_run(experiment.tracking, work.run_id(), provenance(experiment.seed, data.hash)) as run:
        work.remember(run.id)
        log_setting(experiment, data, run)
        module = trained(experiment, target, data, run, work)
        text = closed(experiment, target, data, module, run, work)
    print(text, end="")
    if json is not None:
        write_text(json, (work.folder / CLOSING_JSON).read_text())


def trained(
    experiment: Experiment, target: HFTarget, data: ConversationData, run: Run, work: stages.Work
) -> DraftModule:
    """The trained module: from its checkpoint where this very training is done, else trained now."""
    module = stages.build_module(experiment, target, data)
    if stages.checkpoint.usable(work.draft):
        with stage("training", "steps", budget_s=experiment.budgets.get("training")) as s:
            s.reused()
    else:
        run.set_tags(stages.train_head(experiment, module, data, run, work))
        run.log_artifact(work.draft, "checkpoint")
    stages.checkpoint.restore(work.draft, target, module.source, module.draft)
    return module.to(target.device).eval()


def closed(
    experiment: Experiment,
    target: HFTarget,
    data: ConversationData,
    module: DraftModule,
    run: Run,
    work: stages.Work,
) -> str:
    """The closing table as text: measured now, or as it was where nothing changed."""
    key = experiment.key(target.spec.weights_hash, data.hash, without=("name", "tracking", "budgets"))
    told = work.folder / CLOSING_JSON
    if told.is_file() and json_module.loads(told.read_text()).get("key") == key:
        with stage("evaluation", "answers", budget_s=experiment.budgets.get("evaluation")) as s:
            s.reused()
        return (work.folder / CLOSING_TEXT).read_text()
    hits = stages.read_held_out(module, data)
    rows = ()
    if experiment.evaluate is not None:
        head = Head(module.source, module.draft)
        rows = stages.decode_methods(experiment, experiment.evaluate, target, head, data)
    table = stages.closing_table(experiment, target, rows, hits, run, work.draft)
    log_closing(table, run)
    write_text(work.folder / CLOSING_TEXT, as_text(table))
    write_text(told, json_module.dumps({"key": key, **json_module.loads(as_json(table))}, indent=2) + "\n")
    return as_text(table)


def log_setting(experiment: Experiment, data: ConversationData, run: Run) -> None:
    """What was asked for: parameters, the configuration as a file that runs again, the data's manifest."""
    if experiment.config is not None:
        run.log_params(experiment.config.plain)
        run.log_text(experiment.config.logged_yaml, "config.yaml")
    run.log_text(json_module.dumps(data.manifest(), indent=2) + "\n", "data.json")
    run.log_text(data.summary() + "\n", "data.txt")


def log_closing(table: ClosingTable, run: Run) -> None:
    run.log_metrics(stages.table_metrics(table))
    run.describe(as_markdown(table))
    run.log_text(as_text(table), "closing.txt")
    run.log_text(as_json(table), "closing.json")


def quiet_lightning() -> None:
    """Lightning's banners and hints say nothing that our stages do not; its warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
