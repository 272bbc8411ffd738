"""The one law from which vanilla and every speculative method draw: penalties, temperature, filters.

Knows logits and contexts. Knows neither trees' growth nor acceptance.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.types import COLDEST, PADDING, Law, Tree


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
        """p of every node; see :meth:`eagle3_lab.types.Law.probs` for what a node's context is."""
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
