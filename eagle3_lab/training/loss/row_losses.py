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

from eagle3_lab.backend.compile import fusible, is_fusing
from eagle3_lab.training.loss.teacher import Teacher

Losses = Callable[[Float[Tensor, "R Vd"], Teacher, Float[Tensor, ""]], Float[Tensor, " R"]]
"""The unweighted losses of R rows' log-laws, given their teachers and the mean acceptance of their step."""


@dataclass(frozen=True)
class Learned:
    """What R rows learn. ``losses`` None: no term reads the draft's law; ``acceptance`` is of the rows' step;
    ``weight`` of each row in the sum; ``factor`` of the sum, in the gradient alone."""

    losses: Losses | None
    acceptance: Float[Tensor, ""]
    weight: Float[Tensor, " R"]
    factor: Float[Tensor, ""]

    def lost(self, log_q: Tensor, teacher: Teacher, here: slice) -> Tensor:
        """The weighted sum of a run of rows."""
        if self.losses is None:
            return log_q.new_zeros(())
        return (self.losses(log_q, teacher, self.acceptance) * self.weight[here]).sum()


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
    judged by their arg-max alone, and loss and overlap are 0.

    Raises:
        UserError: while fusing, where torch cannot compile.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = None if learned is None else learned.losses
    learning = logits.requires_grad and losses is not None
    logits = logits.detach()
    gradient = torch.empty_like(logits) if learning else None
    hit = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    overlap, loss = logits.new_zeros(logits.shape[0], dtype=wide), logits.new_zeros((), dtype=wide)
    for here in runs(logits.shape[0], at_once):
        teacher, some = law(here), logits[here]
        if learned is None:
            hit[here] = _hits(log_law(some), teacher, vocab)
            continue
        if gradient is not None and losses is not None and is_fusing() and some.shape[0] > 1:  # not compiled for one
            weight, into = learned.weight[here], gradient[here]
            lost, hit[here], overlap[here] = _learn(
                losses, some, teacher, learned.acceptance, weight, learned.factor, vocab, into
            )
        else:
            log_q = log_law(some.requires_grad_(learning))
            lost = learned.lost(log_q, teacher, here)
            with torch.no_grad():
                hit[here], overlap[here] = _hits(log_q, teacher, vocab), teacher.overlap(log_q)
            if gradient is not None:
                (gradient[here],) = torch.autograd.grad(lost * learned.factor, some)
            del log_q  # or it would live while the next rows' is made
        loss += lost.detach()
    return Compared(hit, overlap, loss, gradient)


@fusible("any")
def _learn(
    losses: Losses,
    logits: Tensor,
    teacher: Teacher,
    acceptance: Tensor,
    weight: Tensor,
    factor: Tensor,
    vocab: Tensor,
    into: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hits and overlaps of a run of rows, and their gradient ``into`` its place: some fourteen operations that
    each read and write float32 arrays, which compiled become a few."""

    def value(logits: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        log_q = log_law(logits)
        lost = (losses(log_q, teacher, acceptance) * weight).sum()
        return lost * factor, (lost, log_q)

    gradient, (lost, log_q) = torch.func.grad(value, has_aux=True)(logits)
    into.copy_(gradient)
    return lost, _hits(log_q, teacher, vocab), teacher.overlap(log_q)


def runs(rows: int, at_once: int) -> Iterator[slice]:
    """``rows`` rows in order, ``at_once`` at a time; one empty run where there are none."""
    return (slice(begin, min(begin + at_once, rows)) for begin in range(0, max(rows, 1), at_once))


def log_law(logits: Float[Tensor, "R Vd"]) -> Float[Tensor, "R Vd"]:
    """Log-probabilities, in float32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _hits(log_q: Tensor, teacher: Teacher, vocab: Tensor) -> Tensor:
    return vocab[_argmax(log_q)] == teacher.argmax


def _argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest. torch's compiler makes slow code of its own for that."""
    if not torch.compiler.is_compiling():
        return x.argmax(-1)
    size = x.shape[-1]
    index = torch.arange(size, dtype=torch.int32, device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), index, size - 1).amin(-1)
