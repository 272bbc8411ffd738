"""What an ablation's ``decode`` section asks: heads of its cells under one decoder, for tau and speed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3_lab.ablation import results
from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.ablation.results import VISITED, Result
from eagle3_lab.ablation.runs import parent_run
from eagle3_lab.commands.evaluate import evaluate
from eagle3_lab.config import Document, build, compose_document, overlay
from eagle3_lab.config import check as check_config
from eagle3_lab.config.reading import label
from eagle3_lab.data.module import ConversationData
from eagle3_lab.decode.methods import Head
from eagle3_lab.errors import UserError, near
from eagle3_lab.evaluation.results import ClosingTable
from eagle3_lab.evaluation.runner import check
from eagle3_lab.evaluation.table import as_json
from eagle3_lab.experiment import Experiment
from eagle3_lab.system.files import read_object, write_text
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.tracking.run import open_run
from eagle3_lab.training.module import DraftModule

TITLE = "decoding"
"""Its name among the cells, and that of its file."""


def file_of(ablation: Ablation) -> Path:
    """Return where the table lies or will."""
    return ablation.folder / f"{TITLE}.json"


def heads(ablation: Ablation) -> dict[str, str]:
    """Return the cell that each method proposes with.

    Raises:
        UserError: a method whose head is no cell.
    """
    assert ablation.decode is not None
    methods = ablation.decode.tree.get("methods") or {}
    chosen: dict[str, str] = {}
    names = [cell.label for cell in ablation.cells]
    for name, method in methods.items():
        arguments = method.get("init_args") or {} if isinstance(method, dict) else {}
        head = arguments.get("head")
        if head is None:
            continue
        if head not in names:
            where = ablation.decode.where.get(f"methods.{name}.head", label(ablation.folder))
            raise UserError(f"{where}: decode.methods.{name}.head: no cell {head!r}{near(str(head), names)}")
        chosen[name] = head
    return chosen


def best(ablation: Ablation, found: Mapping[str, Result]) -> dict[str, Cell] | None:
    """Return, by method, the cell's seed of highest tau (visited anchors); None while a cell that is decoded has a seed
    without result."""
    chosen: dict[str, Cell] = {}
    for name, wanted in heads(ablation).items():
        own = [cell for cell in ablation.cells if cell.label == wanted]
        if any(cell.title not in found for cell in own):
            return None
        chosen[name] = max(own, key=lambda cell: found[cell.title].values[f"tau_{VISITED}"]["value"])
    return chosen


def key(ablation: Ablation, chosen: Mapping[str, Cell]) -> str:
    """Return the identity of what is decoded: the section, and the heads."""
    assert ablation.decode is not None
    told = json.dumps([ablation.decode.tree, {name: cell.key for name, cell in chosen.items()}], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def find(ablation: Ablation, found: Mapping[str, Result]) -> dict[str, Any] | None:
    """Return the table that is there, as JSON; None where there is none of these heads yet."""
    if ablation.decode is None or (chosen := best(ablation, found)) is None:
        return None
    told = read_object(file_of(ablation))
    return told["table"] if told.get("key") == key(ablation, chosen) else None


def decode(ablation: Ablation) -> dict[str, Any]:
    """Measure the heads by decoding, write the table into the folder and return it.

    Raises:
        UserError: a cell without result, one whose head is not in this store, or what `evaluate` refuses.
    """
    assert ablation.decode is not None
    found = results.found(ablation)
    chosen = best(ablation, found)
    if chosen is None:
        needed = ", ".join(sorted(set(heads(ablation).values())))
        raise UserError(f"{ablation.name}: decode needs the results of {needed}; run those cells first")
    experiment = _experiment(ablation, chosen)
    table = evaluate(experiment)
    assert isinstance(table, ClosingTable)  # the experiment has no engine
    with parent_run(ablation) as parent, open_run(ablation.tracking, table.run_id, {"mlflow.parentRunId": parent.id}):
        pass
    told = json.loads(as_json(table))
    said = {"key": key(ablation, chosen), "heads": {name: cell.title for name, cell in chosen.items()}, "table": told}
    write_text(file_of(ablation), json.dumps(said, indent=1) + "\n")
    return told


def check_cell(ablation: Ablation, cell: Cell, target: HFTarget, data: ConversationData, module: DraftModule) -> None:
    """Refuse, before a cell is trained, a method that could not decode with its head. Raises UserError."""
    if ablation.decode is None:
        return
    evaluation = _experiment(ablation, {}).evaluate
    assert evaluation is not None
    own = [name for name, wanted in heads(ablation).items() if wanted == cell.label]
    methods = {name: evaluation.methods[name] for name in own}
    head = Head(module.source, module.draft, target.record)
    try:
        check(replace(evaluation, methods=methods), target, lambda method: head, data.prompts())
    except UserError as error:
        raise UserError(f"{label(ablation.folder)}: decode: {error}") from None


def _experiment(ablation: Ablation, chosen: Mapping[str, Cell]) -> Experiment:
    """The evaluation as an experiment without a model: target, data and tracking are a cell's, and each method's head
    is named by the file of the cell that trained it."""
    assert ablation.decode is not None
    cell = next(iter(chosen.values()), ablation.cells[0])
    tree = {
        name: value for name, value in cell.config.plain.items() if name in ("target", "data", "tracking", "budgets")
    }
    methods = {name: {"init_args": {"head": str(_written(ablation, one))}} for name, one in chosen.items()}
    tree |= {"name": f"{ablation.name}_{TITLE}", "evaluate": ablation.decode.tree}
    where = {f"evaluate.{name}": place for name, place in ablation.decode.where.items()}
    document = overlay(
        Document(tree, where), Document({"evaluate": {"methods": methods}, "tracking": {"run_name": TITLE}})
    )
    return build(check_config(compose_document(document, ablation.folder / f"{TITLE}.yaml"), Experiment))


def _written(ablation: Ablation, cell: Cell) -> Path:
    """A cell's experiment as a file, by which methods name its head."""
    path = ablation.tracking.folder / "work" / f"{ablation.name}.cells" / f"{cell.title}.yaml"
    write_text(path, cell.config.yaml)
    return path.absolute()
