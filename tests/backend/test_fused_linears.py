"""Layers that read one tensor multiply together, with each one's own numbers, and alone wherever they do not."""

from __future__ import annotations

import copy

import pytest
import torch
from random_targets import random_target
from torch import Tensor, nn

from eagle3_lab.backend.prepacked_linear import PackedLinear, join, pack
from eagle3_lab.target_model.probe import probe


class Block(nn.Module):
    """Three layers of one input, one of another; ``last`` reads what the first made."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(24, width, bias=bias) for width in (40, 16, 16))
        self.last = nn.Linear(40, 24, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q, k, v, self.last(q)


def joined(bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Block, Block]:
    plain = Block(bias).to(dtype)
    block = copy.deepcopy(plain)
    assert pack(block) == 4
    assert join(block, lambda: block(torch.zeros(1, 24, dtype=dtype))) == 3
    return plain, block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (300, 24), (0, 24)])
def test_each_gets_its_own_product(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain, block = joined(bias, dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        for _ in range(2):
            for found, wanted in zip(block(x), plain(x), strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-4)


def test_a_product_for_all_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, block = joined()
    widths: list[int] = []
    made = torch.ops.mkldnn._linear_pointwise

    def counted(x: Tensor, *rest: object) -> Tensor:
        out = made(x, *rest)
        widths.append(out.shape[-1])
        return out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    with torch.inference_mode():
        block(torch.randn(2, 24))
    assert widths == [72, 24]


def test_one_that_is_asked_with_another_tensor_multiplies_alone() -> None:
    plain, block = joined()
    x, y = torch.randn(2, 24), torch.randn(2, 24)
    with torch.inference_mode():
        torch.testing.assert_close(block.q(x), plain.q(x))
        torch.testing.assert_close(block.k(y), plain.k(y))
        torch.testing.assert_close(block.k(x), plain.k(x))
        torch.testing.assert_close(block.k(x), plain.k(x))  # asked again: nothing is left for it
        torch.testing.assert_close(block.v(y), plain.v(y))
        torch.testing.assert_close(block.v(x), plain.v(x))


def test_the_first_asked_again_multiplies_anew_for_all() -> None:
    """Also where some of the others did not ask in between, and the tensor was written to."""
    plain, block = joined()
    x = torch.randn(2, 24)
    with torch.no_grad():
        block.q(x), block.k(x)
        x.mul_(2.0)
        block.q(x)
        torch.testing.assert_close(block.v(x), plain.v(x))


def test_nothing_is_held_once_all_have_asked() -> None:
    _, block = joined()
    with torch.inference_mode():
        block(torch.randn(2, 24))
    family = block.q._family  # pyright: ignore[reportAttributeAccessIssue]
    assert family._input is None and not family._parts


def test_a_changed_weight_is_laid_out_anew_for_all() -> None:
    _, block = joined()
    x = torch.randn(3, 24)
    with torch.no_grad():
        before = block(x)[1]
        block.k.weight.mul_(2.0)
        torch.testing.assert_close(block(x)[1], 2 * before)


def test_gradients_take_the_plain_way() -> None:
    plain, block = joined()
    x = torch.randn(3, 24)
    for one in (plain, block):
        sum(part.sum() for part in one(x)).backward()
    assert isinstance(block.k, PackedLinear)
    torch.testing.assert_close(block.k.weight.grad, plain.k.weight.grad)


def test_a_copy_is_alone_and_follows_its_own_weights() -> None:
    _, block = joined()
    twin, x = copy.deepcopy(block), torch.randn(2, 24)
    with torch.no_grad():
        before = block(x)[1]
        twin.k.weight.zero_()
        assert not twin(x)[1].any() and torch.equal(block(x)[1], before)


def test_layers_of_unlike_kinds_and_layers_asked_twice_stay_alone() -> None:
    class Odd(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.q(x), self.k(x), self.v(x), self.v(x + 1)

    odd = Odd()
    odd.k = nn.Linear(24, 16, bias=True)
    pack(odd)
    assert join(odd, lambda: odd(torch.zeros(1, 24))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_joined_target_passes_the_probe_with_the_packed_ones_logits(dtype: torch.dtype) -> None:
    packed, target = random_target(dtype=dtype), random_target(dtype=dtype)
    assert pack(packed.model) and pack(target.model)
    ids = torch.arange(5)[None]
    assert join(target.model, lambda: target.model(ids)) == 5 * target.spec.layers
    assert probe(target) < (1e-5 if dtype == torch.float32 else 5e-2)
    with torch.inference_mode():
        torch.testing.assert_close(target.model(ids).logits, packed.model(ids).logits, atol=1e-5, rtol=1e-3)


def test_a_draft_made_of_the_first_layers_is_joined_for_itself() -> None:
    target = random_target(dtype=torch.float32)
    pack(target.model)
    draft = target.first_layers(1)
    families = {id(m._family): m._family for m in draft.modules() if isinstance(m, PackedLinear) and m._family}
    assert len(families) == 2, "queries, keys and values; gate and up"
    assert not any(m._family for m in target.model.modules() if isinstance(m, PackedLinear))
