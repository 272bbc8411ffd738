"""Model families through the adapter: those that can be decoded by trees, and those that say why not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_targets import random_target

from eagle3_lab.backend import prepacked_linear
from eagle3_lab.errors import UserError
from eagle3_lab.target_model import hf_target
from eagle3_lab.target_model.decodable import refusals
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.probe import probe
from eagle3_lab.types import PADDING, Batch, Needs, TargetOut, Tree, Verdict

GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
FULL = {"layer_types": ["full_attention"] * 4}


# ---------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
        ("granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
        ("cohere", {"logit_scale": 0.25}),
        ("olmo2", {}),
        ("gpt_neox", {}),
    ],
)
def test_a_tree_scores_as_its_paths_alone_and_the_head_is_the_models_own(kind: str, more: dict[str, object]) -> None:
    target = random_target(kind, **more)
    assert probe(target) < 1e-6
    assert target.rotary().inv_freq.numel() > 0
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = target.model(ids, output_hidden_states=True)
    out = target.features(document(ids), Needs((0, 1, 4), top=True, logits=True))
    torch.testing.assert_close(out.logits, plain.logits, atol=2e-5, rtol=1e-5)
    for tap, layer in zip(out.taps, (0, 1, 4), strict=True):
        torch.testing.assert_close(tap, plain.hidden_states[layer], atol=2e-5, rtol=1e-5)


def document(ids: torch.Tensor) -> Batch:
    position = torch.arange(ids.shape[1]).expand(ids.shape)
    return Batch(ids, torch.zeros_like(ids, dtype=torch.bool), position, torch.zeros_like(ids))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("gemma2", {"attention": "eager", **GEMMA2, **FULL}),
        ("phi", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_head_over_some_ids_is_the_head_at_them_and_runs_for_no_others(
    kind: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(kind, **more)
    ids = torch.tensor([3, 4, 50, 96])
    top = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    told, everything = target.logits(top), target.head_over(torch.arange(97))(top)
    assert (target.model.get_output_embeddings().bias is not None) == (kind == "phi")
    torch.testing.assert_close(everything, told, rtol=0, atol=0)
    monkeypatch.setattr(target.model.get_output_embeddings(), "forward", None)
    torch.testing.assert_close(target.head_over(ids)(top), told[..., ids], rtol=1e-12, atol=1e-12)


def test_a_laid_out_head_is_laid_out_over_some_ids_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def lay_out(weight: torch.Tensor) -> torch.Tensor | None:
        made.append(weight.shape[0])
        return prepacked_linear.lay_out(weight)

    monkeypatch.setattr(hf_target, "lay_out", lay_out)
    for kind in ("cohere", "phi"):  # scaled; with a bias
        target = random_target(kind)
        target.model.float()
        top = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
        ids = torch.tensor([3, 4, 50, 96])
        told = target.logits(top)[..., ids]
        assert not made, "of a plain head nothing is laid out"
        prepacked_linear.pack(target.model)
        torch.testing.assert_close(target.head_over(ids)(top), told, rtol=1e-5, atol=1e-6)
        assert made.pop() == 4


def test_logits_are_summarised_row_by_row_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target("cohere", logit_scale=0.25)
    top = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits, widths = target.logits(top), []
    monkeypatch.setattr("eagle3_lab.target_model.hf_target.SUMMARY_BYTES", 3 * 4 * 97)
    target.model.get_output_embeddings().register_forward_hook(lambda _, args, out: widths.append(len(out)))
    summary = target.summary(top)
    assert widths == [3, 3, 1]
    assert torch.equal(summary.argmax, logits.argmax(-1))
    torch.testing.assert_close(summary.log_sum, logits.logsumexp(-1))


def test_soft_caps_of_logits_and_of_attention_are_kept_in_eager_attention() -> None:
    """Tiny caps, so that a dropped one shows."""
    target = random_target("gemma2", attention="eager", **GEMMA2, **FULL)
    assert probe(target) < 1e-5
    assert float(target.features(document(torch.tensor([[5, 6, 7]])), Needs(logits=True)).logits.abs().max()) <= 3.0


def test_soft_capped_attention_is_refused_where_sdpa_would_drop_the_cap() -> None:
    target = random_target("gemma2", attention="eager", **GEMMA2, **FULL)
    assert refusals(target.model) == []
    target.model.config._attn_implementation = "sdpa"
    with pytest.raises(UserError, match="soft-capped attention under sdpa, which drops the cap"):
        HFTarget(target.model, None, target.spec)


# --------------------------------------------------------------------------------------------------------- attention


def scored(target: HFTarget) -> list[TargetOut]:
    """Two ragged prompts, a tree with padding, a scattered path kept, and another tree."""
    session = target.open(2, 64, Needs((1, 4), logits=True))
    first = session.prefill(torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]]), torch.tensor([5, 3]))
    parents = torch.tensor([[0, 0, 0, 2, 3], [0, 0, PADDING, 1, PADDING]])
    tree = Tree(torch.tensor([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]), parents, parents != PADDING)
    second = session.score(tree)
    session.commit(
        Verdict(torch.tensor([[0, 2, 3], [0, PADDING, PADDING]]), torch.tensor([2, 0]), torch.tensor([1, 1]))
    )
    return [first, second, session.score(tree)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_eager_attention_with_its_additive_mask_equals_sdpa(kind: str) -> None:
    eager, sdpa = (scored(random_target(kind, attention=attention)) for attention in ("eager", "sdpa"))
    for ours, theirs in zip(eager, sdpa, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, atol=5e-5, rtol=1e-4)  # eager's softmax is in float32
        for tap, other in zip(ours.taps, theirs.taps, strict=True):
            torch.testing.assert_close(tap, other, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_padding_are_finite_everywhere(attention: str, dtype: torch.dtype) -> None:
    target = random_target(dtype=dtype, attention=attention)
    for out in scored(target):
        assert out.logits is not None
        assert all(bool(x.isfinite().all()) for x in (out.logits, *out.taps))
    ids = torch.tensor([[5, 6, 7, 0, 0], [0, 0, 0, 0, 0]])
    there = torch.tensor([[0, 0, 1, PADDING, PADDING], [PADDING] * 5])
    batch = dataclasses.replace(document(ids), document=there, position=torch.tensor([[0, 1, 0, 0, 0], [0] * 5]))
    features = target.features(batch, Needs((0, 2, 4), top=True, logits=True))
    assert all(bool(x.isfinite().all()) for x in (features.logits, features.top, *features.taps))


def test_what_a_row_reads_does_not_depend_on_the_padding_beside_it() -> None:
    target = random_target()
    together = scored(target)[1].logits
    session = target.open(1, 64, Needs(logits=True))
    session.prefill(torch.tensor([[11, 12, 13]]), torch.tensor([3]))
    alone = session.score(
        Tree(torch.tensor([[30, 31, 33]]), torch.tensor([[0, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))
    )
    torch.testing.assert_close(together[1, [0, 1, 3]], alone.logits[0], atol=2e-5, rtol=1e-5)
