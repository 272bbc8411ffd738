"""float32 products of a training by oneDNN, on CPUs for which torch's own way of them is slow.

torch multiplies float32 by MKL, whose AVX-512 kernels run on Intel's processors alone: on others of that width oneDNN's
are over twice as fast (NOTES.md). The formats are the same, float32 in and out; results differ by the order of sums.
bfloat16 products are oneDNN's anyway, and a target's forward multiplies by :mod:`eagle3_lab.backend.prepacked_linear`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, library, nn
from torch.autograd.function import once_differentiable

from eagle3_lab.backend.linear_override import LinearMode

CPUINFO = Path("/proc/cpuinfo")


def float32_products() -> AbstractContextManager[object]:
    """While this is active, float32 linear layers on the CPU multiply forward and backward by oneDNN, where that is
    the faster way on this machine. Decided by the processor's name and not by a clock: the same seed gives the same
    run. Under autocast there are none, and every operation is spared the question."""
    narrow = torch.is_autocast_enabled("cpu")
    return OneDNN() if outdoes_mkl() and not narrow else nullcontext()


@cache
def outdoes_mkl() -> bool:
    """Whether this is a CPU of AVX-512 that is not Intel's, and torch multiplies by MKL."""
    mkl = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return mkl and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", "GenuineIntel")


def _vendor() -> str:
    """Who made the processor, as Linux tells it; empty where nobody does."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


class OneDNN(LinearMode):
    """What ``torch.nn.functional.linear`` does while this is active."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _takes(input, weight, bias):
            return nn.functional.linear(input, weight, bias)
        out = _Linear.apply(input, weight, bias)
        assert isinstance(out, Tensor)
        return out


def _takes(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    alike = input.dtype == weight.dtype == torch.float32 and input.device.type == weight.device.type == "cpu"
    return alike and input.numel() > 0 and weight.ndim == 2 and not torch.is_autocast_enabled("cpu")


class _Linear(torch.autograd.Function):
    """x W' + b."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(input, weight)
        return product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad,), (x, weight) = grads, ctx.saved_tensors
        wants_x, wants_weight, *rest = ctx.needs_input_grad
        rows, by_row = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return (
            product(grad, weight.T, None) if wants_x else None,
            product(by_row.T, rows.T, None) if wants_weight else None,
            by_row.sum(0) if any(rest) else None,
        )


def multiplied(
    x: Float[Tensor, "*rows K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, " M"] | None = None
) -> Float[Tensor, "*rows M"]:
    """x W' + b by the faster way, for functions whose backward is written by hand: autograd hears nothing of it."""
    by_onednn = outdoes_mkl() and _takes(x, weight, bias)
    return product(x, weight, bias) if by_onednn else nn.functional.linear(x, weight, bias)


def product(
    x: Float[Tensor, "*rows K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, " M"] | None
) -> Float[Tensor, "*rows M"]:
    """x W' + b in float32, by oneDNN; any strides."""
    return _opaque(x, weight, bias) if torch.compiler.is_compiling() else _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# torch's compiler takes that operation for a frozen model's, and fails on weights that change
_opaque = library.custom_op(
    "eagle3_lab::float32_product", _product, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
