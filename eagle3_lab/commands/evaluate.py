"""`evaluate`: measure a trained head by decoding, beside whatever else the experiment names."""

from __future__ import annotations

from pathlib import Path

from eagle3_lab import checkpoint
from eagle3_lab.commands import stages
from eagle3_lab.commands.files import write_text
from eagle3_lab.commands.fit import log_closing, log_setting
from eagle3_lab.commands.work import Work, require_writable
from eagle3_lab.decode.methods import Head
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.provenance import provenance
from eagle3_lab.report.table import as_json, as_text
from eagle3_lab.tracking import open_run


def evaluate(experiment: Experiment, *, checkpoint_path: Path | None = None, json: Path | None = None) -> None:
    """Measure acceptance, length and speed by decoding, in a run of its own.

    Args:
        experiment: its ``evaluate`` section says what is measured.
        checkpoint_path: the trained head; by default the one that `fit` made of this very experiment, and before that
            the experiment's public head as it is.
        json: also write the closing table there, for machines.

    Raises:
        UserError: no ``evaluate`` section, no trained head or one of another target, or what `measure` refuses.
    """
    if experiment.evaluate is None:
        raise UserError("evaluate: the experiment has no such section; say which tasks and methods")
    require_writable(experiment.tracking.folder)
    target = stages.load_target(experiment)
    data = stages.build_data(experiment, target)
    path = Work.of(experiment, target, data).draft if checkpoint_path is None else checkpoint_path
    public = None if checkpoint_path is not None or path.is_file() else experiment.model.public
    if checkpoint_path is None and not path.is_file() and public is None:
        raise UserError(f"{path}: this experiment has no trained head yet; run `fit`, or give --checkpoint-path")
    module = stages.build_module(experiment, target, data)
    if public is None:
        checkpoint.restore(path, target, module.source, module.draft)
    else:
        path = Path(public)  # `build_module` has read it
    module = module.to(target.device).eval()
    stages.check_evaluation(experiment, target, data, module)
    tags = {**provenance(experiment.seed, data.hash), "checkpoint": str(path)}
    with open_run(experiment.named_tracking(), tags=tags) as run:
        log_setting(experiment, data, run)
        hits = stages.read_held_out(module, data)
        rows = stages.decode_methods(experiment, experiment.evaluate, target, Head(module.source, module.draft), data)
        table = stages.closing_table(experiment, target, rows, hits, run, path)
        log_closing(table, run)
    print(as_text(table), end="")
    if json is not None:
        write_text(json, as_json(table))
