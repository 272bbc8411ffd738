"""Losses on the acceptance: by hand, and against autograd through the plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.training.loss import memory
from eagle3_lab.training.loss.lk import KLToAcceptance, KLToMeanAcceptance, LogAcceptance, LogMeanAcceptance
from eagle3_lab.training.loss.teacher import Teacher
from eagle3_lab.training.loss.terms import KL, ReverseKL, SoftCE, StepTerm, TotalVariation
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.types import Batch


def two_rows() -> tuple[Tensor, Teacher]:
    """The draft knows half of a law .25 .25 | .5 and all of a law .8 .2; it says .75 .25 and .5 .5."""
    p, inside = torch.tensor([[0.5, 0.5], [0.8, 0.2]]), torch.tensor([0.5, 1.0])
    teacher = Teacher(p, label=torch.tensor([0, 0]), taught=torch.ones(2), argmax=torch.tensor([7, 0]), inside=inside)
    return torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log(), teacher


def test_divergences_on_two_rows() -> None:
    log_q, teacher = two_rows()
    forward = [0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), 0.8 * math.log(1.6) + 0.2 * math.log(0.4)]
    reverse = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)]
    torch.testing.assert_close(KL().per_row(log_q, teacher), torch.tensor(forward))
    torch.testing.assert_close(ReverseKL().per_row(log_q, teacher), torch.tensor(reverse))
    torch.testing.assert_close(TotalVariation().per_row(log_q, teacher), torch.tensor([0.25, 0.3]))


def test_acceptance_is_with_the_full_law_on_two_rows() -> None:
    log_q, teacher = two_rows()
    alpha = torch.tensor([0.25 + 0.25, 0.5 + 0.2])
    torch.testing.assert_close(LogAcceptance().per_row(log_q, teacher), -alpha.log())
    kl = KL().per_row(log_q, teacher)
    share = torch.exp(-3 * alpha)
    torch.testing.assert_close(KLToAcceptance().per_row(log_q, teacher), share * kl + (1 - share) * (1 - alpha))
    mean = torch.tensor(0.6)
    share = math.exp(-3 * 0.6)
    blend = KLToMeanAcceptance().per_row(log_q, teacher, mean)
    torch.testing.assert_close(blend, share * kl + (1 - share) * (1 - alpha))
    torch.testing.assert_close(LogMeanAcceptance().per_row(log_q, teacher, mean).mean(), -mean.log())


def test_a_law_that_leaves_ids_out_gives_finite_losses_and_gradients() -> None:
    teacher = Teacher(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.ones(1), torch.tensor([0]), torch.ones(1))
    for term in (KL(), ReverseKL(), TotalVariation(), LogAcceptance(), KLToAcceptance()):
        logits = torch.tensor([[-200.0, 0.0]], requires_grad=True)
        loss = term.per_row(logits.log_softmax(-1), teacher).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite(), type(term).__name__
        assert gradient.isfinite().all(), type(term).__name__


def draft_laws(lab: Any, batch: Batch, loss: UnrolledLoss, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and the full p and q over the draft vocabulary, of the rows of step s, with their graph."""
    outs, top = lab.unrolled(batch, Unroll(2)), lab.taps(batch)[1]
    weight = loss.weights(batch, 2)[0, :-2, s]
    p = lab.target.logits(top).softmax(-1)[0, 1 + s : batch.ids.shape[1] - 1 + s][: len(weight), lab.vocab]
    known = torch.isin(lab.target.logits(top).argmax(-1)[0, 1 + s :][: len(weight)], lab.vocab)
    q = lab.draft.logits(outs[s].head_in[0, :-2], s).softmax(-1)
    return weight * known, p, q


@pytest.mark.parametrize("term", [LogMeanAcceptance(), KLToMeanAcceptance(rate=2.0)])
@pytest.mark.parametrize("budget", [1, 256])
def test_a_term_of_the_mean_has_the_value_and_gradient_of_the_plain_formula(
    term: StepTerm, budget: int, make_lab: Callable[..., Any], make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without a rule for dropped rows every row is taught, and the mean over taught rows is the step's S_s / N_s
    lab, batch = make_lab(vocab_size=23, seed=3), make_batch([(14, 3)], length=16)
    loss = UnrolledLoss([term], step_decay=1.0, oov="renormalise", budget_mib=budget)
    if budget == 1:
        monkeypatch.setattr(memory, "rows_at_once", lambda *_: (3, 2))
    outs, parameters = lab.unrolled(batch, Unroll(2)), list(lab.draft.parameters())
    out = loss(lab.draft, outs, batch, lab.target, lab.taps(batch)[1])
    expected = []
    for s in range(2):
        weight, p, q = draft_laws(lab, batch, loss, s)
        mean = (weight * torch.minimum(p, q).sum(-1)).sum() / weight.sum()
        if isinstance(term, LogMeanAcceptance):
            expected.append(-mean.log())
        else:
            share = torch.exp(-2 * mean.detach())
            kl = (weight * (p * (p.log() - q.log())).sum(-1)).sum() / weight.sum()
            expected.append(share * kl + (1 - share) * (1 - mean))
    torch.testing.assert_close(out.total, sum(expected))
    got = torch.autograd.grad(out.total, parameters, retain_graph=True)
    told = torch.autograd.grad(sum(expected), parameters)
    torch.testing.assert_close(got, told)


def test_kl_differs_from_soft_cross_entropy_by_a_constant_alone(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(), make_batch([(14, 3)], length=16)
    found = []
    for term in (SoftCE(), KL()):
        outs = lab.unrolled(batch, Unroll(2))
        out = UnrolledLoss([term])(lab.draft, outs, batch, lab.target, lab.taps(batch)[1])
        found.append((out.total, torch.autograd.grad(out.total, list(lab.draft.parameters()))))
    assert found[1][0] < found[0][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_a_negative_rate_is_refused() -> None:
    for make in (KLToAcceptance, KLToMeanAcceptance):
        with pytest.raises(ValueError, match="rate must be >= 0, got -1"):
            make(rate=-1.0)
