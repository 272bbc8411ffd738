"""`fit --dry-run`: what a run would cost, from the data as it is and one timed step."""

from __future__ import annotations

import time

import torch

from eagle3_lab.pipeline.context import TrainingContext
from eagle3_lab.pipeline.run_folder import disk_bytes
from eagle3_lab.pipeline.train_head import check_features
from eagle3_lab.system.files import bytes_text
from eagle3_lab.system.progress import duration


def estimate(context: TrainingContext) -> str:
    """Return tokens, disk, memory and hours, a line each. One training step is timed, after a first one that warms up.
    Fresh responses are counted where they exist already."""
    module, data, trainer = context.module, context.data, context.experiment.trainer
    sizes = data.manifest()["train"]
    assert trainer is not None
    per_epoch = len(data.train_dataloader())
    accumulate = trainer.options.get("accumulate_grad_batches", 1)
    trainer.check(per_epoch)
    steps = trainer.steps(per_epoch)
    passes = steps / trainer.steps_a_pass(per_epoch)
    batches = passes * trainer.within(per_epoch)
    seconds, tokens = _time_step(context)
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return (
        f"data: {sizes['conversations']} conversations, {sizes['tokens']} tokens, {sizes['supervised']} supervised; "
        f"{per_epoch} batches a pass\n"
        f"training: {steps} steps of {accumulate} batches, {batches / per_epoch:.1f} passes over the data; "
        f"{tokens / seconds:.0f} tokens/s by one timed step: {duration(seconds * batches)}\n"
        f"head: {parameters / 1e6:.1f} M parameters; with gradients and AdamW's state "
        f"{bytes_text(parameters * 16)} of memory, beside the target and a batch's activations\n"
        f"disk: {bytes_text(disk_bytes(module))} at most (two checkpoints with optimizer state while one replaces the "
        "other, the draft, and its copy in the run)\n" + _features(context)
    )


def _features(context: TrainingContext) -> str:
    """Return a line with the feature store's size and how much of it is missing; "" without a store."""
    making = check_features(context)
    if making is None:
        return ""
    contents = making.manifest.contents
    left = making.tokens_left() * contents.token_bytes
    return (
        f"features: {bytes_text(contents.bytes)} for {contents.tokens} tokens of {len(contents.layers)} states in "
        f"{contents.dtype}, of which {bytes_text(left)} are yet to be made; the timed step ran the target, which "
        "training from the store does not\n"
    )


def _time_step(context: TrainingContext) -> tuple[float, int]:
    """Return the seconds of a training step and its tokens."""
    module, data, trainer = context.module, context.data, context.experiment.trainer
    device = next(module.parameters()).device
    assert trainer is not None
    precision, _ = trainer.precision(device)
    batches = iter(data.train_dataloader())
    for _ in range(2):
        batch = next(batches, None) or next(iter(data.train_dataloader()))
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            out, _ = module.run(batch.to(device))
        out.total.backward()
        float(out.total.detach())  # waits for the device
        seconds = time.perf_counter() - began
        module.zero_grad()
    return seconds, int((batch.document >= 0).sum())
