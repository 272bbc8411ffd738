"""The unrolled loss: by hand, against a plain loop, and as a law of masks, packing and accumulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import TopFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.training.loss import teacher as teacher_module
from eagle3_lab.training.loss.teacher import Teacher, teach
from eagle3_lab.training.loss.terms import HardCE, SmoothL1, SoftCE, TopKCE
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.types import Batch


def losses_of(lab: Any, batch: Batch, loss: UnrolledLoss, depth: int = 3, **options: Any) -> LossOut:
    outs = lab.unrolled(batch, Unroll(depth))
    return loss(lab.draft, outs, batch, lab.target, lab.taps(batch)[1], **options)


# ---- by hand


def hand_teacher(make_lab: Callable[..., Any], oov: Any) -> Teacher:
    """Two target rows over five ids, of which a draft knows 1 and 3. Laws .1 .2 .4 .2 .1 and .1 .5 .1 .2 .1."""
    laws = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1], [0.1, 0.5, 0.1, 0.2, 0.1]])
    target = make_lab(vocab=5, vocab_size=2).target
    target.head = torch.cat((laws.log().T + 7.0, torch.zeros(5, 10)), dim=1)  # top state i speaks law i
    return teach(target, torch.eye(12)[:2], torch.tensor([1, 3]), oov)


def test_the_three_rules_for_what_lies_outside_the_draft_vocabulary(make_lab: Callable[..., Any]) -> None:
    half, most = [0.5, 0.5], [5 / 7, 2 / 7]
    expected = {
        "drop": (torch.tensor([half, most]), [-1, 0], [0, 1], [0.4, 0.7]),
        "renormalise": (torch.tensor([half, most]), [0, 0], [1, 1], [0.4, 0.7]),
        "mass": (torch.tensor([[0.2, 0.2], [0.5, 0.2]]), [-1, 0], [1, 1], [1.0, 1.0]),
    }
    for oov, (p, label, taught, inside) in expected.items():
        told = hand_teacher(make_lab, oov)
        torch.testing.assert_close(told.p, p)
        assert told.label.tolist() == label
        assert told.taught.tolist() == taught
        assert told.argmax.tolist() == [2, 1]
        torch.testing.assert_close(told.inside, torch.tensor(inside))
        # whatever the rule, overlap is with the full law: min(.2, .75) + min(.2, .25), min(.5, .75) + min(.2, .25)
        q = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        torch.testing.assert_close(told.overlap(q.log()), torch.tensor([0.4, 0.7]))


def test_the_terms_on_two_rows(make_lab: Callable[..., Any]) -> None:
    told = hand_teacher(make_lab, "drop")
    log_q = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    soft = torch.tensor([-0.5 * math.log(0.75) - 0.5 * math.log(0.25), math.log(2)])
    torch.testing.assert_close(SoftCE().per_row(log_q, told), soft)
    torch.testing.assert_close(TopKCE(k=2).per_row(log_q, told), soft)
    torch.testing.assert_close(TopKCE(k=1).per_row(log_q, told)[1], torch.tensor(5 / 7 * math.log(2)))
    torch.testing.assert_close(HardCE().per_row(log_q, told), torch.tensor([0.0, math.log(2)]))
    predicted, feature = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 1.0]])
    torch.testing.assert_close(SmoothL1().per_row(predicted, feature), torch.tensor([(0.125 + 1.5) / 2]))


def test_a_uniform_draft_loses_log_vd_and_dropped_rows_keep_their_place(
    make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(), make_batch([(12, 3)], length=14)
    with torch.no_grad():
        lab.draft.lm_head.weight.zero_()
    out = losses_of(lab, batch, UnrolledLoss([SoftCE()], step_decay=0.5), depth=2)
    known = {int(i) for i in lab.vocab}
    argmax = lab.target.logits(lab.taps(batch)[1]).argmax(-1)[0].tolist()
    # tokens 3..11 are supervised: step 0 drafts from rows 2..9 (teachers 3..10), step 1 from 2..8 (teachers 4..10)
    assert out.weights[0, :, 0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert out.weights[0, :, 1].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]
    inside = [sum(argmax[r] in known for r in range(3 + s, 11)) for s in range(2)]
    assert 0 < inside[0] < 8
    expected = [math.log(9) * inside[0] / 8, math.log(9) * inside[1] / 7]
    torch.testing.assert_close(out.steps, torch.tensor(expected).double())
    torch.testing.assert_close(out.total.item(), expected[0] + 0.5 * expected[1])


# ---- against a plain loop


def plain(lab: Any, batch: Batch, loss: UnrolledLoss, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers one row at a time: per-step means, hits and overlaps."""
    outs, top = lab.unrolled(batch, Unroll(depth)), lab.taps(batch)[1]
    size, length = batch.ids.shape
    weights, means = loss.weights(batch, depth), []
    hit, overlap = torch.zeros(size, length, depth, dtype=torch.bool), torch.zeros(size, length, depth).double()
    for s in range(depth):
        total, count = torch.zeros(()).double(), 0.0
        for b, t in itertools.product(range(size), range(length)):
            past = t + 1 + s >= length
            logits = torch.zeros(23).double() if past else lab.target.logits(top[b, t + 1 + s])
            full, kept = logits.softmax(-1), logits[lab.vocab].softmax(-1)
            known = int(logits.argmax()) in lab.vocab.tolist()
            q = lab.draft.logits(outs[s].head_in[b, t, None], s)[0].softmax(-1)
            p, factor = {
                "drop": (kept, float(known)),
                "renormalise": (kept, 1.0),
                "mass": (full[lab.vocab], 1.0),
            }[loss.oov]
            total = total - weights[b, t, s] * factor * (p * q.log()).sum()
            count += float(weights[b, t, s])
            hit[b, t, s] = lab.vocab[q.argmax()] == logits.argmax()
            overlap[b, t, s] = torch.minimum(full[lab.vocab], q).sum()
        means.append(total / (size * length if loss.reduction == "all" else count))
    return torch.stack(means), hit, overlap


@pytest.mark.parametrize(
    ("mask", "edge"), [("drafted", "dropped"), ("official", "dropped"), ("official", "counted"), ("root", "dropped")]
)
@pytest.mark.parametrize("oov", ["drop", "renormalise", "mass"])
@pytest.mark.parametrize("reduction", ["supervised", "all"])
def test_loss_and_statistics_equal_a_loop_over_rows(
    mask: Any, edge: Any, oov: Any, reduction: Any, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab = make_lab(seed=4)
    documents = [[(10, 3)], [(7, 2)]] if edge == "counted" else [[(5, 1), (5, 2)], [(7, 2)]]
    batch = make_batch(*documents, length=10)
    loss = UnrolledLoss([SoftCE(0.7)], 0.8, mask, edge, oov, reduction)
    out = losses_of(lab, batch, loss)
    means, hit, overlap = plain(lab, batch, loss, depth=3)
    torch.testing.assert_close(out.steps, 0.7 * means.detach())
    torch.testing.assert_close(out.total, 0.7 * (means * torch.tensor([1.0, 0.8, 0.64]).double()).sum())
    looked_at = out.judged | (out.weights > 0)
    assert torch.equal(out.hit, hit & looked_at)
    torch.testing.assert_close(out.overlap.double(), overlap * looked_at)
    found = torch.autograd.grad(out.total, list(lab.parameters().values()))
    again = torch.autograd.grad(
        0.7 * (means * torch.tensor([1.0, 0.8, 0.64]).double()).sum(), list(lab.parameters().values())
    )
    torch.testing.assert_close(found, again)


def test_the_judged_rows_are_the_draftable_ones_whatever_the_losses_mask(
    make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(seed=4), make_batch([(9, 3)], length=9)
    tables = [losses_of(lab, batch, UnrolledLoss([SoftCE()], mask=mask)) for mask in ("drafted", "official", "root")]
    assert tables[0].judged.sum() == 5 + 4 + 3
    for table in tables[1:]:
        assert torch.equal(table.judged, tables[0].judged)
        assert torch.equal(table.hit & table.judged, tables[0].hit)
        torch.testing.assert_close(table.overlap * table.judged, tables[0].overlap)


def test_feature_and_row_terms_add_with_their_weights(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(), make_batch([(9, 3)], length=9)
    both = losses_of(lab, batch, UnrolledLoss([SmoothL1(2.0), SoftCE(0.1)]))
    feature, soft = (losses_of(lab, batch, UnrolledLoss([term])) for term in (SmoothL1(), SoftCE()))
    torch.testing.assert_close(both.steps, 2.0 * feature.steps + 0.1 * soft.steps)
    outs, top = lab.unrolled(batch, Unroll(3)), lab.taps(batch)[1]
    by_hand = [SmoothL1().per_row(outs[s].head_in[0, 2 : 7 - s], top[0, 3 + s : 8]).mean() for s in range(3)]
    torch.testing.assert_close(feature.steps, torch.stack(by_hand).detach())


def test_teachers_made_in_chunks_are_the_same(
    make_lab: Callable[..., Any], make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, batch = make_lab(), make_batch([(6, 2)], [(9, 3)], length=9)
    loss = UnrolledLoss([SoftCE()], mask="official", edge="counted")
    whole = losses_of(lab, batch, loss)
    monkeypatch.setattr(teacher_module, "CHUNK_BYTES", 2 * 4 * 23)  # two rows at a time
    chunked = losses_of(lab, batch, loss)
    torch.testing.assert_close(chunked.total, whole.total)
    assert torch.equal(chunked.hit, whole.hit)


# ---- laws


def total_and_gradients(lab: Any, out: LossOut) -> list[Tensor]:
    return [out.total, *torch.autograd.grad(out.total, list(lab.parameters().values()))]


@pytest.mark.parametrize("mask", ["drafted", "official", "root"])
def test_documents_packed_or_padded_or_alone_give_one_loss_and_one_gradient(
    mask: Any, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, loss = make_lab(draft=Eagle3(num_layers=2)), UnrolledLoss([SoftCE()], mask=mask)
    packed = make_batch([(9, 3), (6, 2)], length=17)
    parts = [packed.ids[:, :9], packed.ids[:, 9:15]]
    alone = [make_batch([(9, 3)], length=9), make_batch([(6, 2)], length=6)]
    alone = [Batch(ids, one.supervised, one.position, one.document) for ids, one in zip(parts, alone, strict=True)]
    padded = make_batch([(9, 3)], [(6, 2)], length=9)
    padded.ids[0], padded.ids[1, :6] = parts[0][0], parts[1][0]

    whole = total_and_gradients(lab, losses_of(lab, packed, loss))
    torch.testing.assert_close(total_and_gradients(lab, losses_of(lab, padded, loss)), whole)
    # one by one, as micro-batches of one optimizer step: the denominators are shared, the losses add
    counts = torch.stack([loss.denominators(one, 3) for one in alone]).sum(0)
    each = [total_and_gradients(lab, losses_of(lab, one, loss, denominators=counts)) for one in alone]
    torch.testing.assert_close([a + b for a, b in zip(*each, strict=True)], whole)


def test_what_follows_a_document_does_not_touch_its_loss(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(), make_batch([(6, 2), (5, 5)], length=11)  # the second document supervises nothing
    before = losses_of(lab, batch, UnrolledLoss([SoftCE()])).total
    batch.ids[0, 6:] = (batch.ids[0, 6:] + 1) % 23
    assert torch.equal(losses_of(lab, batch, UnrolledLoss([SoftCE()])).total, before)


@pytest.mark.parametrize("head", ["target", "frozen"])
def test_every_trained_parameter_gets_a_gradient_and_nothing_else(
    head: Any, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(draft=Eagle3(num_layers=2, head=head)), make_batch([(9, 3)], length=9)
    losses_of(lab, batch, UnrolledLoss([SoftCE()])).total.backward()
    for name, parameter in lab.parameters().items():
        if head == "frozen" and name == "lm_head.weight":
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert lab.target.embedding.grad is None
    assert lab.target.head.grad is None


@pytest.mark.parametrize("reduction", ["supervised", "all"])
def test_a_batch_without_supervised_tokens_is_a_finite_zero_that_weighs_nothing(
    reduction: Any, make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(), make_batch([(6, 6)], length=8)
    out = losses_of(lab, batch, UnrolledLoss([SoftCE(), TopKCE(k=2), HardCE()], reduction=reduction))
    out.total.backward()
    assert out.total.item() == 0.0
    assert not out.judged.any()
    for name, parameter in lab.parameters().items():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, name  # data parallelism waits for all


def test_answers_wholly_outside_the_draft_vocabulary_give_a_finite_loss(
    make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(vocab_size=1), make_batch([(9, 3)], length=9)
    lab.target.head[lab.vocab] *= 0  # logit 0 is never the largest of 23 random ones here
    for oov in ("drop", "renormalise", "mass"):
        out = losses_of(lab, batch, UnrolledLoss([SoftCE(), HardCE()], oov=oov))
        assert out.total.isfinite()
        assert not out.hit.any()


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"terms": []}, r"losses must hold a term with a positive weight, got \[\]"),
        ({"terms": [SoftCE(0.0), SmoothL1(0.0)]}, r"got \['SoftCE', 'SmoothL1'\]"),
        ({"terms": [SoftCE()], "step_decay": 0.0}, r"step_decay must be in \(0, 1\], got 0.0"),
        ({"terms": [SoftCE()], "step_decay": 1.5}, r"step_decay must be in \(0, 1\], got 1.5"),
        (
            {"terms": [SoftCE()], "edge": "counted"},
            "edge 'counted' exists only with mask 'official', got mask 'drafted'",
        ),
    ],
)
def test_a_loss_that_means_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UnrolledLoss(**arguments)


@pytest.mark.parametrize("key", ["mask", "edge", "oov", "reduction"])
def test_an_unknown_name_is_refused(key: str) -> None:
    with pytest.raises((ValueError, TypeError), match="'typo'"):  # TypeError: by the checked annotation
        UnrolledLoss(**{"terms": [SoftCE()], key: "typo"})  # pyright: ignore[reportArgumentType]


def test_bad_terms_are_refused() -> None:
    with pytest.raises(ValueError, match="losses.SoftCE.weight must be >= 0, got -1.0"):
        SoftCE(-1.0)
    with pytest.raises(ValueError, match="losses.TopKCE.k must be >= 1, got 0"):
        TopKCE(k=0)


def test_terms_that_the_parts_cannot_serve_are_refused(make_lab: Callable[..., Any]) -> None:
    lab, top = make_lab(), TopFeature()
    with pytest.raises(ValueError, match="SmoothL1 needs the target's own feature to compare with, but FusedFeature"):
        UnrolledLoss([SmoothL1()]).check(lab.source, lab.draft)
    with pytest.raises(ValueError, match="losses.TopKCE.k must be <= the draft vocabulary's 9, got 10"):
        UnrolledLoss([TopKCE()]).check(lab.source, lab.draft)
    UnrolledLoss([SmoothL1(), TopKCE(k=9)]).check(top, lab.draft)
    UnrolledLoss([SoftCE(), SmoothL1(0.0)]).check(lab.source, lab.draft)  # weight 0: the term is off


def test_steps_beyond_the_counted_ones_are_judged_and_weigh_nothing(
    make_lab: Callable[..., Any], make_batch: Any
) -> None:
    lab, batch = make_lab(), make_batch([(9, 2), (5, 1)], length=14)
    loss = UnrolledLoss([SoftCE()], 0.8)
    short, long, all_of_it = (losses_of(lab, batch, loss, depth, **more) for depth, more in STEPS)
    torch.testing.assert_close(long.total, short.total)
    assert long.steps[2:].tolist() == [0.0, 0.0]
    assert long.weights[..., 2:].sum() == 0
    assert torch.equal(long.judged, all_of_it.judged)
    assert torch.equal(long.hit, all_of_it.hit)
    mine, theirs = (torch.autograd.grad(out.total, list(lab.parameters().values())) for out in (long, short))
    torch.testing.assert_close(mine, theirs)


STEPS: list[tuple[int, dict[str, Any]]] = [(2, {}), (4, {"counted": 2}), (4, {})]
