"""The EAGLE-3 head: its parameters, its options, its refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.llama import RMSNorm
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import FrozenTarget
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.types import Rotary, Rows

FIRST = [
    f"layers.0.{name}.weight"
    for name in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        "input_layernorm",
        "hidden_norm",
        "post_attention_layernorm",
    )
]
REST = ["norm.weight", "lm_head.weight", "draft_vocab.d2t", "draft_vocab.t2d"]


def test_the_state_dict_holds_the_public_names_and_no_embedding(make_lab: Callable[..., Any]) -> None:
    assert sorted(make_lab().draft.state_dict()) == sorted(FIRST + REST)


def test_a_target_that_is_a_module_is_not_counted_as_the_drafts(make_lab: Callable[..., Any]) -> None:
    class ModuleTarget(nn.Module, FrozenTarget):  # what an adapter may well be
        def __init__(self, plain: FrozenTarget) -> None:
            super().__init__()
            self.spec, self.plain, self.body = plain.spec, plain, nn.Linear(3, 3)

        def embed(self, ids: Tensor) -> Tensor:
            return self.plain.embed(ids)

        def logits(self, top: Tensor) -> Tensor:
            return self.plain.logits(top)

        def head_rows(self, ids: Tensor) -> Tensor:
            return self.plain.head_rows(ids)

        def rotary(self, head_dim: int | None = None) -> Rotary:
            return self.plain.rotary(head_dim)

    draft = Eagle3()
    draft.build(ModuleTarget(make_lab().target), 12, torch.arange(4))
    assert sorted(draft.state_dict()) == sorted(FIRST + REST)


def test_further_layers_are_ordinary_and_read_the_stream_alone(make_lab: Callable[..., Any]) -> None:
    draft = make_lab(draft=Eagle3(num_layers=2)).draft
    second = {name for name in draft.state_dict() if name.startswith("layers.1.")}
    assert second == {name.replace(".0.", ".1.") for name in FIRST if "hidden_norm" not in name}
    assert draft.layers[0].self_attn.q_proj.in_features == 24
    assert draft.layers[1].self_attn.q_proj.in_features == 12
    assert draft.num_layers == 2


def test_own_sizes_are_taken(make_lab: Callable[..., Any]) -> None:
    draft = make_lab(draft=Eagle3(intermediate=7, heads=6, kv_heads=3, head_dim=8)).draft
    attention = draft.layers[0].self_attn
    assert attention.q_proj.weight.shape == (48, 24)
    assert attention.k_proj.weight.shape == (24, 24)
    assert attention.o_proj.weight.shape == (12, 48)
    assert draft.layers[0].mlp.gate_proj.weight.shape == (7, 12)


def test_the_head_begins_as_asked(make_lab: Callable[..., Any]) -> None:
    trained, frozen, random = (make_lab(draft=Eagle3(head=head)) for head in ("target", "frozen", "random"))
    for lab in (trained, frozen):
        torch.testing.assert_close(lab.draft.lm_head.weight, lab.target.head_rows(lab.vocab), check_dtype=False)
    assert trained.draft.lm_head.weight.requires_grad
    assert not frozen.draft.lm_head.weight.requires_grad
    assert random.draft.lm_head.weight.requires_grad
    assert not torch.allclose(random.draft.lm_head.weight, trained.draft.lm_head.weight)


@pytest.mark.parametrize(
    ("embedding", "names"), [("projected", ["embed.proj.weight"]), ("own", ["embed.tokens.weight"])]
)
def test_a_draft_of_another_width_embeds_by_weights_of_its_own_and_trains_them_all(
    embedding: Any, names: list[str], make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab = make_lab(draft=Eagle3(head="random", embedding=embedding), width=8)
    batch = make_batch([(9, 2)], length=9)
    assert sorted(lab.draft.state_dict()) == sorted(FIRST + REST + names)
    assert lab.draft.lm_head.in_features == lab.draft.norm.weight.shape[0] == 8
    outs = lab.unrolled(batch, Unroll(2))
    assert outs[1].carry.shape == (1, 9, 8)
    UnrolledLoss([SoftCE()])(lab.draft, outs, batch, lab.target, lab.taps(batch)[1]).total.backward()
    for name, parameter in lab.parameters().items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_projected_embedding_multiplied_out_is_a_table_of_its_own(make_lab: Callable[..., Any]) -> None:
    projected = make_lab(draft=Eagle3(head="random", embedding="projected"), width=8).draft.embed
    own = make_lab(draft=Eagle3(head="random", embedding="own"), width=8).draft.embed
    own.load_state_dict({"tokens.weight": projected.table()})
    ids = torch.tensor([[0, 7, 22]])
    torch.testing.assert_close(own(ids), projected(ids))
    assert torch.equal(own.table(), projected.table())
    assert make_lab().draft.embed.table() is None


def test_training_the_copied_head_leaves_the_targets_own_alone(make_lab: Callable[..., Any]) -> None:
    lab = make_lab()
    before = lab.target.head.clone()
    with torch.no_grad():
        lab.draft.lm_head.weight.add_(1)
    assert torch.equal(lab.target.head, before)


def test_rope_follows_the_target_unless_a_base_is_named(make_lab: Callable[..., Any], make_batch: Any) -> None:
    batch = make_batch([(6, 1)], length=6)
    outs = {}
    for base in (None, 10000.0, 500.0):
        lab = make_lab(draft=Eagle3(rope_base=base))
        rows = Rows(batch.position, batch.document)
        outs[base] = lab.draft.step(lab.source(lab.taps(batch)[0]), batch.ids, rows, 0, DenseUnrolled()).head_in
    assert torch.equal(outs[None], outs[10000.0])  # the stub's own base
    assert not torch.allclose(outs[None], outs[500.0])


def test_casting_the_head_to_bfloat16_leaves_the_rope_frequencies_alone(make_lab: Callable[..., Any]) -> None:
    draft = make_lab().draft
    wide = draft._angles(torch.tensor([[1000]]))
    narrow = copy.deepcopy(draft).bfloat16()._angles(torch.tensor([[1000]]))
    assert torch.equal(wide[0], narrow[0])


def test_the_residual_stream_stays_wide_under_autocast(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab = make_lab()
    lab.draft.float()
    lab.source.float()
    batch = make_batch([(6, 1)], length=6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = lab.source(lab.taps(batch)[0])
        carry = lab.draft.start(features)
        rows = Rows(batch.position, batch.document)
        out = lab.draft.step(carry, batch.ids, rows, 0, DenseUnrolled())
    assert features.dtype == torch.bfloat16
    assert out.carry.dtype == torch.float32


def test_rms_norm_is_computed_in_float32() -> None:
    x = torch.tensor([300.0, 1.0], dtype=torch.float16)  # 300 squared overflows float16
    out = RMSNorm(2, 0.0)(x)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), x.float() / (90001 / 2) ** 0.5, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "draft.num_layers must be >= 1, got 0"),
        ({"intermediate": -3}, "draft.intermediate must be >= 1, got -3"),
        ({"heads": 0}, "draft.heads must be >= 1, got 0"),
        ({"rope_base": 0.0}, "draft.rope_base must be > 1, got 0.0"),
        ({"rms_eps": 0.0}, "draft.rms_eps must be > 0, got 0.0"),
    ],
)
def test_impossible_sizes_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3(**arguments)


def test_an_unknown_beginning_of_the_head_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="'copied'"):  # TypeError: by the checked annotation
        Eagle3(head="copied")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("draft", "width", "message"),
    [
        (Eagle3(heads=5), 12, "draft.heads must be a multiple of draft.kv_heads, got 5 and 2"),
        (Eagle3(head_dim=7), 12, "draft.head_dim must be even"),
        (Eagle3(), 8, "draft.head must be random for a draft of width 8: the rows of the target's head are 12 wide"),
        (Eagle3(head="frozen"), 8, "draft.head must be random .* got 'frozen'"),
        (Eagle3(head="random"), 8, "draft.embedding must be projected or own for a draft of width 8: .* is 12 wide"),
    ],
)
def test_sizes_that_do_not_fit_the_target_are_refused_when_built(
    draft: Eagle3, width: int, message: str, make_lab: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        draft.build(make_lab().target, width, torch.arange(4))
