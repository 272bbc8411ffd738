"""Attention of an unrolled draft without its score matrix: the same function as the dense form, fused.

A row of step s sees step 0's keys causally within its document, and one key of its own for each later step
(:mod:`eagle3_lab.draft.attention.dense` draws it). So the softmax has a causal part, which a fused kernel computes, and
s scores that are dot products along a diagonal. With lse_0 the kernel's log-sum-exp and z_i = scale q.k_i:

    lse = log(exp(lse_0) + sum over i of exp(z_i))
    out = exp(lse_0 - lse) out_0 + sum over i of exp(z_i - lse) v_i

The kernel's log-sum-exp carries no gradient, so autograd through these lines would be silently wrong. The backward is
written by hand: the kernel's backward, given the JOINED out and lse, returns the causal part exactly, and

    p_i = exp(z_i - lse)                  dv_i = p_i grad
    g_i = p_i (grad.v_i - grad.out) scale     dk_i = g_i q         dq += g_i k_i

each summed over the query heads that share a key head. Memory of a step is linear in T.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3_lab.backend.compile import fusible, fusing, is_fusing
from eagle3_lab.draft.attention.flash import Documents
from eagle3_lab.draft.attention.select import kernel_for
from eagle3_lab.interfaces import Context
from eagle3_lab.types import Rows


class JoinedUnrolled(Context):
    """The fast form of :class:`~eagle3_lab.draft.attention.dense.DenseUnrolled`, for documents whose rows lie side by
    side.

    Keys and values of all steps stay in the graph; grouped heads are not repeated. Not twice differentiable. In
    bfloat16 the diagonal part, the join and the log-sum-exps are computed in float32.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._documents: Documents | None = None

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "B heads T d"],
        k: Float[Tensor, "B kv_heads T d"],
        v: Float[Tensor, "B kv_heads T d"],
        rows: Rows,
    ) -> Float[Tensor, "B heads T d"]:
        if self._documents is None:  # the same at every step
            assert rows.document is not None, "an unroll's rows carry their document"
            self._documents = Documents.of(rows.document)
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        out = _Joined.apply(self._documents, q, *keys, *values)
        assert isinstance(out, Tensor)
        return out


class _Joined(torch.autograd.Function):
    """Takes the documents, q, the keys of steps 0..s, the values of steps 0..s."""

    @staticmethod
    def forward(ctx: Any, documents: Documents, q: Tensor, *stored: Tensor) -> Tensor:  # noqa: ANN401
        batch = q.shape[0]
        q, rows = _rows(q), [_rows(x) for x in stored]
        keys, values = _halves(rows)
        padding = documents.padding
        with torch.autocast(q.device.type, enabled=False):
            ctx.kernel, ctx.fusing = kernel_for(q.device, q.dtype), is_fusing()
            out, lse = ctx.kernel.forward(q, keys[0], values[0], documents)
            alone = _scores(q[padding], keys[0][padding, :, None])  # a padding row sees itself
            out[padding], lse[padding] = _of_groups(values[0][padding], q), alone.flatten(1)
            if len(keys) > 1:
                out, lse = _join(q, out, lse, _stack(keys[1:]), _stack(values[1:]))
        ctx.documents = documents
        ctx.save_for_backward(q, out, lse, *rows)
        return _heads(out, batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        batch = grads[0].shape[0]
        documents, padding = ctx.documents, ctx.documents.padding
        q, out, lse, *stored = ctx.saved_tensors
        keys, values = _halves(stored)
        grad = _rows(grads[0]).contiguous()
        with torch.autocast(q.device.type, enabled=False), fusing(ctx.fusing):
            dq, dk, dv = ctx.kernel.backward(grad, q, keys[0], values[0], out, lse, documents)
            here = (x[padding] for x in (grad, q, out, lse))
            with fusing(False):  # few rows, and another number of them in each batch
                own = _own_gradients(*here, keys=keys[0][padding, :, None], values=values[0][padding, :, None])
            dq[padding], dk[padding], dv[padding] = own[0].to(q.dtype), own[1][:, :, 0], own[2][:, :, 0]
            dks, dvs = [dk], [dv]
            if len(keys) > 1:
                more, *own = _own_gradients(grad, q, out, lse, _stack(keys[1:]), _stack(values[1:]))
                dq = (dq + more).to(q.dtype)
                for gathered, each in zip((dks, dvs), own, strict=True):
                    gathered += each.unbind(2)
        return None, *(_heads(x, batch) for x in (dq, *dks, *dvs))


@fusible("any")
def _join(q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Widen a softmax over the causal keys by each row's own keys (N, kv_heads, i, d)."""
    scores = _scores(q, keys)
    first = _grouped(lse[..., None], keys.shape[1])[..., 0]
    joined = torch.logaddexp(first, scores.logsumexp(-1))
    rest = _mixed((scores - joined[..., None]).exp(), values.to(scores.dtype))
    both = (first - joined).exp()[..., None] * _grouped(out, keys.shape[1]) + rest
    return both.flatten(1, 2).to(q.dtype), joined.flatten(1)


@fusible("any")
def _own_gradients(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq and, per key (N, kv_heads, i, d), dk and dv of the rows' own keys: the module's second table."""
    kv_heads = keys.shape[1]
    dtype = keys.dtype
    p = (_scores(q, keys) - _grouped(lse[..., None], kv_heads)).exp()  # (N, kv_heads, group, i)
    grad, q, out = (_grouped(x, kv_heads).to(p.dtype) for x in (grad, q, out))
    keys, values = keys.to(p.dtype), values.to(p.dtype)
    g = p * (_dots(grad, values) - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return _mixed(g, keys).flatten(1, 2), _mixed(g.mT, q).to(dtype), _mixed(p.mT, grad).to(dtype)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """scale q.k_i in float32 or wider, (N, kv_heads, group, i)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return _dots(_grouped(q, keys.shape[1]).to(wide), keys.to(wide)) * q.shape[-1] ** -0.5


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """a.b of each pair, (N, kv_heads, group, i). Compiled, such small products are faster as a part of their pass."""
    return (a[:, :, :, None] * b[:, :, None]).sum(-1) if torch.compiler.is_compiling() else a @ b.mT


def _mixed(weights: Tensor, x: Tensor) -> Tensor:
    """Weighted sums of x over the weights' last dimension, (N, kv_heads, .., d)."""
    return (weights[..., None] * x[:, :, None]).sum(-2) if torch.compiler.is_compiling() else weights @ x


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    return x.view(x.shape[0], kv_heads, x.shape[1] // kv_heads, x.shape[2])  # (N, kv_heads, group, d)


def _of_groups(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _stack(steps: list[Tensor]) -> Tensor:
    return torch.stack(steps, dim=2)  # (N, kv_heads, i, d)


def _halves(stored: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    half = len(stored) // 2
    return stored[:half], stored[half:]


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)  # (B, heads, T, d) -> (B T, heads, d)


def _heads(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
