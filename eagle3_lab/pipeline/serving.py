"""`evaluate` with an `engine`: throughput with and without the head by batch size, where the head is served."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_lab.data.chat import Chat
from eagle3_lab.engine import Client, Completion, Engine, acceptance_length
from eagle3_lab.errors import UserError
from eagle3_lab.formats.description import describe
from eagle3_lab.formats.writing import write
from eagle3_lab.pipeline.context import RunContext
from eagle3_lab.system.progress import stage
from eagle3_lab.tracking.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Served:
    """One batch size: tokens per second of the engine plain and with the head, their ratio, tokens a round by the
    engine's counters (the bonus token counted), and the share of answers whose text is the plain one's."""

    batch: int
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    acceptance_length: float
    equal_texts: float


@dataclass(frozen=True)
class ServingTable:
    """What was served, and a row a batch size."""

    setting: str
    rows: tuple[Served, ...]

    def text(self) -> str:
        """Return the table for reading."""
        lines = [self.setting, "batch   plain tok/s   with head tok/s   ratio   tokens a round   equal texts"]
        for row in self.rows:
            lines.append(
                f"{row.batch:5d}   {row.plain_tokens_per_s:11.1f}   {row.tokens_per_s:15.1f}   {row.ratio:5.2f}   "
                f"{row.acceptance_length:14.2f}   {row.equal_texts:11.0%}"
            )
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Return every number in full."""
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class _Pass:
    answers: list[Completion]
    tokens_per_s: float
    acceptance_length: float = 1.0


def serve(context: RunContext, engine: Engine) -> ServingTable:
    """Measure an engine on the first turns of the evaluation's prompts, greedily, at each of its batch sizes, with the
    context's head.

    Raises:
        UserError: no head for an engine that is handed one, too few prompts, a head that the engine's format cannot
            hold, a server that is not reachable or has no metrics of speculation.
    """
    evaluation, target, module = context.experiment.evaluate, context.target, context.module
    assert evaluation is not None
    chat, held_out = Chat(target.tokenizer), context.held_out
    prompts = [chat.prompt_ids(prompt.messages()) for task in evaluation.tasks for prompt in task.prompts(held_out)]
    if not prompts:
        raise UserError("evaluate.tasks: no prompts to serve")
    if engine.needs_head and module is None:
        raise UserError(f"engine: {type(engine).__name__} serves the experiment's head, and it has no model; add one")
    with tempfile.TemporaryDirectory(prefix="eagle3-lab-head-") as folder:
        place = Path(folder) / "head"
        if module is not None and engine.needs_head:
            write(place, describe(target, module.source, module.draft), target, "vllm")
        most, total = evaluation.max_new_tokens, 2 * len(engine.batch_sizes)
        passes: dict[bool, list[_Pass]] = {}
        with stage("engine", "batch sizes", total) as s:
            for speculating in (False, True):
                with engine.serve(target.source, place if speculating else None) as client:
                    client.complete(prompts[0], min(8, most))  # warms up
                    passes[speculating] = []
                    for batch in engine.batch_sizes:
                        passes[speculating].append(_timed(client, prompts, most, batch, speculating))
                        s.advance()
    rows = [
        _row(batch, plain, drafted)
        for batch, plain, drafted in zip(engine.batch_sizes, passes[False], passes[True], strict=True)
    ]
    setting = (
        f"{type(engine).__name__}, target {target.spec.name}, {engine.drafts} drafts a round, greedy, {len(prompts)} "
        f"prompts of at most {most} tokens"
    )
    return ServingTable(setting, tuple(rows))


def log_serving(table: ServingTable, run: Run) -> None:
    """Log the table as metrics, files and a figure of the throughput ratio against batch size."""
    for row in table.rows:
        values = {name: value for name, value in asdict(row).items() if name != "batch"}
        run.log_metrics({f"engine/{name}": value for name, value in values.items()}, step=row.batch)
    run.log_text(table.text(), "engine.txt")
    run.log_text(table.json(), "engine.json")
    run.log_figure(draw_ratio(table.rows), "figures/engine_ratio.png")


def draw_ratio(rows: Sequence[Served]) -> Figure:
    """Return a figure: throughput with the head over plain, by batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([row.batch for row in rows], [row.ratio for row in rows], marker="o")
    axes.axhline(1.0, color="tab:gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.batch for row in rows], [str(row.batch) for row in rows])
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("throughput, with the head / plain")
    return figure


def _timed(client: Client, prompts: Sequence[Sequence[int]], most: int, batch: int, speculating: bool) -> _Pass:
    """Answer all prompts, at least ``batch`` of them, and time it."""
    asked = [prompts[i % len(prompts)] for i in range(max(batch, len(prompts)))]
    before, began = client.metrics() if speculating else {}, time.perf_counter()
    answers = client.complete_all(asked, most, batch)
    seconds = time.perf_counter() - began
    length = acceptance_length(before, client.metrics(), client.root) if speculating else 1.0
    return _Pass(answers, sum(one.tokens for one in answers) / seconds, length)


def _row(batch: int, plain: _Pass, drafted: _Pass) -> Served:
    equal = sum(a.text == b.text for a, b in zip(plain.answers, drafted.answers, strict=True)) / len(plain.answers)
    ratio = drafted.tokens_per_s / plain.tokens_per_s
    return Served(batch, plain.tokens_per_s, drafted.tokens_per_s, ratio, drafted.acceptance_length, equal)
