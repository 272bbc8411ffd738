"""The loss of an unrolled draft: its rows' terms, averaged over rows, summed over steps.

    loss = sum over s of step_decay^s  S_s / N_s

S_s is the weighted sum of the row losses of step s, N_s the sum of the rows' weights. N_s depends on masks alone
(rows dropped for vocabulary keep their place in it), so a caller can sum it over all micro-batches and ranks of one
optimizer step, and accumulation, packing and data parallelism change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle3_lab.draft.vocab import OUTSIDE
from eagle3_lab.interfaces import DraftModel, FeatureSource, FrozenTarget
from eagle3_lab.rows import Edge, Mask, row_weights
from eagle3_lab.training.loss.chunked import Chunk, Collected, Taught, chunks
from eagle3_lab.training.loss.head_linear import HeadProducts
from eagle3_lab.training.loss.memory import Room, slice_bytes
from eagle3_lab.training.loss.row_losses import Learned, compare, log_law, runs
from eagle3_lab.training.loss.teacher import Oov, Teacher, draft_ids, teach, teach_by_summary
from eagle3_lab.training.loss.terms import FeatureTerm, RowTerm, StepTerm
from eagle3_lab.types import Batch, DraftOut, LogitSummary

Reduction = Literal["supervised", "all"]

Known = tuple[Callable[[Tensor], Tensor], LogitSummary]
"""The target's head over the draft vocabulary, and what was kept of its logits over all ids."""


@dataclass(frozen=True)
class LossOut:
    """A batch's loss and what was seen on the way (all but ``total`` without gradient). S steps, s counted from 0.

    ``total`` to call backward on; ``steps`` [S] the undecayed S_s / N_s; ``weights`` the rows' weights by the loss's
    own mask; ``judged`` the rows a decoder could draft (mask "drafted"), whatever the loss's mask; ``hit`` True where
    the draft's arg-max, in target ids, is the target's over its full vocabulary; ``overlap`` sum of min(p, q), p over
    the full vocabulary. ``hit`` and ``overlap`` are filled where a row weighs or is judged, else False and 0. Steps
    that the loss does not count have loss, weights and overlap 0.
    """

    total: Float[Tensor, ""]
    steps: Float[Tensor, " S"]
    weights: Float[Tensor, "B T S"]
    judged: Bool[Tensor, "B T S"]
    hit: Bool[Tensor, "B T S"]
    overlap: Float[Tensor, "B T S"]


class UnrolledLoss:
    """The loss of an unrolled draft.

    ``mask`` and ``edge`` say which rows count (:func:`eagle3_lab.rows.row_weights`), ``oov`` what is taught where the
    target leaves the draft vocabulary (:mod:`eagle3_lab.training.loss.teacher`), ``reduction`` what N_s counts:
    "supervised" the rows' weights, "all" every row of the batch, padding included, as EAGLE-3's code does.
    ``budget_mib`` bounds the memory, in MiB, of head and loss: the gradients of the head and of its inputs, which must
    live, and laws and logits beside them, which get what is left and at least an eighth. It decides how many rows are
    worked off together (:mod:`eagle3_lab.training.loss.chunked`), never what comes out; None: all of them. On an
    accelerator more is faster.

    Raises:
        ValueError: if no term has a positive weight, ``step_decay`` is outside (0, 1], a name is unknown, ``edge``
            "counted" meets another mask than "official", or ``budget_mib`` is below 1.

    Source: SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:834-859 (terms, rows), traineagle3/main.py:284-285 (decay).
    """

    def __init__(
        self,
        terms: Sequence[RowTerm | StepTerm | FeatureTerm],
        step_decay: float = 0.8,
        mask: Mask = "drafted",
        edge: Edge = "dropped",
        oov: Oov = "drop",
        reduction: Reduction = "supervised",
        budget_mib: int | None = 256,
    ) -> None:
        names = {"mask": (mask, Mask), "edge": (edge, Edge), "oov": (oov, Oov), "reduction": (reduction, Reduction)}
        for key, (value, legal) in names.items():
            if value not in get_args(legal):
                raise ValueError(f"{key} must be one of {', '.join(get_args(legal))}, got {value!r}")
        if not any(term.weight > 0 for term in terms):
            raise ValueError(f"losses must hold a term with a positive weight, got {[type(t).__name__ for t in terms]}")
        if not 0 < step_decay <= 1:
            raise ValueError(f"step_decay must be in (0, 1], got {step_decay}")
        if edge == "counted" and mask != "official":
            raise ValueError(f"edge 'counted' exists only with mask 'official', got mask {mask!r}")
        if budget_mib is not None and budget_mib < 1:
            raise ValueError(f"budget_mib must be >= 1, or null for all rows at once, got {budget_mib}")
        self.row_terms = [term for term in terms if isinstance(term, RowTerm) and term.weight > 0]
        self.step_terms = [term for term in terms if isinstance(term, StepTerm) and term.weight > 0]
        self.feature_terms = [term for term in terms if isinstance(term, FeatureTerm) and term.weight > 0]
        self.step_decay = step_decay
        self.mask: Mask = mask
        self.edge: Edge = edge
        self.oov: Oov = oov
        self.reduction: Reduction = reduction
        self.budget_mib = budget_mib

    def check(self, source: FeatureSource, draft: DraftModel) -> None:
        """Refuse terms that these built parts cannot serve.

        Raises:
            ValueError: for a feature term beside a source that projects (a trained projection is no fixed aim), or a
                top-k larger than the draft vocabulary.
        """
        if self.feature_terms and next(source.parameters(), None) is not None:
            name = type(self.feature_terms[0]).__name__
            raise ValueError(
                f"losses: {name} needs the target's own feature to compare with, but {type(source).__name__} projects "
                "it; use TopFeature, or drop the term"
            )
        for term in [*self.row_terms, *self.step_terms, *self.feature_terms]:
            term.check(draft)

    def weights(self, batch: Batch, depth: int) -> Float[Tensor, "B T S"]:
        """Weight of each row at each step, from the masks alone."""
        steps = [row_weights(batch.supervised, batch.document, s, self.mask, self.edge) for s in range(depth)]
        return torch.stack(steps, dim=-1)

    def denominators(self, batch: Batch, depth: int) -> Float[Tensor, " S"]:
        """N_s of this batch alone: sum them over an optimizer step's micro-batches and ranks, and pass them in."""
        if self.reduction == "all":
            return torch.full((depth,), float(batch.ids.numel()), device=batch.ids.device)
        return self.weights(batch, depth).sum((0, 1))

    def __call__(
        self,
        draft: DraftModel,
        steps: Sequence[DraftOut],
        batch: Batch,
        target: FrozenTarget,
        top: Float[Tensor, "B T Dt"],
        *,
        denominators: Float[Tensor, " S"] | None = None,
        counted: int | None = None,
        summary: LogitSummary | None = None,
    ) -> LossOut:
        """The loss of one batch from all its steps. ``top`` are the target's states after the final norm; only rows
        that weigh something or are judged get draft logits.

        ``denominators``: N_s over the whole optimizer step; None: this batch's own. ``counted``: how many steps, from
        the first, have a loss; the others are judged alone, which costs no more than their logits. None: all.
        ``summary`` [B, T]: of the target's logits at ``top``, where it is known: then only the draft vocabulary's
        logits are made.

        Raises:
            ValueError: a summary beside edge "counted", whose teachers past the text it does not know.
        """
        if summary is not None and self.edge == "counted":
            raise ValueError("edge 'counted' is taught by rows past the text, of which nothing is kept; use 'dropped'")
        depth, vocab = len(steps), draft.vocab
        counted = depth if counted is None else min(counted, depth)
        wide = torch.promote_types(steps[0].head_in.dtype, torch.float32)
        weights = self.weights(batch, depth)
        judged = weights > 0 if self.mask == "drafted" else _drafted(batch, depth)
        weights[..., counted:] = 0
        counts = self.denominators(batch, depth) if denominators is None else denominators
        counts = counts.clamp(min=1).to(wide)  # weights are whole: N_s = 0 means S_s = 0
        decay = self.step_decay ** torch.arange(depth, device=counts.device, dtype=wide)
        share = decay / counts
        largest = share.max()  # kept out of the pieces: a narrow dtype would lose gradients so small

        sums, by_row = torch.zeros_like(share), (batch.ids.numel(), depth)
        hit = torch.zeros(by_row, dtype=torch.bool, device=counts.device)
        overlap = torch.zeros(by_row, dtype=wide, device=counts.device)
        known = None if summary is None else (target.head_over(vocab), summary)
        products = HeadProducts((p for p in draft.parameters() if p.requires_grad), slice_bytes(self.budget_mib))
        room = Room.of(self.budget_mib, draft, steps, products, wide)
        losses = self._row_losses if self.row_terms or self.step_terms else None
        acceptance = torch.zeros_like(share)
        if self.step_terms:
            acceptance = self._acceptance(draft, steps, batch, target, top, weights, known, products, room)
        collected = Collected(steps, draft, products) if torch.is_grad_enabled() else None
        for chunk in chunks((weights > 0) | judged, room.rows):
            states, teacher = self._teach(target, top, batch, vocab, chunk, room, known)
            for piece in chunk.pieces:
                s, place = piece.step, piece.place
                leaf = steps[s].head_in.detach().flatten(0, 1)[piece.rows].requires_grad_(collected is not None)
                with products:  # autocast would keep a leaf, and its cast, alive
                    logits = draft.logits(leaf.view_as(leaf), s)
                learned = None
                if s < counted:
                    weight = piece.spread(weights[..., s].flatten()[place])
                    learned = Learned(losses, acceptance[s], weight, share[s] / largest)
                found = compare(logits, partial(_law, teacher, piece), vocab, room.compared, learned)
                hit[place, s] = piece.pick(found.hit)
                if learned is None:
                    continue
                overlap[place, s] = piece.pick(found.overlap).to(wide)
                aims = states if _whole(teacher, piece) else states[piece.slot]
                rest = (self._feature_losses(leaf, aims) * learned.weight).sum()
                sums[s] += found.loss + rest.detach()
                if collected is not None:
                    collected.add(logits, found.gradient, rest * learned.factor, leaf, piece)
                del leaf, logits, found, aims, rest  # or they would live while the next piece's are made
            del teacher, states
        means, shape = sums / counts, (*batch.ids.shape, depth)
        total = (decay * means).sum()
        if collected is not None:
            total = collected.total(total, largest)
        return LossOut(total, means, weights, judged, hit.view(shape), overlap.view(shape))

    @torch.no_grad()
    def _acceptance(
        self,
        draft: DraftModel,
        steps: Sequence[DraftOut],
        batch: Batch,
        target: FrozenTarget,
        top: Tensor,
        weights: Tensor,
        known: Known | None,
        products: HeadProducts,
        room: Room,
    ) -> Float[Tensor, " S"]:
        """Mean overlap of each step's taught rows, known only once all of them were seen: a pass of its own."""
        total = weights.new_zeros((2, len(steps)), dtype=torch.promote_types(weights.dtype, torch.float32))
        for chunk in chunks(weights > 0, room.rows):
            _, teacher = self._teach(target, top, batch, draft.vocab, chunk, room, known)
            for piece in chunk.pieces:
                s = piece.step
                with products:
                    logits = draft.logits(steps[s].head_in.flatten(0, 1)[piece.place], s)
                for here in runs(logits.shape[0], room.compared):
                    law = teacher.rows(piece.slot[here])
                    weight = weights[..., s].flatten()[piece.place[here]] * law.taught
                    overlap = law.overlap(log_law(logits[here]))
                    total[:, s] += torch.stack(((weight * overlap).sum(), weight.sum()))
        return total[0] / total[1].clamp(min=1)

    def _row_losses(self, log_q: Tensor, law: Teacher, acceptance: Tensor) -> Tensor:
        total = log_q.new_zeros(log_q.shape[0])
        for term in self.row_terms:
            total = total + term.weight * term.per_row(log_q, law)
        for term in self.step_terms:
            total = total + term.weight * term.per_row(log_q, law, acceptance)
        return total * law.taught

    def _feature_losses(self, head_in: Tensor, aims: Tensor) -> Tensor:
        total = head_in.new_zeros(head_in.shape[0])
        for term in self.feature_terms:
            total = total + term.weight * term.per_row(head_in, aims)
        return total

    def _teach(
        self,
        target: FrozenTarget,
        top: Tensor,
        batch: Batch,
        vocab: Tensor,
        chunk: Chunk,
        room: Room,
        known: Known | None,
    ) -> tuple[Tensor, Teacher]:
        """The chunk's target states and what they teach; both blank where a teacher lies past the text."""
        last = top.shape[1] - 1
        place = chunk.row, chunk.column.clamp(max=last)
        states = top[place]
        following = batch.ids[chunk.row, (chunk.column + 1).clamp(max=last)]
        said = torch.where(chunk.column < last, draft_ids(following, vocab), OUTSIDE)
        if known is not None:
            head, summary = known
            there = LogitSummary(summary.argmax[place], summary.log_sum[place])
            at_once = room.made(states.shape[0], vocab.shape[0], states.dtype)
            law = teach_by_summary(head, states, there, vocab, self.oov, at_once, room.compared)
            return states, replace(law, said=said)
        blank = None
        if self.edge == "counted":
            blank = chunk.column > last
            states = states.masked_fill(blank[:, None], 0)
        at_once = room.made(states.shape[0], target.spec.vocab, states.dtype)
        return states, replace(teach(target, states, vocab, self.oov, blank, at_once, room.compared), said=said)


def _whole(teacher: Teacher, piece: Taught) -> bool:
    """Whether a piece has a row for every teacher of its chunk, in order."""
    return piece.rows.shape == teacher.label.shape


def _law(teacher: Teacher, piece: Taught, here: slice) -> Teacher:
    """The teachers of a run of a piece's rows."""
    return teacher.rows(here if _whole(teacher, piece) else piece.slot[here])


def _drafted(batch: Batch, depth: int) -> Tensor:
    """Rows a decoder could draft, [B, T, S]."""
    return torch.stack([row_weights(batch.supervised, batch.document, s) > 0 for s in range(depth)], dim=-1)
