"""`ablate --dry-run`: hours and disk of the cells that are left, from a timed step of each kind of cell."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from eagle3_lab.ablation.plan import Ablation, Cell
from eagle3_lab.bench.timed_step import TimedStep
from eagle3_lab.config import build
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.context import open_training
from eagle3_lab.pipeline.head_module import check_compiler
from eagle3_lab.pipeline.run_folder import disk_bytes
from eagle3_lab.pipeline.train_head import check_features
from eagle3_lab.system.progress import duration

STEPS = 3
"""Timed of each kind; the last one counts, since the first ones compile and warm up."""


def estimate(ablation: Ablation, left: Sequence[Cell]) -> str:
    """Return a line for each kind of cell, and the sum. Steps of one kind take equally long at any scale and seed, so
    one is timed, on features that are at hand. What the target has to be run for is told apart.

    Raises:
        UserError: as running a cell does before it trains.
    """
    if not left:
        return f"{ablation.name}: nothing is left to run\n"
    lines: list[str] = []
    seconds, disk, stores = 0.0, 0, dict[str, tuple[int, int]]()
    for name in dict.fromkeys(cell.name for cell in left):
        own = [cell for cell in left if cell.name == name]
        step, bytes_, store, own_steps = _kind(own)
        seconds, disk, stores = seconds + step * sum(own_steps), disk + bytes_ * len(own), stores | store
        lines.append(
            f"{name}: {len(own)} cells, {sum(own_steps)} steps of {step:.2f} s: {duration(step * sum(own_steps))}; "
            f"{bytes_ / 1e6:.0f} MB of checkpoints each"
        )
    features = sum(size for size, _ in stores.values())
    folder = ablation.tracking.folder.absolute()
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    tokens = sum(count for _, count in stores.values())
    lines.append(f"features: {features / 1e9:.3g} GB to be made, once for all cells, for {tokens} tokens")
    lines.append(
        f"in all: {len(left)} cells, {duration(seconds)} of training by one process; at most "
        f"{(disk + features) / 1e9:.3g} GB of disk, {free / 1e9:.3g} GB are free"
    )
    return "\n".join(lines) + "\n"


def _kind(cells: Sequence[Cell]) -> tuple[float, int, dict[str, tuple[int, int]], list[int]]:
    """Of cells that differ in scale and seed: seconds of a step, bytes of a cell's checkpoints, bytes and tokens of the
    store that is yet to be made by its folder, and the steps of each."""
    experiment = build(cells[0].config)
    check_compiler(experiment)
    _, _, _, trainer = experiment.require_training("ablate")
    context = open_training(experiment, "ablate", answer=False)
    target, data, module = context.target, context.data, context.module
    making = check_features(context)
    precision, _ = trainer.precision(target.device)
    batch = next(iter(data.train_dataloader())).to(target.device)
    clip = trainer.options.get("gradient_clip_val")
    summary = None if experiment.features is None else target.summary
    timed = TimedStep(module, batch, precision, clip, summary=summary)
    took = [timed().seconds for _ in range(STEPS)][-1]
    accumulate = trainer.options.get("accumulate_grad_batches", 1)
    whole = len(data.train_dataloader()) / data.share
    steps = [_steps(build(cell.config), whole) for cell in cells]
    store = {}
    if making is not None and not making.finished:
        tokens = making.tokens_left()
        store = {str(making.folder): (tokens * making.manifest.contents.token_bytes, tokens)}
    return took * accumulate, disk_bytes(module), store, steps


def _steps(experiment: Experiment, whole: float) -> int:
    """Of a cell, where a pass over all conversations has ``whole`` batches."""
    data, _, _, trainer = experiment.require_training("ablate")
    return trainer.steps(max(1, round(whole * data.share)))
