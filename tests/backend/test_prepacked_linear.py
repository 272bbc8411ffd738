"""Packed linear layers: the same numbers, the same parameters, fresh after every change of weight."""

from __future__ import annotations

import pytest
import torch
from random_targets import random_target
from torch import nn

from eagle3_lab.backend.prepacked_linear import PackedLinear, pack, packable, packed
from eagle3_lab.target_model.probe import probe


def linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40, bias=bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (300, 24), (0, 24)])
def test_it_multiplies_as_the_layer_it_was_made_of(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain = linear(dtype, bias)
    packed = PackedLinear(plain)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), plain(x), atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-5)
        assert packed(x).dtype == dtype


def test_rows_that_lie_scattered_are_read_right() -> None:
    plain = linear()
    x = torch.randn(24, 6).t()
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x))
        torch.testing.assert_close(PackedLinear(plain)(x[:1].expand(5, -1)), plain(x[:1].expand(5, -1)))


def test_a_changed_weight_is_laid_out_anew() -> None:
    packed = PackedLinear(linear())
    x = torch.randn(3, 24)
    with torch.inference_mode():
        before = packed(x)
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.1)
    packed(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(packed(x), before)
        torch.testing.assert_close(packed(x), nn.functional.linear(x, packed.weight, packed.bias))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_adamw_lays_the_weight_out_anew(fused: bool) -> None:
    """A fused step changes the weight and leaves its version as it was."""
    one = PackedLinear(linear())
    x = torch.randn(3, 24)
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        with torch.no_grad():
            before = one(x)
        one(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(one(x), before)
            torch.testing.assert_close(one(x), nn.functional.linear(x, one.weight, one.bias))


def test_a_new_weight_is_laid_out_wherever_it_lies() -> None:
    """The allocator gives the address of a weight that is gone to the next one, whose version is 0 as well."""
    one, x = PackedLinear(linear()), torch.randn(3, 24)
    with torch.no_grad():
        for _ in range(10):
            one.weight = nn.Parameter(torch.randn(40, 24))
            torch.testing.assert_close(one(x), nn.functional.linear(x, one.weight, one.bias))
        one.weight.data = one.weight.data.flip(0).clone()
        torch.testing.assert_close(one(x), nn.functional.linear(x, one.weight, one.bias))


def test_a_packed_twin_shares_the_weights_and_leaves_the_module_as_it_was() -> None:
    shared = linear()
    plain = nn.ModuleDict({"first": nn.Sequential(linear(), nn.ReLU()), "second": shared, "again": shared})
    before = [(name, id(module), type(module)) for name, module in plain.named_modules(remove_duplicate=False)]
    twin = packed(plain)
    assert [(n, id(m), type(m)) for n, m in plain.named_modules(remove_duplicate=False)] == before
    assert type(twin) is nn.ModuleDict and isinstance(twin["second"], PackedLinear)
    assert dict(twin.named_parameters()) == dict(plain.named_parameters())
    x = torch.randn(3, 24)
    with torch.no_grad():
        twin["second"](x)
        shared.weight.mul_(2.0)
        torch.testing.assert_close(twin["second"](x), shared(x))


def test_gradients_flow_to_the_input_of_a_frozen_layer() -> None:
    packed = PackedLinear(linear())
    packed.requires_grad_(False)
    x = torch.randn(3, 24, requires_grad=True)
    packed(x).sum().backward()
    torch.testing.assert_close(x.grad, packed.weight.sum(0).expand(3, -1))


def test_autocast_decides_the_format_as_it_does_for_a_plain_layer() -> None:
    plain = linear()
    packed, x = PackedLinear(plain), torch.randn(3, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16
        assert packed(x.bfloat16()).equal(plain(x.bfloat16()))


def test_it_follows_its_weight_to_a_dtype_that_has_no_layout() -> None:
    packed, x = PackedLinear(linear()), torch.randn(3, 24, dtype=torch.float64)
    with torch.no_grad():
        packed(x.float())
        packed.double()
        assert packed(x).equal(nn.functional.linear(x, packed.weight, packed.bias))


def test_packing_keeps_parameters_names_and_ties() -> None:
    model = random_target(dtype=torch.float32, tie_word_embeddings=True).model
    before = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    assert pack(model) == linears
    assert {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert pack(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_targets_trees_pass_the_probe(dtype: torch.dtype) -> None:
    target = random_target(dtype=dtype)
    assert pack(target.model) > 0
    assert probe(target) < (1e-5 if dtype == torch.float32 else 5e-2)


def test_float64_stays_plain() -> None:
    assert not packable(linear(torch.float64))
    assert pack(random_target().model) == 0
