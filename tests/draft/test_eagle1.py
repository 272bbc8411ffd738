"""The EAGLE head: parameters, refusals, that the unroll drafts as a decoder would, and HASS's masking by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import drafts_as_serially

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.attention.hass import MultiplicativeUnrolled
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.errors import UserError
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.types import PADDING, Rows

VOCAB = 23
LAYER = [
    *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]
VOCABULARY = ["draft_vocab.d2t", "draft_vocab.t2d"]


def make_eagle(make_lab: Callable[..., Any], **options: Any) -> Any:
    return make_lab(draft=Eagle1(**options), vocab_size=VOCAB)


# ---- by hand


def test_the_first_layer_has_no_input_norm_and_there_is_no_final_norm_and_no_head(make_lab: Callable[..., Any]) -> None:
    first = [f"layers.0.{name}" for name in LAYER]
    assert sorted(make_eagle(make_lab).draft.state_dict()) == sorted(["fc.weight", "fc.bias", *first, *VOCABULARY])
    second = ["layers.1.input_layernorm.weight", *(f"layers.1.{name}" for name in LAYER)]
    two = make_eagle(make_lab, num_layers=2, bias=False).draft
    assert sorted(two.state_dict()) == sorted(["fc.weight", *first, *second, *VOCABULARY])
    assert two.num_layers == 2


def test_the_embedding_comes_first_and_the_predicted_feature_is_head_input_and_carry(
    make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_eagle(make_lab), make_batch([(5, 1)], length=5)
    with torch.no_grad():
        for layer in lab.draft.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    feature = torch.randn(1, 5, 12).double()
    out = lab.draft.step(feature, batch.ids, Rows(batch.position, batch.document), 0, DenseUnrolled())
    weight, bias = lab.draft.fc.weight, lab.draft.fc.bias
    expected = lab.target.embed(batch.ids) @ weight[:, :12].T + feature @ weight[:, 12:].T + bias
    torch.testing.assert_close(out.carry, expected)
    assert out.head_in is out.carry
    torch.testing.assert_close(lab.draft.logits(out.head_in[0], 0), lab.target.logits(expected[0]))


def test_multiplicative_masking_gives_unseen_keys_score_zero() -> None:
    # one head of width 1, values 1: the output is the weights' sum, what unseen keys leave over
    document = torch.tensor([[0, 0, PADDING]])
    rows = Rows(position=document, document=document)
    context = MultiplicativeUnrolled()
    keys = torch.tensor([2.0, 3.0, 0.0]).log().view(1, 1, 3, 1)
    ones = torch.ones(1, 1, 3, 1)
    first = context.attend(0, ones, keys, ones, rows)[0, 0, :2, 0]
    torch.testing.assert_close(first, torch.tensor([2 / (2 + 2), (2 + 3) / (2 + 3 + 1)]))
    second = context.attend(0, ones, keys, ones, rows)[0, 0, :2, 0]  # row t now stands in column t + 1
    torch.testing.assert_close(second, torch.tensor([(2 + 2) / (2 + 2 + 1), (2 + 3 + 3) / (2 + 3 + 3)]))


# ---- equivalences


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_parallel_unroll_drafts_as_serial_decoding_does(
    num_layers: int, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_eagle(make_lab, num_layers=num_layers), make_batch([(10, 3)], length=10)
    drafts_as_serially(Unroll(4, detach=True), lab.draft, lab.source(lab.taps(batch)[0]), batch)
    # seven steps deep though trained for one, and though trained with the published masking
    judging = Unroll(1, detach=True, attention=MultiplicativeUnrolled).judging(7)
    drafts_as_serially(judging, lab.draft, lab.source(lab.taps(batch)[0]), batch)


def test_a_heads_padding_rows_are_never_drafted(make_lab: Callable[..., Any]) -> None:
    lab = make_eagle(make_lab)
    lab.target.spec = dataclasses.replace(lab.target.spec, tokens=VOCAB - 3)
    draft = Eagle1()
    draft.build(lab.target, 12, torch.arange(VOCAB - 3))
    head_in = torch.randn(4, 12).double()
    torch.testing.assert_close(draft.logits(head_in, 0), lab.target.logits(head_in)[:, : VOCAB - 3])
    with pytest.raises(ValueError, match="draft_vocab must be null"):
        draft.build(lab.target, 12, torch.arange(VOCAB - 4))


def test_only_the_drafts_own_weights_are_trained(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_eagle(make_lab), make_batch([(9, 3)], length=9)
    lab.target.head.requires_grad_(False)
    outs = lab.unrolled(batch, Unroll(3, detach=True))
    UnrolledLoss([SoftCE()])(lab.draft, outs, batch, lab.target, lab.taps(batch)[1]).total.backward()
    for name, parameter in lab.draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_residual_stream_stays_wide_under_autocast(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_eagle(make_lab), make_batch([(6, 1)], length=6)
    lab.draft.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        carry = lab.draft.start(torch.randn(1, 6, 12, dtype=torch.bfloat16))
        out = lab.draft.step(carry, batch.ids, Rows(batch.position, batch.document), 0, DenseUnrolled())
    assert out.carry.dtype == torch.float32


# ---- refusals


def test_a_smaller_draft_vocabulary_is_refused(make_lab: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="draft_vocab must be null for Eagle1, .* own head of 23 ids, got 9"):
        make_lab(draft=Eagle1(), vocab_size=9)


def test_a_source_of_another_width_is_refused(make_lab: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="features.width must be null for Eagle1, .* head of width 12, got 8"):
        make_lab(draft=Eagle1(), vocab_size=VOCAB, width=8)


def test_multiplicative_masking_on_packed_rows_is_refused(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, unroll = make_eagle(make_lab), Unroll(2, attention=MultiplicativeUnrolled)
    with pytest.raises(UserError, match="needs one document a row, got a row of 2; set data.packed: false"):
        lab.unrolled(make_batch([(5, 1), (4, 1)], length=10), unroll)
    assert len(lab.unrolled(make_batch([(5, 1)], [(4, 1)], length=10), unroll)) == 2
    with pytest.raises(UserError, match="needs one document a row"):
        unroll.attention().check(make_batch([(5, 1), (4, 1)], length=10).document)
    unroll.attention().check(make_batch([(5, 1)], length=10).document)


@pytest.mark.parametrize("head", [Eagle1, Eagle3])
def test_impossible_sizes_are_refused_by_either_head(head: type, make_lab: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="draft.num_layers must be >= 1, got 0"):
        head(num_layers=0)
    with pytest.raises(ValueError, match="draft.heads must be a multiple of draft.kv_heads, got 5 and 2"):
        make_lab(draft=head(heads=5), vocab_size=VOCAB)
