"""The target's laws as a draft is taught them: restricted to the draft vocabulary under one of three rules.

A teacher is computed once per target row, without gradient, in float32, and used by every draft row and step it
teaches. What a rule does with probability outside the draft vocabulary (p: full law, K: kept ids):

    rule          law over K            taught where the target's arg-max is outside K
    drop          p / p(K)              no: weight 0 (official EAGLE-3)
    renormalise   p / p(K)              yes, its label is the arg-max over K (speculators)
    mass          p, summing to p(K)    yes, but it has no label
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.backend.compile import fusible
from eagle3_lab.draft.vocab import OUTSIDE
from eagle3_lab.interfaces import FrozenTarget
from eagle3_lab.types import LogitSummary

Oov = Literal["drop", "renormalise", "mass"]

CHUNK_BYTES = 256 * 2**20
"""Bound on the full-vocabulary logits (in float32) alive at once while teachers are made."""


@dataclass(frozen=True)
class Teacher:
    """What M target rows teach.

    ``p`` the law over draft ids under the rule; ``label`` the draft id to predict, OUTSIDE where there is none;
    ``taught`` 0 where the rule drops the row, else 1; ``argmax`` the target id of the full law's maximum (lowest of
    equals); ``inside`` the full law's probability of the draft vocabulary, by which ``p`` must be multiplied to be the
    full law again (1 where it already is). ``said`` the draft id of the token that the text goes on with, OUTSIDE where
    there is none; None where the text was not given.
    """

    p: Float[Tensor, "M Vd"]
    label: Int[Tensor, " M"]
    taught: Float[Tensor, " M"]
    argmax: Int[Tensor, " M"]
    inside: Float[Tensor, " M"]
    said: Int[Tensor, " M"] | None = None

    def rows(self, index: Int[Tensor, " R"] | slice) -> Teacher:
        """The teachers of selected rows; of a run of them, views."""
        said = None if self.said is None else self.said[index]
        law = (self.p[index], self.label[index], self.taught[index], self.argmax[index], self.inside[index])
        return Teacher(*law, said)

    def overlap(self, log_q: Float[Tensor, "M Vd"]) -> Float[Tensor, " M"]:
        """sum over x of min(p(x), q(x)), p the full law: the chance that a draft drawn from q is accepted."""
        return torch.minimum(self.p * self.inside[:, None], log_q.exp()).sum(-1)


@torch.no_grad()
def teach(
    target: FrozenTarget,
    top: Float[Tensor, "M Dt"],
    vocab: Int[Tensor, " Vd"],
    oov: Oov,
    blank: Bool[Tensor, " M"] | None = None,
    at_once: int | None = None,
    widened: int | None = None,
) -> Teacher:
    """Teachers of M top states of the target. ``blank`` rows stand for rows past the text: all their logits are 0.
    ``at_once``: how many rows' full logits are alive together; None: what CHUNK_BYTES allow. ``widened``: of how many
    of them float32 copies are; None: all."""
    chunk = max(1, CHUNK_BYTES // (4 * target.spec.vocab)) if at_once is None else at_once

    def known(here: slice, logits: Tensor) -> tuple[Tensor, LogitSummary]:
        logits = logits.to(_wide(logits))
        if blank is not None:
            logits = logits.masked_fill(blank[here, None], 0.0)
        return logits.index_select(-1, vocab), LogitSummary(logits.argmax(-1), logits.logsumexp(-1))

    return _taught(target.logits, top, vocab, oov, known, chunk, widened)


@torch.no_grad()
def teach_by_summary(
    head: Callable[[Tensor], Tensor],
    top: Float[Tensor, "M Dt"],
    summary: LogitSummary,
    vocab: Int[Tensor, " Vd"],
    oov: Oov,
    at_once: int | None = None,
    widened: int | None = None,
) -> Teacher:
    """The teachers that `teach` makes, from the draft vocabulary's logits alone: ``head`` is the target's
    ``head_over(vocab)``, ``summary`` is of the M rows' logits over all V ids. ``at_once`` None: all rows together."""

    def known(here: slice, kept: Tensor) -> tuple[Tensor, LogitSummary]:
        return kept, LogitSummary(summary.argmax[here], summary.log_sum[here])

    return _taught(head, top, vocab, oov, known, top.shape[0] if at_once is None else at_once, widened)


def _taught(
    head: Callable[[Tensor], Tensor],
    top: Tensor,
    vocab: Tensor,
    oov: Oov,
    known: Callable[[slice, Tensor], tuple[Tensor, LogitSummary]],
    at_once: int,
    widened: int | None,
) -> Teacher:
    """``head``'s logits of ``at_once`` rows at a time, ``widened`` of which become laws together; ``known`` says of
    such rows and logits what those of the draft vocabulary and the summary of all are. All laws go to one array."""
    p, parts = None, []
    for begin in range(0, max(top.shape[0], 1), max(at_once, 1)):
        with torch.autocast(top.device.type, enabled=False):  # the target's head in the target's own dtype
            logits = head(top[begin : begin + at_once])
        if p is None:
            p = logits.new_empty((top.shape[0], vocab.shape[0]), dtype=_wide(logits))
        for some in torch.split(logits, max(1, logits.shape[0]) if widened is None else widened):
            here = slice(begin, begin + some.shape[0])
            kept, summary = known(here, some)
            parts.append(_restrict(kept, summary, vocab, oov, p[here]))
            begin = here.stop
        del logits, some  # or they would live while the next are made
    assert p is not None
    label, taught, argmax, inside = (torch.cat(column) for column in zip(*parts, strict=True))
    return Teacher(p=p, label=label, taught=taught, argmax=argmax, inside=inside)


def _restrict(kept: Tensor, summary: LogitSummary, vocab: Tensor, oov: Oov, p: Tensor) -> tuple[Tensor, ...]:
    """``kept``: the logits of the draft vocabulary; ``summary``: of all of them. The law is written to ``p``; returned
    are a Teacher's label, taught, argmax, inside."""
    log_kept = _normalise(kept, p)
    # a part cannot outweigh the whole; by rounding of a kept summary it could
    inside = (log_kept - torch.maximum(summary.log_sum.to(log_kept.dtype), log_kept)).exp()

    argmax = summary.argmax
    label = draft_ids(argmax, vocab)
    known = label != OUTSIDE
    taught = torch.ones_like(inside)
    if oov == "drop":
        taught = known.to(inside.dtype)
    elif oov == "renormalise":
        label = kept.argmax(-1)
    else:
        p *= inside[:, None]
        inside = torch.ones_like(inside)
    return label, taught, argmax, inside


@fusible("any")
def _normalise(logits: Tensor, law: Tensor) -> Tensor:
    """Log-sum-exps, in the dtype of ``law``, to which the law is written."""
    wide = logits.to(law.dtype)
    torch.softmax(wide, -1, out=law)
    return wide.logsumexp(-1)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def draft_ids(ids: Int[Tensor, " M"], vocab: Int[Tensor, " Vd"]) -> Int[Tensor, " M"]:
    """Target ids as draft ids, OUTSIDE where the draft vocabulary lacks them."""
    place = torch.searchsorted(vocab, ids).clamp(max=vocab.shape[0] - 1)
    return torch.where(vocab[place] == ids, place, OUTSIDE)
