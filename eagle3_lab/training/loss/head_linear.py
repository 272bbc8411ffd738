"""The products of a draft's head, in the memory that they need and no more.

Autograd would cast a head's weights for every product, and make their whole gradient anew for every piece of a loss,
twice where products are narrower than weights. While :class:`HeadProducts` is active, ``torch.nn.functional.linear``
(and with it ``nn.Linear``) multiplies by weights cast once, and its backward adds the weights' gradient slice by slice
to one buffer, of which autograd hears nothing. A head that multiplies in another way is none of its business and goes
through autograd as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eagle3_lab.backend.linear_override import LinearMode
from eagle3_lab.backend.onednn_linear import multiplied


class HeadProducts(LinearMode):
    """What ``linear`` does while this is active (``with products: ...``).

    ``trained`` are the weights whose gradients are collected; those of any other trained tensor are autograd's.
    ``slice_bytes`` bounds the part of a gradient that is made before it is added; None: all of it.
    """

    def __init__(self, trained: Iterable[Tensor], slice_bytes: int | None = None) -> None:
        super().__init__()
        self._trained = {id(weight): weight for weight in trained}
        self._slice_bytes = slice_bytes
        self._gradients: dict[int, Tensor] = {}
        self._narrow: dict[int, Tensor] = {}
        self._used: dict[int, Tensor] = {}

    def held_bytes(self) -> int:
        """What the gradients and casts of all weights met so far take, or will."""
        gradients = sum(w.nbytes for key, w in self._used.items() if key in self._trained)
        return gradients + sum(w.nbytes for w in self._narrow.values())

    def take(self, weight: Tensor) -> Tensor | None:
        """The gradient collected for a weight, which is then the caller's; None where it was never multiplied by."""
        return self._gradients.pop(id(weight), None)

    def add(self, weight: Tensor, grad: Float[Tensor, "R out"], x: Float[Tensor, "R in"]) -> None:
        """Add the gradient of one product to the weight's."""
        key = id(weight)
        if key not in self._trained:
            return
        if (total := self._gradients.get(key)) is None:
            total = self._gradients[key] = torch.zeros_like(weight)
        size = total.shape[0]
        rows = size if self._slice_bytes is None else max(1, self._slice_bytes // (x.shape[1] * x.element_size()))
        for begin in range(0, size, rows):
            total[begin : begin + rows] += multiplied(grad[:, begin : begin + rows].T, x.T)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in a product's dtype, made once."""
        if weight.dtype == dtype:
            return weight
        key = id(weight)
        if key not in self._narrow:
            self._narrow[key] = weight.detach().to(dtype)
        return self._narrow[key]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = input
        learns = weight.requires_grad and torch.is_grad_enabled()
        if learns and not (x.requires_grad and id(weight) in self._trained):
            return nn.functional.linear(x, weight, bias)
        self._used[id(weight)] = weight
        dtype, device = weight.dtype, weight.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        out = _Product.apply(x.reshape(-1, x.shape[-1]), bias, self, [weight])  # in a list: hidden from autograd
        assert isinstance(out, Tensor)
        return out.view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    """x W' + b, whose backward hands W's gradient to ``products``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, products: HeadProducts, weight: list[Tensor]) -> Tensor:  # noqa: ANN401
        (ctx.weight,), ctx.products = weight, products
        ctx.save_for_backward(x)
        return multiplied(x, products.cast(ctx.weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad,), (x,) = grads, ctx.saved_tensors
        ctx.products.add(ctx.weight, grad, x)
        by_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        return multiplied(grad, ctx.products.cast(ctx.weight, x.dtype).T), by_bias, None, None
