"""Sampling: from logits to the distribution that tokens are drawn from, and the draw itself.

``SamplingLaw`` gives p of every node of a tree (penalties, temperature, filters). ``draw`` draws one token for each of
many rows, as answers in batches need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from eagle3_lab.interfaces import Law
from eagle3_lab.types import COLDEST, PADDING, Tree


class SamplingLaw(Law):
    """Repetition penalty, then temperature, top-k, top-p, min-p, in transformers' order.

    ``temperature`` 0 is greedy: one-hot at the lowest arg-max after the penalty, whatever the filters. None switches a
    filter off. ``repetition_penalty`` acts once on every token of a node's context, prompt included.

    Probabilities come in float64 for float64 logits and in float32 otherwise.

    Raises ValueError for a value outside its range.
    Source: the warpers of transformers ``generation/logits_process.py`` in the order of
    ``GenerationMixin._get_logits_processor``.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
    ) -> None:
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
        if 0 < temperature < COLDEST:
            raise ValueError(f"temperature must be 0 (greedy) or at least {COLDEST:g}, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be >= 1 (null: off), got {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (null: off), got {top_p}")
        if min_p is not None and not 0 <= min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (null: off), got {min_p}")
        if not (repetition_penalty > 0 and math.isfinite(repetition_penalty)):
            raise ValueError(f"repetition_penalty must be finite and > 0 (1: off), got {repetition_penalty}")
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.repetition_penalty = repetition_penalty

    def __str__(self) -> str:
        """What of it is on: "temperature 1, top-p 0.9"."""
        said = ["greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"]
        options = {"top-k": self.top_k, "top-p": self.top_p, "min-p": self.min_p}
        if self.repetition_penalty != 1.0:
            options["repetition penalty"] = self.repetition_penalty
        return ", ".join([*said, *(f"{name} {value:g}" for name, value in options.items() if value is not None)])

    def probs(self, logits: Float[Tensor, "B N V"], ids: Int[Tensor, "B L"], tree: Tree) -> Float[Tensor, "B N V"]:
        """p of every node; see :meth:`eagle3_lab.interfaces.Law.probs` for what a node's context is."""
        return self.filtered(self._penalised(logits, ids, tree))

    def certain(self, logits: Float[Tensor, "B N V"], ids: Int[Tensor, "B L"], tree: Tree) -> Int[Tensor, "B N"] | None:
        """At temperature 0 the lowest arg-max, as in :meth:`filtered`."""
        return self._penalised(logits, ids, tree).argmax(-1) if self.temperature == 0 else None

    def _penalised(self, logits: Tensor, ids: Tensor, tree: Tree) -> Tensor:
        if self.repetition_penalty == 1.0:
            return logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return _penalise(logits, contexts(ids, tree, logits.shape[-1]), self.repetition_penalty)

    def filtered(self, logits: Float[Tensor, "B N V"]) -> Float[Tensor, "B N V"]:
        """Temperature and filters alone, which need no context: all of :meth:`probs` where there is no penalty.

        Log-probabilities are as good as logits: a number added to a whole row changes nothing.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            # argmax returns the first of several maxima: the tie rule of vanilla and of every tree alike.
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = _keep_top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits = _keep_top_p(logits, self.top_p)
        if self.min_p is not None and self.min_p > 0:
            logits = _keep_min_p(logits, self.min_p)
        return logits.softmax(-1)


def contexts(ids: Int[Tensor, "B L"], tree: Tree, vocab: int) -> Bool[Tensor, "B N V"]:
    """Which tokens stand in each node's context: the committed ids and the node's path, itself included.

    Tokens at or above ``vocab`` (rows of a larger embedding) can never be drawn and are left out.
    """
    batch, nodes = tree.tokens.shape
    path = torch.where(tree.visible(), tree.tokens[:, None, :], vocab).clamp(max=vocab)  # (B, N, N)
    committed = torch.where(ids == PADDING, vocab, ids).clamp(max=vocab)  # (B, L)
    seen = torch.zeros(batch, nodes, vocab + 1, dtype=torch.bool, device=ids.device)  # the last column takes the rest
    seen.scatter_(2, committed[:, None, :].expand(batch, nodes, -1), True)
    seen.scatter_(2, path, True)
    return seen[..., :vocab]


def _penalise(logits: Float[Tensor, "B N V"], seen: Bool[Tensor, "B N V"], penalty: float) -> Float[Tensor, "B N V"]:
    weaker = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, weaker, logits)


def _keep_top_k(logits: Float[Tensor, "B N V"], k: int) -> Float[Tensor, "B N V"]:
    """Ties with the k-th largest stay, as in transformers."""
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def _keep_top_p(logits: Float[Tensor, "B N V"], top_p: float) -> Float[Tensor, "B N V"]:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p; the likeliest always stays."""
    ascending, order = logits.sort(dim=-1, stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)


def _keep_min_p(logits: Float[Tensor, "B N V"], min_p: float) -> Float[Tensor, "B N V"]:
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)


BLOCK = 256  # tokens whose probabilities are summed together where one of them is drawn
LIKELIEST, MORE = 256, 16  # tokens that top-p looks at first, and how many times as many where they are too few


def draw(
    logits: Float[Tensor, "B V"],
    temperature: float,
    generators: Sequence[torch.Generator | None],
    top_p: float | None = None,
) -> Int[Tensor, " B"]:
    """One token a row, never one of probability 0; PADDING where the logits are NaN.

    Args:
        logits: at float32 or what they are, if that is more, their softmax is taken.
        temperature: 0 takes the likeliest, the first of equals; otherwise logits are divided by it.
        generators: of the rows' draws, on the CPU; None where a row's token does not matter.
        top_p: tokens are drawn from the likeliest ones that together have this probability; None: from all.
    """
    if temperature == 0:
        best, index = logits.max(-1)  # which is NaN where any is
        return index.masked_fill(best.isnan(), PADDING)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probs = torch.softmax(wide / temperature, -1)
    if top_p is not None and top_p < 1:
        probs = keep_top_p(probs, top_p)
    idle = torch.zeros(1, dtype=torch.float64)
    drawn = [idle if one is None else torch.rand(1, dtype=torch.float64, generator=one) for one in generators]
    index, total = pick(probs, torch.stack(drawn).to(logits.device))
    lawful = probs.gather(1, index) > 0  # a sum of sums may lie an ulp beside the sum
    return torch.where(lawful, index, probs.argmax(-1, keepdim=True))[:, 0].masked_fill(total.isnan(), PADDING)


def pick(probs: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> tuple[Int[Tensor, "B 1"], Float[Tensor, " B"]]:
    """The first token up to which the probabilities exceed ``uniform`` of their sum, and that sum, in float64.

    Summed by blocks first: running over a large vocabulary took half as long as a forward of many rows.
    """
    blocks = pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    aim = uniform * upto[:, -1:]
    block = torch.searchsorted(upto, aim, right=True).clamp(max=upto.shape[-1] - 1)
    aim = aim - pad(upto, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    within = torch.searchsorted(inside, aim, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + within).clamp(max=probs.shape[-1] - 1), upto[:, -1]


def keep_top_p(probs: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"]:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p (transformers' rule: of equally likely ones
    the first go first); the likeliest stays.

    Only the likeliest tokens are sorted, more of them for rows in which they do not reach ``top_p``: sorting all of a
    large vocabulary took longer than a forward of many rows.
    """
    return _keep(probs, probs.sum(-1, keepdim=True, dtype=torch.float64) - (1 - top_p), LIKELIEST)


def _keep(probs: Float[Tensor, "B V"], mass: Float[Tensor, "B 1"], count: int) -> Float[Tensor, "B V"]:
    """The likeliest tokens, as long as those before them have less than ``mass``; ``count`` are looked at first."""
    likeliest, index = probs.topk(min(count, probs.shape[-1]), -1)
    above = likeliest.double().cumsum(-1) - likeliest
    kept = (above < mass).sum(-1, keepdim=True).clamp(min=1)
    last = likeliest.gather(-1, kept - 1)
    # Of those as likely as the last one, the ones behind in the vocabulary stay.
    equal, likelier = likeliest == last, likeliest > last
    behind = index.masked_fill(~equal, -1).sort(-1, descending=True).values
    first = behind.gather(-1, (kept - likelier.sum(-1, keepdim=True) - 1).clamp(min=0))
    stays = likelier | (equal & (index >= first)) | likeliest.isnan()
    found = torch.zeros_like(probs).scatter_(-1, index, likeliest * stays)
    if count < probs.shape[-1]:
        short = ~(last > likeliest[:, -1:])[:, 0]  # or others as likely are not among these
        if short.any():
            found[short] = _keep(probs[short], mass[short], count * MORE)
    return found
