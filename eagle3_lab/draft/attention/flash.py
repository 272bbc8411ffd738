"""Causal attention within documents by a fused kernel, forward and backward as two plain functions.

Unlike torch's ``scaled_dot_product_attention`` both are called by hand: the forward also returns the log-sum-exp of a
row's scores, and the backward takes output and log-sum-exp as arguments, which may then be those of a larger softmax
that these keys are only a part of. Which kernel runs is decided in one place, :mod:`eagle3_lab.draft.attention.select`.

Rows are flat here: N = B * T of them, a document's side by side. Padding rows are nobody's business: their output is
unspecified, their gradient 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.types import PADDING

Queries = Float[Tensor, "N heads d"]
Keys = Float[Tensor, "N kv_heads d"]
LogSums = Float[Tensor, "N heads"]
Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""

LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads each row of log-sum-exps to a multiple of this."""


@dataclass(frozen=True)
class Documents:
    """Where documents lie among the flat rows, known to the host.

    ``spans`` begin and end of each; ``padding`` the rows of none; ``bounds`` the begin of every run of rows, padding
    included, and N; ``longest`` run.
    """

    spans: tuple[tuple[int, int], ...]
    padding: Int[Tensor, " P"]
    bounds: Int[Tensor, " runs_1"]
    longest: int

    @classmethod
    def of(cls, document: Int[Tensor, "B T"]) -> Documents:
        """Read a batch's documents: one wait for the device, for a whole unroll."""
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        flat = document.flatten()
        starts = begins.flatten().nonzero()[:, 0]
        runs = torch.stack((starts, flat[starts])).tolist()
        ends = [*runs[0][1:], flat.shape[0]]
        spans = tuple((a, b) for a, b, name in zip(runs[0], ends, runs[1], strict=True) if name != PADDING)
        names = [(a // document.shape[1], name) for a, name in zip(*runs, strict=True) if name != PADDING]
        assert len(set(names)) == len(names), "a document's rows lie side by side"
        bounds = torch.cat((starts, starts.new_tensor([flat.shape[0]]))).int()
        padding = (flat == PADDING).nonzero()[:, 0]
        return cls(spans, padding, bounds, max(b - a for a, b in zip(runs[0], ends, strict=True)))


class Kernel(ABC):
    """Causal attention within documents. The scale is ``d ** -0.5``; query head h reads key head
    ``h // (heads / kv_heads)``; log-sum-exps are of scaled scores, float32 or wider."""

    @abstractmethod
    def forward(self, q: Queries, k: Keys, v: Keys, documents: Documents) -> tuple[Queries, LogSums]:
        """Output and log-sum-exp of each row; those of padding rows are unspecified."""

    @abstractmethod
    def backward(
        self, grad: Queries, q: Queries, k: Keys, v: Keys, out: Queries, lse: LogSums, documents: Documents
    ) -> tuple[Queries, Keys, Keys]:
        """Gradients of q, k, v, 0 at padding rows. With ``P = exp(scores - lse)``: dv = P' grad,
        dscores = P (grad v' - grad.out)."""


class PerDocument(Kernel):
    """One call a document, on tensors (1, heads, L, d) that are views of the rows."""

    def forward(self, q: Queries, k: Keys, v: Keys, documents: Documents) -> tuple[Queries, LogSums]:
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for begin, end in documents.spans:
            here = slice(begin, end)
            some, its_lse = self.forward_one(*(_as_batch(x[here]) for x in (q, k, v)))
            out[here], lse[here] = _as_rows(some), its_lse[0].T
        return out, lse

    def backward(
        self, grad: Queries, q: Queries, k: Keys, v: Keys, out: Queries, lse: LogSums, documents: Documents
    ) -> tuple[Queries, Keys, Keys]:
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for begin, end in documents.spans:
            here = slice(begin, end)
            rows = (_as_batch(x[here]) for x in (grad, q, k, v, out))
            some = self.backward_one(*rows, lse=lse[here].T[None])
            for whole, part in zip(gradients, some, strict=True):
                whole[here] = _as_rows(part)
        return gradients

    @abstractmethod
    def forward_one(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention, all (1, heads, L, d); the log-sum-exp is (1, heads, L)."""

    @abstractmethod
    def backward_one(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Its gradients for q, k, v."""


class FlashCPU(PerDocument):
    """torch's flash attention for the CPU."""

    def forward_one(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    def backward_one(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse.contiguous(), 0.0, True)


class Efficient(PerDocument):
    """torch's memory-efficient attention for CUDA. It knows no groups: keys and values are repeated."""

    def forward_one(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = _repeated(k, q), _repeated(v, q)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        return out, lse[..., : q.shape[2]]

    def backward_one(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        length = -(-q.shape[2] // LSE_ALIGNMENT) * LSE_ALIGNMENT
        padded = lse.new_full((*lse.shape[:2], length), float("inf"))
        padded[..., : q.shape[2]] = lse
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of a dropout of 0
        wanted = [True, True, True, False]
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, _repeated(k, q), _repeated(v, q), None, out, padded, unused, unused, 0.0, wanted, True
        )
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


class Plain(PerDocument):
    """The formula itself, where no fused kernel exists. Exact in the inputs' dtype, with an L x L score matrix."""

    def forward_one(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return (weights @ _repeated(v, q).to(weights.dtype)).to(q.dtype), lse

    def backward_one(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        weights = (self._scores(q, k) - lse[..., None]).exp()
        wide_grad, wide_q, wide_k, wide_v, wide_out = (
            x.to(weights.dtype) for x in (grad, q, _repeated(k, q), _repeated(v, q), out)
        )
        inner = wide_grad @ wide_v.mT - (wide_grad * wide_out).sum(-1, keepdim=True)
        slope = weights * inner * q.shape[-1] ** -0.5
        dk, dv = ((x.unflatten(1, (k.shape[1], -1)).sum(2)) for x in (slope.mT @ wide_q, weights.mT @ wide_grad))
        return (slope @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ _repeated(k, q).to(wide).mT * q.shape[-1] ** -0.5
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(unseen, float("-inf"))


class FlashPacked(Kernel):
    """Flash attention for CUDA on packed rows: one call for all documents. Runs of padding go along as documents."""

    def forward(self, q: Queries, k: Keys, v: Keys, documents: Documents) -> tuple[Queries, LogSums]:
        bounds, longest = documents.bounds, documents.longest
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False
        )
        return out, lse.T

    def backward(
        self, grad: Queries, q: Queries, k: Keys, v: Keys, out: Queries, lse: LogSums, documents: Documents
    ) -> tuple[Queries, Keys, Keys]:
        # exp(score - inf) = 0: a padding row pulls at nothing
        grad = grad.index_fill(0, documents.padding, 0.0)
        lse = lse.index_fill(0, documents.padding, float("inf")).T.contiguous()
        bounds, longest = documents.bounds, documents.longest
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # dropout's
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True, *unused
        )


def _as_batch(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # (1, heads, L, d)


def _as_rows(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)  # (L, heads, d)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
