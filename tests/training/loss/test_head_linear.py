"""A head's products: what autograd gives, with each weight's gradient in one place and its cast made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from eagle3_lab.backend import onednn_linear
from eagle3_lab.training.loss.head_linear import HeadProducts


@pytest.fixture(autouse=True)
def _plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is: products by oneDNN have tests of their own, and are equal but for rounding."""
    monkeypatch.setattr(onednn_linear, "outdoes_mkl", lambda: False)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def make(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 11, bias=bias)


def capped(head: nn.Linear, x: Tensor) -> Tensor:
    return 3 * (head(x) / 3).tanh()


@pytest.mark.parametrize("logits", [lambda head, x: head(x), capped], ids=["plain", "capped"])
@pytest.mark.parametrize("slice_bytes", [None, 30, 1])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_autograds(
    logits: Callable[[nn.Linear, Tensor], Tensor], slice_bytes: int | None, autocast: bool, bias: bool
) -> None:
    head, x, grad = make(bias), rows(5), torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    products = HeadProducts(head.parameters(), slice_bytes)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        told = logits(head, x)
        with products:
            found = logits(head, x)
    assert found.dtype == told.dtype
    assert torch.equal(found, told)
    by_x, by_weight, *by_bias = torch.autograd.grad(told, [x, *head.parameters()], grad.to(told.dtype))
    again, none, *bias_again = torch.autograd.grad(
        found, [x, *head.parameters()], grad.to(told.dtype), allow_unused=True
    )
    collected = products.take(head.weight)
    assert none is None and collected is not None
    torch.testing.assert_close([again, collected, *bias_again], [by_x, by_weight, *by_bias])
    assert products.take(head.weight) is None, "taken once"


def test_gradients_of_several_products_and_weights_add_up() -> None:
    one, two = make(), make()
    products = HeadProducts([*one.parameters(), *two.parameters()])
    for seed, head in enumerate((one, two, one)):
        with products:
            out = head(rows(4, seed))
        out.sum().backward()
    for head, seeds in ((one, (0, 2)), (two, (1,))):
        total = sum(rows(4, seed).detach().sum(0) for seed in seeds)
        torch.testing.assert_close(products.take(head.weight), total.expand(11, 6))
        assert head.weight.grad is None


def test_a_frozen_weight_is_cast_once_and_gets_no_gradient() -> None:
    head, x = make().requires_grad_(False), rows(3)
    products = HeadProducts([])
    with products, torch.autocast("cpu", torch.bfloat16):
        first = products.cast(head.weight, torch.bfloat16)
        out = head(x)
        assert products.cast(head.weight, torch.bfloat16) is first
    out.sum().backward()
    assert x.grad is not None
    assert products.take(head.weight) is None
    assert products.held_bytes() == 11 * 6 * 2


def test_weights_made_of_parameters_and_rows_without_gradient_are_autograds() -> None:
    head, x = make(bias=False), rows(3)
    products = HeadProducts(head.parameters())
    with products:
        made = nn.functional.linear(x, 2 * head.weight)
        still = head(x.detach())
    (made + still).sum().backward()
    assert products.take(head.weight) is None
    torch.testing.assert_close(head.weight.grad, 3 * x.detach().sum(0).expand(11, 6))


def test_what_will_be_held_is_known_from_a_product_of_no_rows() -> None:
    head = make()
    products = HeadProducts(head.parameters())
    with products, torch.autocast("cpu", torch.bfloat16):
        assert head(rows(0)).shape == (0, 11)
    assert products.held_bytes() == 11 * 6 * (4 + 2)


def test_more_than_two_dimensions_are_rows_too() -> None:
    head, x = make(), rows(6)
    products = HeadProducts(head.parameters())
    with products:
        out = head(x.view(1, 2, 3, 6))
    assert torch.equal(out.view(6, 11), head(x))
