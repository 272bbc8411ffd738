"""`bench train`: tokens/s of a training step, its share of the machine's rate, its memory, and a rival's step beside
it."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch

from eagle3_lab.bench.memory import Peaks, peaks
from eagle3_lab.bench.operations import Operations, count
from eagle3_lab.bench.rival_trainer import Rival
from eagle3_lab.bench.timed_step import TimedStep
from eagle3_lab.bench.training_setup import DTYPES, Setup
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.system.files import require_place, write_text
from eagle3_lab.system.malloc import keep_freed_memory
from eagle3_lab.system.progress import stage
from eagle3_lab.tracking.provenance import machine
from eagle3_lab.training.trainer import time_product

SIZE = 2048  # of the cubed product whose rate is the machine's


@dataclass(frozen=True)
class Series:
    """Seconds of repeated steps of ``tokens`` tokens."""

    seconds: Sequence[float]
    cpu_seconds: Sequence[float]
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)

    def report(self) -> dict[str, Any]:
        spread = quantiles(self.seconds, n=4) if len(self.seconds) > 1 else [self.seconds[0]] * 3
        return {
            "tokens_per_s": self.tokens_per_s,
            "seconds": median(self.seconds),
            "seconds_quartiles": [spread[0], spread[2]],
            "cpu_seconds": median(self.cpu_seconds) if self.cpu_seconds else None,
            "all_seconds": list(self.seconds),
        }


def bench_train(
    experiment: Experiment,
    *,
    steps: int = 5,
    rows: Literal["all", "data"] = "all",
    memory: bool = True,
    rival: Path | None = None,
    json: Path | None = None,
) -> None:
    """Measure one training step of an experiment, of any shape that overrides say (``--data.row_length``,
    ``--model.unroll.depth``, ``--model.draft_vocab``, ``--trainer.products``). The target runs before it. Where the
    experiment keeps features (``--features '{}'``), what they say of the target's logits is at hand too, as it is for
    public trainers, which know the draft vocabulary's alone; else the step makes all logits.

    Args:
        experiment: whose step is measured; nothing is trained or logged.
        steps: how many steps are timed, after one that warms up.
        rows: which rows have a loss: ``all``, as public trainers compute it, or those of the ``data``'s answers.
        memory: measure peak memory as well, in processes of their own.
        rival: the Python of an environment with speculators in it (``make bench-rival`` makes one); its step is timed
            beside ours, one after the other.
        json: also write the measurements there, for machines.

    Raises:
        UserError: fewer than one step, a rival that does not start, or what building the experiment raises.
    """
    if steps < 1:
        raise UserError(f"--steps: must be >= 1, got {steps}")
    require_place(json, "--json")
    keep_freed_memory()
    every_row = rows == "all"
    setup = Setup.of(experiment, every_row)
    step = setup.step()
    operations = count(setup.module.source, setup.module.draft, setup.module.unroll.depth, setup.batch, step.taps)
    found = _timed(setup, step, steps, rival)
    found["operations"] = asdict(operations) | {"total": operations.total}
    _shares(found, operations)
    found["memory"] = None if not memory else _memory(experiment, every_row)
    print(as_text(found), end="")
    if json is not None:
        write_text(json, json_module.dumps(found, indent=2) + "\n")


def shape_of(setup: Setup) -> dict[str, Any]:
    """What was measured, in numbers."""
    batch, module = setup.batch, setup.module
    weights = module.loss.weights(batch, module.unroll.depth) > 0
    return {
        "rows": batch.ids.shape[0],
        "row_length": batch.ids.shape[1],
        "tokens": int((batch.document >= 0).sum()),
        "documents": sum(len(set(row) - {-1}) for row in batch.document.tolist()),
        "rows_with_loss": float(weights.float().mean()),
        "depth": module.unroll.depth,
        "draft_vocab": module.draft.vocab.shape[0],
        "products": setup.products,
        "summarised": setup.summary is not None,
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
    }


def _timed(setup: Setup, step: TimedStep, steps: int, python: Path | None) -> dict[str, Any]:
    """Ours, the rival's and one product of the machine's, in turn; the first turn warms up."""
    device, dtype = setup.batch.ids.device, DTYPES[setup.products]
    tokens = int((setup.batch.document >= 0).sum())
    ours, theirs, products = [], [], []
    other = None if python is None else Rival(python, setup.module, setup.batch, setup.products)
    try:
        with stage("bench", "rounds", 1 + steps) as s:
            for _ in range(1 + steps):
                ours.append(step())
                if other is not None:
                    theirs.append(other.step())
                products.append(time_product(device, dtype, SIZE, repeats=1))
                s.advance()
    finally:
        if other is not None:
            other.close()
    found: dict[str, Any] = {"shape": shape_of(setup), "machine": machine()}
    found["product_rate"] = 2 * SIZE**3 / median(products[1:])
    found["ours"] = Series([t.seconds for t in ours[1:]], [t.cpu_seconds for t in ours[1:]], tokens).report()
    if other is not None:
        rival = Series([t["seconds"] for t in theirs[1:]], [t["cpu_seconds"] for t in theirs[1:]], tokens)
        ratios = [b["seconds"] / a.seconds for a, b in zip(ours[1:], theirs[1:], strict=True)]
        found["rival"] = rival.report() | other.described | {"peak_bytes": theirs[-1]["peak_bytes"]}
        found["times_faster"] = {"median": median(ratios), "all": ratios}
    return found


def _shares(found: dict[str, Any], operations: Operations) -> None:
    seconds = found["ours"]["seconds"]
    found["ours"]["operations_per_s"] = operations.total / seconds
    found["ours"]["share_of_product_rate"] = operations.total / seconds / found["product_rate"]


def _memory(experiment: Experiment, every_row: bool) -> dict[str, Any]:
    with stage("memory", "processes", 2) as s:
        measured: list[Peaks] = []
        for with_loss in (True, False):
            measured.append(peaks(experiment, every_row=every_row, with_loss=with_loss))
            s.advance()
    whole, without = (one.bytes for one in measured)
    told = {"step_bytes": whole, "without_loss_bytes": without, "head_and_loss_bytes": whole - without}
    return told | {"budget_mib": experiment.require_training("bench train")[1].budget_mib, "method": measured[0].method}


def as_text(found: dict[str, Any]) -> str:
    """The measurements for a reader."""
    shape, ours = found["shape"], found["ours"]
    low, high = ours["seconds_quartiles"]
    teacher = "at hand with the features" if shape["summarised"] else "made in the step"
    told = (
        f"{shape['rows']} x {shape['row_length']} tokens in {shape['documents']} documents, depth {shape['depth']}, "
        f"draft vocabulary {shape['draft_vocab']}, {shape['products']}, {shape['threads']} threads, "
        f"{shape['rows_with_loss']:.0%} of rows with a loss; the target's logits over all ids: {teacher}\n"
        f"ours ({shape['parameters'] / 1e6:.1f} M trained): {ours['tokens_per_s']:.0f} tokens/s "
        f"({ours['seconds']:.2f} s a step, median of {len(ours['all_seconds'])}; quartiles {low:.2f} to {high:.2f})\n"
        f"model operations: {found['operations']['total'] / 1e9:.1f} G a step, teacher at nothing; "
        f"{ours['operations_per_s'] / 1e9:.1f} G/s is {ours['share_of_product_rate']:.1%} of this machine's "
        f"{found['product_rate'] / 1e9:.1f} G/s at {SIZE} cubed in the same format, in the same run\n"
    )
    if "rival" in found:
        rival, faster = found["rival"], found["times_faster"]["median"]
        path = "; on a CPU its eager path is what was measured" if rival["attention"] == "eager" else ""
        told += (
            f"speculators {rival['versions']['speculators']} ({rival['parameters'] / 1e6:.1f} M trained): "
            f"{rival['tokens_per_s']:.0f} tokens/s; ours is {faster:.2f} times as fast, in turns{path}\n"
        )
    if (memory := found["memory"]) is not None:
        told += (
            f"peak memory beyond weights and features: {memory['step_bytes'] / 2**20:.0f} MiB a step, of which head "
            f"and loss {memory['head_and_loss_bytes'] / 2**20:.0f} MiB (budget: "
            f"{memory['budget_mib']} MiB); {memory['method']}\n"
        )
    return told
