"""What a run logs beside its training's metrics: settings, data, the closing table, and a run for each method."""

from __future__ import annotations

import json

from eagle3_lab.decode.methods import Vanilla
from eagle3_lab.evaluation.answer_log import AnswerLog
from eagle3_lab.evaluation.bootstrap import Interval
from eagle3_lab.evaluation.figures import figures
from eagle3_lab.evaluation.results import ClosingTable, MethodResult, Overall
from eagle3_lab.evaluation.runner import MEAN, VANILLA
from eagle3_lab.evaluation.table import as_json, as_markdown, as_text
from eagle3_lab.pipeline.context import RunContext, TrainingContext
from eagle3_lab.pipeline.data_card import card_text, data_card
from eagle3_lab.pipeline.head_module import draft_vocabulary

CLOSING_TEXT, CLOSING_JSON = "closing.txt", "closing.json"
DESCRIPTION = 8000  # characters of the text on a run's page; MLflow cuts a longer one anywhere


def log_setting(context: RunContext) -> None:
    """Log the experiment's options as parameters, its configuration as a YAML file, and the data's manifest."""
    experiment, data, run = context.experiment, context.data, context.run
    run.log_params(experiment.choices())
    if experiment.config is not None:
        run.log_text(experiment.config.logged_yaml, "config.yaml")
    if data is not None:
        run.log_text(json.dumps(data.manifest(), indent=2) + "\n", "data.json")
        run.log_text(data.summary() + "\n", "data.txt")


def log_data_card(context: TrainingContext) -> None:
    """Log the data card as text and as JSON."""
    vocabulary = draft_vocabulary(context.experiment, context.target, context.data)
    card = data_card(context.data, vocabulary, context.target.spec.vocab)
    context.run.log_text(card_text(card), "data_card.txt")
    context.run.log_text(json.dumps(card, indent=2) + "\n", "data_card.json")


def log_closing(context: RunContext, table: ClosingTable, log: AnswerLog | None) -> None:
    """Log the closing table as metrics, as the text of the run's page and as files. With ``log``, also log all
    responses, the figures, and a nested run for each method."""
    run = context.run
    run.log_results(table_metrics(table))
    run.describe(as_markdown(table, most=DESCRIPTION))
    run.log_text(as_text(table), CLOSING_TEXT)
    run.log_text(as_json(table), CLOSING_JSON)
    if log is None:
        return
    run.log_text(log.path.read_text(), "answers.jsonl")
    _log_methods(context, table)
    for figure in figures(table):
        run.log_figure(figure.draw(figure.records), f"figures/{figure.name}.png")
        run.log_text(json.dumps(figure.records, indent=1) + "\n", f"figures/{figure.name}.json")


def table_metrics(table: ClosingTable) -> dict[str, float]:
    """Return the closing table as metrics of its run, which the UI compares between methods.

    They are named ``eval/tau/METHOD`` where one task was measured under one sampling setting, else
    ``eval/SETTING/TASK/tau/METHOD``; of several tasks only the mean is listed. Bounds and all other numbers are in the
    nested runs, since the UI draws a bar for every metric.
    """
    metrics: dict[str, float] = {}
    single = len(table.laws) == len(table.tasks) == 1
    for row in table.overall or table.methods:
        name = row.name if row.name != VANILLA else f"{VANILLA}_{row.dtype}"
        prefix = "eval" if single else f"eval/{_setting_and_task(row)}"
        metrics |= {f"{prefix}/{quantity}/{name}": value.value for quantity, value in _main_numbers(row).items()}
    if table.one_pass is not None:
        metrics |= _with_bounds("eval/one_pass/tau_walked", table.one_pass.tau_walked)
        metrics["eval/one_pass/tau_expected"] = table.one_pass.tau_expected
        both = zip(table.one_pass.n_alpha_all, table.one_pass.n_alpha_walked, strict=True)
        for n, (every, visited) in enumerate(both):
            metrics |= {f"eval/one_pass/n_alpha_all/{n}": every, f"eval/one_pass/n_alpha_walked/{n}": visited}
    return metrics


def _log_methods(context: RunContext, table: ClosingTable) -> None:
    """Log a nested run for each method: its options as parameters, the path and hash of a head that it names as tags,
    and ``SETTING/TASK/tau`` and the other numbers as metrics, whose names are the same for all methods."""
    assert context.experiment.evaluate is not None
    methods = context.experiment.evaluate.methods
    options = context.experiment.choices()["evaluate"]["init_args"]["methods"]
    rows: dict[tuple[str, str], list[MethodResult | Overall]] = {}
    for row in (*table.methods, *table.overall):
        rows.setdefault((row.name, row.dtype), []).append(row)
    for (name, dtype), own_rows in rows.items():
        method = methods.get(name, Vanilla())
        chosen = options.get(name, {"class_path": type(method).__name__})  # vanilla, or a method added in a notebook
        tags = {"lossless": str(own_rows[0].lossless).lower()}
        if method.head is not None:
            head = context.heads.others[method.head]
            tags |= {"checkpoint": str(head.path), "sha256": head.hash}
        with context.run.continued_child(name if name != VANILLA else f"{VANILLA} {dtype}", tags) as child:
            child.log_params({"method": chosen, "dtype": dtype, "levels": method.levels})
            child.log_results({key: value for row in own_rows for key, value in _row_metrics(row).items()})


def _setting_and_task(row: MethodResult | Overall) -> str:
    return f"{row.law}/{MEAN if isinstance(row, Overall) else row.task}"


def _main_numbers(row: MethodResult | Overall) -> dict[str, Interval]:
    return {
        "tau": row.tau,
        "tokens_per_s": row.tokens_per_s,
        "speedup": row.speedup,
        "speedup_over_fastest": row.speedup_fastest,
    }


def _row_metrics(row: MethodResult | Overall) -> dict[str, float]:
    """Return all numbers of a row with their bounds."""
    prefix, numbers, metrics = _setting_and_task(row), _main_numbers(row), dict[str, float]()
    if isinstance(row, MethodResult):
        numbers |= {"tau_without_loops": row.tau_tidy, "looping": row.looping}
        numbers |= {f"n_alpha_{n}": alpha for n, alpha in enumerate(row.n_alpha)}
        metrics[f"{prefix}/engine_tau"] = row.engine_tau
    for name, value in numbers.items():
        metrics |= _with_bounds(f"{prefix}/{name}", value)
    return metrics


def _with_bounds(name: str, value: Interval) -> dict[str, float]:
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
