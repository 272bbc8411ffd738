"""The draft language model as a part: what it is taught row by row, its hit table, and what it cannot be put beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_targets import random_target

from eagle3_lab.decode.methods import DraftLM, Head, HeadTree
from eagle3_lab.decode.tree_shapes import Chain
from eagle3_lab.draft.draft_lm import FirstLayers
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import NoFeature, TopFeature
from eagle3_lab.draft.unroll import NextToken, Unroll
from eagle3_lab.interfaces import FrozenTarget
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization
from eagle3_lab.types import Batch, Needs

ALL = torch.arange(97)


def built(target: HFTarget, layers: int, **options: bool) -> FirstLayers:
    draft = FirstLayers(layers, **options)
    draft.build(target, NoFeature().build(target), ALL)
    return draft


def module_of(target: HFTarget, draft: FirstLayers, reach: int = 3, lr: float = 1e-2) -> DraftModule:
    return DraftModule(target, NoFeature(), draft, NextToken(reach), UnrolledLoss([SoftCE()], 1.0), Optimization(lr=lr))


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    return make_batch([(9, 3), (6, 2)], [(12, 5)], length=16, vocab=97)


# ---- by hand


def test_the_hit_table_looks_ahead_by_shifting() -> None:
    hit = torch.tensor([[1, 1, 0, 1, 0]], dtype=torch.bool)[..., None]
    table = NextToken(reach=3).table(hit)
    assert table.int().tolist() == [[[1, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]]


def test_no_feature_taps_nothing() -> None:
    source = NoFeature()
    assert source.layers(30) == ()
    assert source(()).numel() == 0
    assert not list(source.parameters())


def test_row_t_is_the_model_behind_token_t_plus_1(batch: Batch) -> None:
    target = random_target()
    draft = built(target, 2)
    (out,) = NextToken()(draft, NoFeature()(()), batch)
    assert torch.equal(out.head_in[:, :-1], draft.lm(batch)[:, 1:])
    assert (out.head_in[:, -1] == 0).all()


def test_the_loss_is_the_distance_of_the_two_laws_over_every_drafted_token(batch: Batch) -> None:
    target = random_target()
    draft = built(target, 2)
    out, _ = module_of(target, draft).run(batch)
    p = target.features(batch, Needs(logits=True)).logits.softmax(-1)
    log_q = draft.lm.logits(draft.lm(batch)).log_softmax(-1)
    rows = [(0, t) for t in range(3, 8)] + [(0, 9 + t) for t in range(2, 5)] + [(1, t) for t in range(5, 11)]
    expected = torch.stack([-(p[r] * log_q[r]).sum() for r in rows]).mean()
    torch.testing.assert_close(out.total, expected)
    assert int(out.judged.sum()) == len(rows)


# ---- equivalences


def test_all_of_the_targets_layers_hit_everywhere(batch: Batch) -> None:
    target = random_target()
    out, _ = module_of(target, built(target, 4)).run(batch)
    assert out.judged.any() and out.hit[out.judged].all()
    torch.testing.assert_close(out.overlap[out.judged], torch.ones(int(out.judged.sum())).double())


@pytest.mark.parametrize("train_embedding", [False, True])
def test_the_loss_reaches_every_parameter_and_falls(batch: Batch, train_embedding: bool) -> None:
    target = random_target()
    least = float(module_of(target, built(target, 4)).run(batch)[0].total.detach())  # what is left where q is p
    module = module_of(target, built(target, 2, train_embedding=train_embedding))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses, before = [], {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(30):
        out, _ = module.run(batch)
        optimizer.zero_grad()
        out.total.backward()
        assert all(p.grad is not None for p in module.parameters())
        optimizer.step()
        losses.append(float(out.total.detach()))
    assert all(not torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in target.model.parameters())
    assert losses[-1] - least < 0.1 * (losses[0] - least)


# ---- what it cannot be put beside


def test_wrong_sizes_are_refused_by_name() -> None:
    target = random_target()
    with pytest.raises(ValueError, match="draft.layers must be >= 1, got 0"):
        FirstLayers(0)
    with pytest.raises(ValueError, match="draft.layers must be at most the target's 4, got 5"):
        FirstLayers(5).build(target, 0, ALL)
    with pytest.raises(ValueError, match=r"features must be NoFeature for FirstLayers, .* got width 32"):
        FirstLayers(2).build(target, TopFeature().build(target), ALL)
    with pytest.raises(ValueError, match="draft_vocab must be null for FirstLayers, .* 97 ids, got 40"):
        FirstLayers(2).build(target, 0, ALL[:40])
    with pytest.raises(ValueError, match="unroll.reach must be >= 1, got 0"):
        NextToken(0)


def test_a_target_without_its_blocks_at_hand_is_refused(make_target: Callable[..., FrozenTarget]) -> None:
    target = make_target(torch.randn(97, 12), torch.randn(97, 12))
    with pytest.raises(ValueError, match="tiny has no blocks at hand to make a language model of"):
        FirstLayers(2).build(target, 0, ALL)


def test_it_is_no_draft_of_steps_and_a_draft_of_steps_is_no_language_model(make_lab: Callable[..., Any]) -> None:
    target, loss = random_target(), UnrolledLoss([SoftCE()])
    language_model, eagle = built(target, 2), make_lab().draft
    with pytest.raises(ValueError, match="unroll must be NextToken for FirstLayers, got Unroll"):
        DraftModule(target, NoFeature(), language_model, Unroll(1), loss, Optimization())
    with pytest.raises(ValueError, match="unroll must be Unroll for Eagle3, which reads features, got NextToken"):
        DraftModule(target, TopFeature(), eagle, NextToken(), loss, Optimization())
    with pytest.raises(ValueError, match="HeadTree reads features, and FirstLayers does not; use DraftLM"):
        HeadTree(Chain(3)).proposer(target.spec, Head(NoFeature(), language_model))
    with pytest.raises(ValueError, match="that this experiment trained, which trained Eagle3; name"):
        DraftLM().proposer(target.spec, Head(TopFeature(), eagle))
    with pytest.raises(ValueError, match="that this experiment trained, which trained no head; name"):
        DraftLM().proposer(target.spec, None)
    with pytest.raises(ValueError, match="a draft of width 0"):
        Eagle3().build(target, NoFeature().build(target), ALL)


def test_the_head_is_trained_where_the_embedding_is(batch: Batch) -> None:
    def names(draft: FirstLayers) -> set[str]:
        return {name.removeprefix("lm.model.") for name, _ in draft.named_parameters()}

    more = names(built(random_target(), 1, train_embedding=True)) - names(built(random_target(), 1))
    assert more == {"model.embed_tokens.weight", "lm_head.weight"}
