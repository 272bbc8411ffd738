"""Which drafts of held-out text a head predicts: the hit table, its readings, and the loss of each unroll step.

A table [B, T, S] says for each row and step whether the head's first choice was the text's token. Walked as a decoder
walks it, it gives rounds; over all rows, rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric

from eagle3_lab.evaluation.metrics import Acceptance, ratio
from eagle3_lab.rows import row_weights, same_document, shift
from eagle3_lab.types import Round


class Answer(NamedTuple):
    """One answer in batch row ``row``: its walk begins at anchor ``anchor`` (the row before its first token) and its
    last token stands at ``last``."""

    row: int
    anchor: int
    last: int


def find_answers(supervised: Bool[Tensor, "B T"], document: Int[Tensor, "B T"]) -> list[Answer]:
    """The contiguous supervised runs within one document, in reading order.

    An answer that opens its document has no row before it: its first token then serves as the prompt. One that is cut
    by the end of the row simply ends there, as under a length limit.

        u u A A A u B B  (u: not supervised)  gives  anchors 1 and 5, last tokens 4 and 7
    """
    goes_on = supervised & shift(supervised, 1, False) & same_document(document, 1)
    first = supervised.clone()
    first[:, 1:] &= ~goes_on[:, :-1]
    starts = first.nonzero().tolist()
    lasts = (supervised & ~goes_on).nonzero().tolist()
    follows = same_document(document, 1).tolist()
    return [
        Answer(row, start - 1 if start > 0 and follows[row][start - 1] else start, last)
        for (row, start), (_, last) in zip(starts, lasts, strict=True)
    ]


def judged_drafts(supervised: Bool[Tensor, "B T"], document: Int[Tensor, "B T"], depth: int) -> Bool[Tensor, "B T S"]:
    """Whether a decoder at anchor t could judge draft s: tokens t+1 .. t+2+s all lie in one answer."""
    return torch.stack([row_weights(supervised, document, s) > 0 for s in range(depth)], dim=-1)


def leading_hits(hit: Bool[Tensor, "B T S"], judged: Bool[Tensor, "B T S"]) -> Int[Tensor, "B T"]:
    """a(t): how many judged drafts in a row, from the first, are right."""
    return (hit & judged).long().cumprod(-1).sum(-1)


def walk(leading: Sequence[int], anchor: int, last: int, depth: int) -> list[Round]:
    """The rounds that a chain decoder of ``depth`` drafts would make over one answer: t <- t + a(t) + 1.

    A draft is judged only if its position lies in the answer; an accepted last token ends the round without bonus; no
    round starts when the root, token t+1, is the last one.

        depth 2, answer at 2..6 (5 tokens), anchor 1, a(1) = 1, a(3) = 2:
        round 1 has root 2, judges 3 and 4, keeps 3, emits 3 4;  round 2 has root 4, keeps 5 6 and emits those two.
    """
    rounds, t = [], anchor
    while t + 1 < last:
        left = last - (t + 1)  # tokens of the answer behind the root
        accepted = leading[t]
        assert accepted <= min(depth, left), "a hit lies outside its answer"
        rounds.append(Round(min(accepted + 1, depth, left), accepted, min(accepted + 1, left)))
        t += accepted + 1
    return rounds


def walk_table(
    hit: Bool[Tensor, "B T S"], supervised: Bool[Tensor, "B T"], document: Int[Tensor, "B T"]
) -> list[list[Round]]:
    """The walked rounds of each answer of a batch, in :func:`find_answers`' order. The table is copied to the host."""
    depth = hit.shape[-1]
    leading = leading_hits(hit, judged_drafts(supervised, document, depth))
    return _walk_answers(leading, supervised, document, depth)


def _walk_answers(leading: Tensor, supervised: Tensor, document: Tensor, depth: int) -> list[list[Round]]:
    on_host = leading.tolist()
    return [walk(on_host[a.row], a.anchor, a.last, depth) for a in find_answers(supervised, document)]


class HitTable(Metric):
    """Reads ``hit[t, s]`` (draft s from anchor t is the target's own token) on text that the target wrote greedily.

    ``compute`` gives flat names, ready to log; s and n count from 0:

        step_{s}/accuracy        teacher-forced: mean of hit over all rows whose draft s can be judged
        step_{n}/n_alpha_all     all anchors: #(a(t) > n) / #(a(t) >= n and draft n judged)
        tau_expected             all anchors: 1 + mean a(t) over anchors whose drafts all lie in the answer
        step_{n}/n_alpha_walked  visited anchors: the walk's rounds, which are a chain decoder's
        tau_walked               visited anchors: tokens emitted / rounds
        anchors, rounds          how many anchors and rounds stand behind tau_expected and tau_walked

    All anchors has the lower variance, for curves and comparisons; visited anchors is what decoding gives. The two
    differ, since hits come in runs. States are sums, so accumulation over batches and ranks is exact.
    """

    full_state_update = False
    judged: Tensor
    hits: Tensor
    reached: Tensor
    passed: Tensor
    whole: Tensor
    walked_judged: Tensor
    walked_accepted: Tensor
    walked: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")
        self.depth = depth
        for name in ("judged", "hits", "reached", "passed", "walked_judged", "walked_accepted"):
            self.add_state(name, torch.zeros(depth, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("whole", "walked"):  # anchors and their accepted drafts; rounds and their emitted tokens
            self.add_state(name, torch.zeros(2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, hit: Bool[Tensor, "B T S"], supervised: Bool[Tensor, "B T"], document: Int[Tensor, "B T"]) -> None:
        """Count one batch. ``supervised`` and ``document`` as in :class:`eagle3_lab.types.Batch`; entries of ``hit``
        outside an answer are ignored. Synchronises with the device once, for the walk."""
        judged = judged_drafts(supervised, document, self.depth)
        leading = leading_hits(hit, judged)
        depths = torch.arange(self.depth, device=hit.device)
        self.judged += judged.sum((0, 1))
        self.hits += (hit & judged).sum((0, 1))
        self.reached += (judged & (leading[..., None] >= depths)).sum((0, 1))
        self.passed += (leading[..., None] > depths).sum((0, 1))
        whole = judged[..., -1]
        self.whole += torch.stack((whole.sum(), (leading * whole).sum()))
        walks = _walk_answers(leading, supervised, document, self.depth)
        seen = Acceptance.of((r for rounds in walks for r in rounds), self.depth)
        self.walked_judged += torch.tensor(seen.judged, device=hit.device)
        self.walked_accepted += torch.tensor(seen.accepted, device=hit.device)
        self.walked += torch.tensor((seen.rounds, seen.emitted), device=hit.device)

    def visited(self) -> Acceptance:
        """The walk's counters on this rank (inside ``compute``: of all ranks), as a chain decoder would count them."""
        rounds, emitted = self.walked.tolist()
        return Acceptance(rounds, emitted, 0, tuple(self.walked_judged.tolist()), tuple(self.walked_accepted.tolist()))

    def compute(self) -> dict[str, Tensor]:
        """The readings named above: float32 scalars on the metric's device."""
        seen, (anchors, accepted) = self.visited(), self.whole.tolist()
        rows = zip(*(x.tolist() for x in (self.hits, self.judged, self.passed, self.reached)), strict=True)
        values = {"tau_expected": 1 + ratio(accepted, anchors), "tau_walked": seen.tau}
        values |= {"anchors": anchors, "rounds": seen.rounds}
        for n, ((hits, judged, passed, reached), walked) in enumerate(zip(rows, seen.n_alpha, strict=True)):
            values[f"step_{n}/accuracy"] = ratio(hits, judged)
            values[f"step_{n}/n_alpha_all"] = ratio(passed, reached)
            values[f"step_{n}/n_alpha_walked"] = walked
        return {name: torch.tensor(float(value), device=self.walked.device) for name, value in values.items()}


class StepLoss(Metric):
    """The loss of a whole set: sum over s of decay^s S_s / N_s, with S_s and N_s summed over batches and ranks, so that
    how the set was divided among them changes nothing."""

    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(self, depth: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        for name in ("sums", "counts"):
            self.add_state(name, torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, means: Float[Tensor, " S"], counts: Float[Tensor, " S"]) -> None:
        """One batch's S_s / N_s, and its N_s."""
        self.sums += means.double() * counts
        self.counts += counts

    def compute(self) -> Tensor:
        """A float32 scalar; 0 where nothing weighs."""
        decay = self.decay ** torch.arange(len(self.sums), device=self.sums.device, dtype=torch.float64)
        return (decay * self.sums / self.counts.clamp(min=1)).sum().float()
