"""A piece's draft logits against its laws, a few rows at a time: losses, statistics and the logits' gradient.

Laws, losses and what autograd keeps of them are float32 and several times the logits' size. No row needs another, so
they live for a few rows at once, near the processor, and what stays of a piece is its logits and their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.draft.teacher import Teacher


@dataclass(frozen=True)
class Learned:
    """What R rows learn. ``losses`` of some rows' log-laws and teachers, unweighted; ``weight`` of each row in the sum;
    ``factor`` of the sum, in the gradient alone."""

    losses: Callable[[Tensor, Teacher], Tensor]
    weight: Float[Tensor, " R"]
    factor: Float[Tensor, ""]


@dataclass(frozen=True)
class Compared:
    """Of R rows: whether the draft's arg-max, in target ids, is the target's; the chance that its draw is accepted and
    the weighted sum of the rows' losses; and the gradient of ``factor`` times that sum by the logits, None where they
    have none."""

    hit: Bool[Tensor, " R"]
    overlap: Float[Tensor, " R"]
    loss: Float[Tensor, ""]
    gradient: Float[Tensor, "R Vd"] | None


def compare(
    logits: Float[Tensor, "R Vd"],
    law: Callable[[slice], Teacher],
    vocab: Int[Tensor, " Vd"],
    at_once: int,
    learned: Learned | None,
) -> Compared:
    """``law`` gives the teachers of a run of rows, ``at_once`` says how long those are. ``learned`` None: the rows are
    judged by their arg-max alone, and loss and overlap are 0."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    learning = learned is not None and logits.requires_grad
    logits = logits.detach()
    gradient = torch.empty_like(logits) if learning else None
    hit = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    overlap, loss = logits.new_zeros(logits.shape[0], dtype=wide), logits.new_zeros((), dtype=wide)
    for here in runs(logits.shape[0], at_once):
        teacher, some = law(here), logits[here].requires_grad_(learning)
        log_q = log_law(some)
        with torch.no_grad():
            hit[here] = vocab[log_q.argmax(-1)] == teacher.argmax
            if learned is None:
                continue
            overlap[here] = teacher.overlap(log_q)
        lost = (learned.losses(log_q, teacher) * learned.weight[here]).sum()
        loss += lost.detach()
        if gradient is not None and lost.requires_grad:
            (gradient[here],) = torch.autograd.grad(lost * learned.factor, some)
        else:
            gradient = None  # no term reads the draft's law
        del log_q, lost  # or they would live while the next rows' are made
    return Compared(hit, overlap, loss, gradient)


def runs(rows: int, at_once: int) -> Iterator[slice]:
    """``rows`` rows in order, ``at_once`` at a time; one empty run where there are none."""
    return (slice(begin, min(begin + at_once, rows)) for begin in range(0, max(rows, 1), at_once))


def log_law(logits: Float[Tensor, "R Vd"]) -> Float[Tensor, "R Vd"]:
    """Log-probabilities, in float32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
