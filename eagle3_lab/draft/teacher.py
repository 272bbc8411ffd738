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

from eagle3_lab.draft.vocab import OUTSIDE
from eagle3_lab.types import FrozenTarget, LogitSummary

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

    def rows(self, index: Int[Tensor, " R"]) -> Teacher:
        """The teachers of selected rows."""
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
) -> Teacher:
    """Teachers of M top states of the target. ``blank`` rows stand for rows past the text: all their logits are 0.
    ``at_once``: how many rows' full logits are alive together; None: what CHUNK_BYTES allow."""
    chunk = max(1, CHUNK_BYTES // (4 * target.spec.vocab)) if at_once is None else at_once
    parts = []
    for begin in range(0, max(top.shape[0], 1), chunk):
        here = slice(begin, begin + chunk)
        logits = _logits(target.logits, top[here])
        if blank is not None:
            logits = logits.masked_fill(blank[here, None], 0.0)
        summary = LogitSummary(logits.argmax(-1), logits.logsumexp(-1))
        parts.append(_restrict(logits.index_select(-1, vocab), summary, vocab, oov))
    return parts[0] if len(parts) == 1 else _join(parts)


@torch.no_grad()
def teach_by_summary(
    head: Callable[[Tensor], Tensor],
    top: Float[Tensor, "M Dt"],
    summary: LogitSummary,
    vocab: Int[Tensor, " Vd"],
    oov: Oov,
) -> Teacher:
    """The teachers that `teach` makes, from the draft vocabulary's logits alone: ``head`` is the target's
    ``head_over(vocab)``, ``summary`` is of the M rows' logits over all V ids."""
    kept = _logits(head, top)
    log_sum = summary.log_sum.to(kept.dtype)
    # a part cannot outweigh the whole; by rounding of what was kept it could
    whole = torch.maximum(log_sum, kept.logsumexp(-1))
    return _restrict(kept, LogitSummary(summary.argmax, whole), vocab, oov)


def _logits(head: Callable[[Tensor], Tensor], top: Tensor) -> Tensor:
    with torch.autocast(top.device.type, enabled=False):  # the target's head in the target's own dtype
        logits = head(top)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _restrict(kept: Tensor, summary: LogitSummary, vocab: Tensor, oov: Oov) -> Teacher:
    """``kept``: the logits of the draft vocabulary; ``summary``: of all of them."""
    argmax = summary.argmax
    log_inside = kept.logsumexp(-1) - summary.log_sum

    label = draft_ids(argmax, vocab)
    known = label != OUTSIDE
    p = kept.softmax(-1)
    inside = log_inside.exp()
    taught = torch.ones_like(inside)
    if oov == "drop":
        taught = known.to(inside.dtype)
    elif oov == "renormalise":
        label = kept.argmax(-1)
    else:
        p, inside = p * inside[:, None], torch.ones_like(inside)
    return Teacher(p=p, label=label, taught=taught, argmax=argmax, inside=inside)


def draft_ids(ids: Int[Tensor, " M"], vocab: Int[Tensor, " Vd"]) -> Int[Tensor, " M"]:
    """Target ids as draft ids, OUTSIDE where the draft vocabulary lacks them."""
    place = torch.searchsorted(vocab, ids).clamp(max=vocab.shape[0] - 1)
    return torch.where(vocab[place] == ids, place, OUTSIDE)


def _join(parts: list[Teacher]) -> Teacher:
    return Teacher(
        p=torch.cat([part.p for part in parts]),
        label=torch.cat([part.label for part in parts]),
        taught=torch.cat([part.taught for part in parts]),
        argmax=torch.cat([part.argmax for part in parts]),
        inside=torch.cat([part.inside for part in parts]),
    )
