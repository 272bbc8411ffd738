"""The loss of an unrolled draft: its rows' terms, averaged over rows, summed over steps.

    loss = sum over s of step_decay^s  S_s / N_s

S_s is the weighted sum of the row losses of step s, N_s the sum of the rows' weights. N_s depends on masks alone
(rows dropped for vocabulary keep their place in it), so a caller can sum it over all micro-batches and ranks of one
optimizer step, and accumulation, packing and data parallelism change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eagle3_lab.draft.teacher import Oov, Teacher, teach
from eagle3_lab.draft.terms import FeatureTerm, RowTerm, TopKCE
from eagle3_lab.rows import Edge, Mask, row_weights, shift
from eagle3_lab.types import Batch, DraftModel, DraftOut, FeatureSource, FrozenTarget

Reduction = Literal["supervised", "all"]


@dataclass(frozen=True)
class LossOut:
    """A batch's loss and what was seen on the way (all but ``total`` without gradient). S steps, s counted from 0.

    ``total`` to call backward on; ``steps`` [S] the undecayed S_s / N_s; ``weights`` the rows' weights by the loss's
    own mask; ``judged`` the rows a decoder could draft (mask "drafted"), whatever the loss's mask; ``hit`` True where
    the draft's arg-max, in target ids, is the target's over its full vocabulary; ``overlap`` sum of min(p, q), p over
    the full vocabulary. ``hit`` and ``overlap`` are filled where a row weighs or is judged, else False and 0.
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
    target leaves the draft vocabulary (:mod:`eagle3_lab.draft.teacher`), ``reduction`` what N_s counts: "supervised"
    the rows' weights, "all" every row of the batch, padding included, as EAGLE-3's code does.

    Raises:
        ValueError: if no term has a positive weight, ``step_decay`` is outside (0, 1], a name is unknown, or ``edge``
            "counted" meets another mask than "official".

    Source: SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:834-859 (terms, rows), traineagle3/main.py:284-285 (decay).
    """

    def __init__(
        self,
        terms: Sequence[RowTerm | FeatureTerm],
        step_decay: float = 0.8,
        mask: Mask = "drafted",
        edge: Edge = "dropped",
        oov: Oov = "drop",
        reduction: Reduction = "supervised",
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
        self.row_terms = [term for term in terms if isinstance(term, RowTerm) and term.weight > 0]
        self.feature_terms = [term for term in terms if isinstance(term, FeatureTerm) and term.weight > 0]
        self.step_decay = step_decay
        self.mask: Mask = mask
        self.edge: Edge = edge
        self.oov: Oov = oov
        self.reduction: Reduction = reduction

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
        size = draft.vocab.shape[0]
        for term in self.row_terms:
            if isinstance(term, TopKCE) and term.k > size:
                raise ValueError(f"losses.TopKCE.k must be <= the draft vocabulary's {size}, got {term.k}")

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
    ) -> LossOut:
        """The loss of one batch from all its steps. ``top`` are the target's states after the final norm; only rows
        that weigh something or are judged get draft logits.

        ``denominators``: N_s over the whole optimizer step; None: this batch's own.
        """
        depth = len(steps)
        weights = self.weights(batch, depth)
        judged = weights > 0 if self.mask == "drafted" else _drafted(batch, depth)
        places = _places((weights > 0) | judged)
        vocab = draft.vocab
        teacher, slots = self._teachers(target, top, vocab, places)
        losses, hits, overlaps = [], [], []
        for s, (out, place, slot) in enumerate(zip(steps, places, slots, strict=True)):
            law = teacher.rows(slot)
            head_in = out.head_in.flatten(0, 1)[place]
            logits = draft.logits(head_in, s)
            log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            row_loss = self._row_losses(log_q, law) + self._feature_losses(head_in, top, place, s)
            losses.append((row_loss * weights[..., s].flatten()[place]).sum())
            with torch.no_grad():
                hits.append(_spread(vocab[log_q.argmax(-1)] == law.argmax, place, batch))
                overlaps.append(_spread(law.overlap(log_q), place, batch))
        if denominators is None:
            denominators = self.denominators(batch, depth)
        means = torch.stack(losses) / denominators.clamp(min=1)  # weights are whole: N_s = 0 means S_s = 0
        decay = self.step_decay ** torch.arange(depth, device=means.device, dtype=means.dtype)
        hit, overlap = torch.stack(hits, dim=-1), torch.stack(overlaps, dim=-1)
        return LossOut((decay * means).sum(), means.detach(), weights, judged, hit, overlap)

    def _row_losses(self, log_q: Tensor, law: Teacher) -> Tensor:
        total = log_q.new_zeros(log_q.shape[0])
        for term in self.row_terms:
            total = total + term.weight * term.per_row(log_q, law)
        return total * law.taught

    def _feature_losses(self, head_in: Tensor, top: Tensor, place: Tensor, s: int) -> Tensor:
        total = head_in.new_zeros(head_in.shape[0])
        for term in self.feature_terms:
            total = total + term.weight * term.per_row(head_in, shift(top, 1 + s).flatten(0, 1)[place])
        return total

    def _teachers(
        self, target: FrozenTarget, top: Tensor, vocab: Tensor, places: Sequence[Tensor]
    ) -> tuple[Teacher, Sequence[Tensor]]:
        """Each target row's teacher once, and per step where in it the draft rows' teachers lie."""
        batch_size, rows, _ = top.shape
        wide = rows + len(places)  # a teacher may lie past the text: edge "counted"
        ids = torch.cat([place // rows * wide + place % rows + 1 + s for s, place in enumerate(places)])
        used = torch.zeros(batch_size * wide, dtype=torch.bool, device=top.device)
        used[ids] = True
        grid = used.nonzero()[:, 0]
        b, t = grid // wide, grid % wide
        blank = t >= rows if self.edge == "counted" else None
        teacher = teach(target, top[b, t.clamp(max=rows - 1)], vocab, self.oov, blank)
        slots = (used.cumsum(0) - 1)[ids]
        return teacher, slots.split([len(place) for place in places])


def _drafted(batch: Batch, depth: int) -> Tensor:
    """Rows a decoder could draft, [B, T, S]."""
    return torch.stack([row_weights(batch.supervised, batch.document, s) > 0 for s in range(depth)], dim=-1)


def _places(wanted: Tensor) -> Sequence[Tensor]:
    """Per step the flat indices ``b * T + t`` of the wanted rows [B, T, S]; one wait for the device, not one a step."""
    step_and_row = wanted.movedim(-1, 0).flatten(1).nonzero()
    return step_and_row[:, 1].split(wanted.sum((0, 1)).tolist())


def _spread(values: Tensor, place: Tensor, batch: Batch) -> Tensor:
    """Put rows' values back where the rows stand, [B, T]."""
    flat = values.new_zeros(batch.ids.numel())
    flat[place] = values
    return flat.view(batch.ids.shape)
