"""float32 products by oneDNN are the plain ones, forward and backward, where they are taken at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle3_lab.backend import onednn_linear
from eagle3_lab.backend.onednn_linear import OneDNN, float32_products, outdoes_mkl
from eagle3_lab.training.loss.head_linear import HeadProducts

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all products by oneDNN from now on."""
    shapes: list[tuple[int, ...]] = []
    product = onednn_linear.product

    def seen(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*x.shape, *weight.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(onednn_linear, "product", seen)
    return shapes


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (1, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_the_plain_ones(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = made(*shape), made(4, 7), made(4) if biased else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    grad = made(*shape[:-1], 4).detach()
    told = nn.functional.linear(x, weight, bias)
    shapes = taken(monkeypatch)
    with OneDNN():
        found = nn.functional.linear(x, weight, bias=bias)
    assert len(shapes) == 1
    torch.testing.assert_close(found, told)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(told, inputs, grad))
    assert len(shapes) == 3, "the backward too, wherever it runs"


def test_a_frozen_weight_gets_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = made(5, 7), made(4, 7).detach()
    shapes = taken(monkeypatch)
    with OneDNN():
        nn.functional.linear(x, weight).sum().backward()
    assert x.grad is not None and shapes == [(5, 7, 4, 7), (5, 4, 7, 4)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_and_autocast_go_the_plain_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = taken(monkeypatch)
    with OneDNN():
        nn.functional.linear(made(5, 7, dtype=dtype), made(4, 7, dtype=dtype)).sum().backward()
        nn.functional.linear(made(0, 7), made(4, 7))
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.functional.linear(made(5, 7), made(4, 7)).dtype == torch.bfloat16
    assert shapes == []


@pytest.mark.parametrize("slice_bytes", [None, 60])
def test_a_heads_products_are_taken_forward_and_backward(
    slice_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, x, grad = nn.Linear(7, 4), made(5, 7), made(5, 4).detach()
    told = torch.autograd.grad(head(x), [x, head.weight], grad)
    shapes = taken(monkeypatch)
    monkeypatch.setattr(onednn_linear, "outdoes_mkl", lambda: True)
    products = HeadProducts(head.parameters(), slice_bytes)
    with products:
        out = head(x)
    (by_x,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close((by_x, products.take(head.weight)), told)
    rows = 4 if slice_bytes is None else 2
    assert shapes == [(5, 7, 4, 7), *[(rows, 5, 7, 5)] * (4 // rows), (5, 4, 7, 4)]


@pytest.mark.parametrize(
    ("vendor", "capability", "answer"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        (None, "AVX512", False),
    ],
)
def test_it_is_for_wide_cpus_that_are_not_intels(
    vendor: str | None, capability: str, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if vendor is not None:
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: some\n")
    monkeypatch.setattr(onednn_linear, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    outdoes_mkl.cache_clear()
    try:
        assert outdoes_mkl() == answer
        assert isinstance(float32_products(), OneDNN) == answer
    finally:
        outdoes_mkl.cache_clear()
