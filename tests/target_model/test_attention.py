"""Attention with unrepeated key heads: transformers' numbers, and nothing copied that is long."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from random_targets import random_target
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle3_lab.target_model import hf_target
from eagle3_lab.target_model.attention import (
    GROUPED,
    by_document,
    grouped_attention,
    spans,
    stock_attention,
    use_grouped,
)
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Batch, Needs, Tree


class Layer(nn.Module):
    """What transformers' function reads of a layer."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def drawn(heads: int, kv_heads: int, rows: int, slots: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((batch, heads, rows, 8), (batch, kv_heads, slots, 8), (batch, kv_heads, slots, 8))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def mask(rows: int, slots: int, batch: int = 2, boolean: bool = False) -> torch.Tensor:
    seen = torch.rand(batch, 1, rows, slots) < 0.6
    seen[..., 0] = True
    return seen if boolean else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_it_is_transformers_own_function(boolean: bool, heads: int, kv_heads: int, rows: int) -> None:
    """70 rows of two key heads of 8: too many for the mask to be repeated, so it is transformers' own path."""
    seen, given = mask(rows, 11, boolean=boolean), drawn(heads, kv_heads, rows, 11)
    layer = Layer(heads // kv_heads)
    wanted, _ = sdpa_attention_forward(layer, *given, seen, scaling=0.3)
    found, nothing = grouped_attention(layer, *given, seen, scaling=0.3)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    assert nothing is None and found.is_contiguous()


def test_few_rows_repeat_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    plain = nn.functional.scaled_dot_product_attention

    def seen(q: torch.Tensor, k: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        shapes.extend((tuple(q.shape), tuple(k.shape)))
        return plain(q, k, *rest, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", seen)
    grouped_attention(Layer(3), *drawn(6, 2, 5, 11), mask(5, 11))
    assert shapes == [(2, 2, 15, 8), (2, 2, 11, 8)]


def test_without_a_mask_it_is_causal_as_theirs() -> None:
    given = drawn(6, 2, 11, 11)
    wanted, _ = sdpa_attention_forward(Layer(3), *given, None)
    torch.testing.assert_close(grouped_attention(Layer(3), *given, None)[0], wanted)


def test_documents_lie_where_their_names_begin_and_end() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, -1], [2, -1, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0], [-1, -1, 3, 3, 4, 4]])
    assert spans(document) == [(0, 0, 3), (0, 3, 5), (1, 0, 1), (2, 0, 6), (3, 2, 4), (3, 4, 6)]
    assert spans(torch.full((2, 3), -1)) == []
    assert spans(torch.tensor([[0, 1, 0]])) is None, "in pieces"
    assert spans(torch.tensor([[0, -1, 0]])) is None


def test_documents_apart_compute_nothing_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = nn.functional.scaled_dot_product_attention

    def seen(q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        rows.append(q.shape[2])
        return plain(q, *rest, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", seen)
    given = drawn(6, 2, 7, 7)
    with by_document([(0, 0, 3), (0, 3, 6), (1, 1, 7)]):
        found, _ = grouped_attention(Layer(3), *given, mask(7, 7), scaling=0.3)
    assert rows == [3, 3, 6]
    assert found[0, 6].eq(0).all() and found[1, 0].eq(0).all()
    for row, begin, end in ((0, 0, 3), (0, 3, 6), (1, 1, 7)):
        alone = [x[row : row + 1, :, begin:end] for x in given]
        causal = torch.ones(end - begin, end - begin).tril().bool()[None, None]
        wanted, _ = sdpa_attention_forward(Layer(3), *alone, causal, scaling=0.3)
        torch.testing.assert_close(found[row : row + 1, begin:end], wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_features_document_by_document_are_those_under_a_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(kind)
    target.model.double()
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [2, 2, 2, 3, 4, 4, 4, 4]])
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 0, 1, 2, 3]])
    batch = Batch(torch.arange(16).view(2, 8) + 3, torch.zeros(2, 8, dtype=torch.bool), position, document)
    parameters = [p.requires_grad_() for p in target.model.base_model.layers[0].parameters()]

    def read() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        top = target.read(batch, Needs((1, 3), top=True)).top
        assert top is not None
        loss = (top * torch.linspace(-1, 1, top.numel()).view_as(top))[document >= 0].sum()
        return top[document >= 0], torch.autograd.grad(loss, parameters)

    apart = read()
    monkeypatch.setattr(hf_target, "spans", lambda document: None)
    torch.testing.assert_close(apart, read(), atol=1e-9, rtol=1e-9)


def test_a_targets_trees_score_alike_with_stock_attention() -> None:
    target = random_target()
    assert target.model.config._attn_implementation == GROUPED

    def scores() -> torch.Tensor | None:
        session = target.open(1, 32, Needs(logits=True))
        session.prefill(torch.arange(6)[None], torch.tensor([6]))
        tokens = torch.tensor([[5, 6, 7, 8]])
        return session.score(Tree(tokens, torch.tensor([[0, 0, 0, 1]]), torch.ones_like(tokens).bool())).logits

    ours = scores()
    with stock_attention(target.model):
        torch.testing.assert_close(scores(), ours, atol=1e-12, rtol=0)


def test_a_family_that_asks_for_no_attention_by_name_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(random_target().model)
    with stock_attention(model):
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
        assert not use_grouped(model) and model.config._attn_implementation == "sdpa"
        monkeypatch.undo()


def test_an_eager_target_stays_eager() -> None:
    target: HFTarget = random_target(attention="eager")
    assert target.model.config._attn_implementation == "eager"
