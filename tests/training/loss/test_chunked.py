"""The loss by chunks equals the plain formula, whatever the budget, and never holds all rows' logits at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import DraftModel, FrozenTarget
from eagle3_lab.rows import shift
from eagle3_lab.training.loss import memory as room_module
from eagle3_lab.training.loss.chunked import chunks
from eagle3_lab.training.loss.memory import Room
from eagle3_lab.training.loss.teacher import Teacher, teach, teach_by_summary
from eagle3_lab.training.loss.terms import HardCE, RowTerm, SmoothL1, SoftCE, TopKCE
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.types import Batch, DraftOut, LogitSummary


def plain_loss(
    loss: UnrolledLoss,
    draft: DraftModel,
    steps: list[DraftOut],
    batch: Batch,
    target: FrozenTarget,
    top: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formula itself, all rows of a step at once, gradients by autograd: total, means, hits, overlaps."""
    depth = len(steps)
    weights, counts = loss.weights(batch, depth), loss.denominators(batch, depth).clamp(min=1)
    means, hits, overlaps = [], [], []
    for s, out in enumerate(steps):
        past = torch.arange(top.shape[1]).expand(top.shape[:2]) >= top.shape[1] - 1 - s
        states = shift(top, 1 + s)
        law = teach(target, states.flatten(0, 1), draft.vocab, loss.oov, past.flatten())
        head_in = out.head_in.flatten(0, 1)
        log_q = draft.logits(head_in, s).float().log_softmax(-1)
        losses = sum(term.weight * term.per_row(log_q, law) for term in loss.row_terms) * law.taught
        losses = losses + sum(t.weight * t.per_row(head_in, states.flatten(0, 1)) for t in loss.feature_terms)
        means.append((losses * weights[..., s].flatten()).sum() / counts[s])
        hits.append((draft.vocab[log_q.argmax(-1)] == law.argmax).view(past.shape))
        overlaps.append(law.overlap(log_q).detach().view(past.shape))
    total = sum(loss.step_decay**s * mean for s, mean in enumerate(means))
    assert isinstance(total, Tensor)
    return total, torch.stack(means).detach(), torch.stack(hits, -1), torch.stack(overlaps, -1)


class Squared(RowTerm):
    """A term that no one foresaw: half the squared distance of the laws."""

    def per_row(self, log_q: Tensor, teacher: Teacher) -> Tensor:
        return 0.5 * (log_q.exp() - teacher.p).square().sum(-1)


class Heads(nn.Module):
    """One head a step, each with a bias and a cap, on one shared body: what a Medusa would bring."""

    def __init__(self, width: int, size: int, depth: int) -> None:
        super().__init__()
        self.by_step = nn.ModuleList(nn.Linear(width, size) for _ in range(depth))

    def forward(self, x: Tensor, s: int) -> Tensor:
        return 5 * (self.by_step[s](x) / 5).tanh()


class Eagle3OfManyHeads(Eagle3):
    def build(self, target: FrozenTarget, width: int, vocab: Tensor) -> None:
        super().build(target, width, vocab)
        self.lm_head = Heads(width, vocab.shape[0], 3)  # pyright: ignore[reportAttributeAccessIssue]

    def logits(self, head_in: Tensor, s: int) -> Tensor:
        return self.lm_head(head_in, s)


class Case:
    """A head in float32, its steps on a batch, and everything the loss reads."""

    def __init__(self, make_lab: Callable[..., Any], batch: Batch, depth: int = 3, **options: Any) -> None:
        lab = make_lab(**options)
        lab.source.float(), lab.draft.float()
        lab.target.embedding, lab.target.head = lab.target.embedding.float(), lab.target.head.float()
        taps, top = lab.taps(batch)
        self.lab, self.batch, self.draft, self.target, self.top = lab, batch, lab.draft, lab.target, top.float()
        self.parameters = {name: p for name, p in lab.parameters().items() if p.requires_grad}
        self.steps = list(Unroll(depth)(lab.draft, lab.source(taps), batch))

    def gradients(self, total: Tensor) -> dict[str, Tensor]:
        aims = list(self.parameters.values()) + [out.head_in for out in self.steps]
        names = [*self.parameters, *(f"head_in of step {s}" for s in range(len(self.steps)))]
        return dict(zip(names, torch.autograd.grad(total, aims, retain_graph=True), strict=True))

    def run(self, loss: UnrolledLoss, **options: Any) -> LossOut:
        return loss(self.draft, self.steps, self.batch, self.target, self.top, **options)

    def agrees(self, loss: UnrolledLoss, tolerance: float = 1e-6) -> None:
        out = self.run(loss)
        total, means, hits, overlaps = plain_loss(loss, self.draft, self.steps, self.batch, self.target, self.top)
        close = {"rtol": 1e-5, "atol": tolerance}
        torch.testing.assert_close(out.total, total, **close)
        torch.testing.assert_close(out.steps, means, **close)
        looked_at = out.judged | (out.weights > 0)
        assert torch.equal(out.hit, hits & looked_at)
        torch.testing.assert_close(out.overlap, overlaps * looked_at, **close)
        told = self.gradients(total)
        for name, found in self.gradients(out.total).items():
            largest = max(1.0, float(told[name].abs().max()))
            torch.testing.assert_close(found, told[name], rtol=0, atol=tolerance * largest, msg=name)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many teachers share a chunk: budgets are in MiB, and these tensors in bytes."""
    return lambda rows: monkeypatch.setattr(room_module, "rows_at_once", lambda *_: (rows, 1 + rows // 2))


# ---- by hand


def test_a_teachers_rows_come_together_step_by_step() -> None:
    # rows 0 1 of two texts of three tokens; row t of step s has teacher t + 1 + s
    wanted = torch.zeros(2, 3, 2, dtype=torch.bool)
    wanted[0, 0, 0] = wanted[0, 1, 0] = wanted[0, 0, 1] = wanted[1, 1, 1] = True
    first, second = chunks(wanted, 2)
    assert (first.row.tolist(), first.column.tolist()) == ([0, 0], [1, 2])
    assert [(p.step, p.place.tolist(), p.slot.tolist()) for p in first.pieces] == [(0, [0, 1], [0, 1]), (1, [0], [1])]
    assert (second.row.tolist(), second.column.tolist()) == ([1], [3])  # past the text: the text ends at 2
    assert [(p.step, p.place.tolist(), p.slot.tolist()) for p in second.pieces] == [(0, [], []), (1, [4], [0])]


def test_chunks_are_of_even_size_and_hold_every_wanted_row_once() -> None:
    wanted = torch.rand(3, 11, 4, generator=torch.Generator().manual_seed(0)) < 0.4
    made = chunks(wanted, 9)
    sizes = [len(chunk.row) for chunk in made]
    assert max(sizes) <= 9
    assert max(sizes) - min(sizes) < len(sizes)
    seen = torch.zeros(33, 4)
    for chunk in made:
        for piece in chunk.pieces:
            assert torch.equal(chunk.row[piece.slot], piece.place // 11)
            assert torch.equal(chunk.column[piece.slot], piece.place % 11 + 1 + piece.step)
            seen[piece.place, piece.step] += 1
    assert torch.equal(seen.view(3, 11, 4), wanted.float())


def test_nothing_wanted_is_one_empty_chunk_with_every_step() -> None:
    (only,) = chunks(torch.zeros(2, 3, 2, dtype=torch.bool), 5)
    assert [(len(only.row), piece.step, len(piece.place)) for piece in only.pieces] == [(0, 0, 0), (0, 1, 0)]


# ---- against the plain formula, float32


@pytest.mark.parametrize(
    ("mask", "edge"), [("drafted", "dropped"), ("official", "dropped"), ("official", "counted"), ("root", "dropped")]
)
@pytest.mark.parametrize("oov", ["drop", "renormalise", "mass"])
@pytest.mark.parametrize("reduction", ["supervised", "all"])
def test_every_mask_and_rule_gives_the_plain_loss_statistics_and_gradients(
    mask: Any, edge: Any, oov: Any, reduction: Any, make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    documents = [[(10, 3)], [(7, 2)]] if edge == "counted" else [[(5, 1), (5, 2)], [(7, 2)]]
    few_at_once(3)
    Case(make_lab, make_batch(*documents, length=10)).agrees(UnrolledLoss([SoftCE()], 0.8, mask, edge, oov, reduction))


@pytest.mark.parametrize(
    "terms",
    [[SoftCE(0.7)], [HardCE()], [TopKCE(k=4)], [Squared()], [SoftCE(0.1), SmoothL1(2.0)], [HardCE(), TopKCE(0.5, 3)]],
    ids=lambda terms: "+".join(type(term).__name__ for term in terms),
)
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_every_term_gives_the_plain_loss_and_gradients_whatever_fits_the_budget(
    terms: Any, rows: int, make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    few_at_once(rows)
    Case(make_lab, make_batch([(6, 2), (4, 2)], [(9, 3)], length=10)).agrees(UnrolledLoss(terms))


def test_the_edge_gives_feature_terms_a_blank_aim(make_lab: Any, make_batch: Any, few_at_once: Any) -> None:
    few_at_once(4)
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    case.agrees(UnrolledLoss([SmoothL1(), SoftCE()], mask="official", edge="counted"))


@pytest.mark.parametrize("rows", [2, 1000])
def test_a_draft_that_says_every_id_gives_the_plain_loss(
    rows: int, make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    few_at_once(rows)
    Case(make_lab, make_batch([(9, 3)], length=9), vocab_size=23).agrees(UnrolledLoss([SoftCE(), TopKCE()]))


def test_one_head_a_step_gives_each_its_own_gradient(make_lab: Any, make_batch: Any, few_at_once: Any) -> None:
    few_at_once(2)
    Case(make_lab, make_batch([(9, 3)], length=9), draft=Eagle3OfManyHeads()).agrees(UnrolledLoss([SoftCE()]))


def test_a_frozen_head_gets_no_gradient_and_passes_it_on(make_lab: Any, make_batch: Any, few_at_once: Any) -> None:
    few_at_once(2)
    case = Case(make_lab, make_batch([(9, 3)], length=9), draft=Eagle3(head="frozen"))
    assert "lm_head.weight" not in case.parameters
    case.agrees(UnrolledLoss([SoftCE()]))


# ---- with the target's logits summarised beforehand


def summarised(case: Case) -> LogitSummary:
    """What a feature store keeps of the case's logits."""
    logits = case.target.logits(case.top)
    return LogitSummary(logits.argmax(-1), logits.logsumexp(-1))


@pytest.mark.parametrize("mask", ["drafted", "official", "root"])
@pytest.mark.parametrize("oov", ["drop", "renormalise", "mass"])
@pytest.mark.parametrize("size", [9, 23], ids=["part of the vocabulary", "all of it"])
def test_summarised_logits_give_the_same_loss_statistics_and_gradients(
    mask: Any, oov: Any, size: int, make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    few_at_once(3)
    case = Case(make_lab, make_batch([(5, 1), (5, 2)], [(7, 2)], length=10), vocab_size=size)
    loss = UnrolledLoss([SoftCE(), HardCE(), TopKCE(k=4), Squared(), SmoothL1()], mask=mask, oov=oov)
    plain, found = case.run(loss), case.run(loss, summary=summarised(case))
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.total, plain.total, **close)
    torch.testing.assert_close(found.steps, plain.steps, **close)
    torch.testing.assert_close(found.overlap, plain.overlap, **close)
    assert torch.equal(found.hit, plain.hit)
    told = case.gradients(plain.total)
    for name, gradient in case.gradients(found.total).items():
        torch.testing.assert_close(gradient, told[name], rtol=0, atol=1e-6 * max(1.0, float(told[name].abs().max())))


def test_with_summarised_logits_the_target_is_never_asked_for_all_of_them(
    make_lab: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    loss, summary, head = UnrolledLoss([SoftCE()]), summarised(case), case.target.head
    told = case.run(loss).total
    asked: list[Tensor] = []

    def head_over(ids: Tensor) -> Callable[[Tensor], Tensor]:
        asked.append(ids)
        return lambda top: top @ head[ids].T

    monkeypatch.setattr(case.target, "head_over", head_over)
    monkeypatch.setattr(case.target, "logits", None)
    torch.testing.assert_close(case.run(loss, summary=summary).total, told, rtol=1e-6, atol=1e-6)
    assert len(asked) == 1 and torch.equal(asked[0], case.draft.vocab)


def test_laws_get_what_gradients_leave_of_the_budget_and_at_least_an_eighth() -> None:
    narrow, wide, mib = torch.bfloat16, torch.float32, 2**20
    row = 1024 * (4 + 2 * 2)
    # a sixteenth is for rows that are compared, a sixty-fourth for a slice of the head's gradient
    assert room_module.rows_at_once(64, 1024, wide, narrow, held=0) == (59 * mib // row, 4 * mib // (6 * 4096))
    assert room_module.rows_at_once(64, 1024, wide, narrow, held=30 * mib)[0] == 29 * mib // row
    assert room_module.rows_at_once(64, 1024, wide, narrow, held=99 * mib)[0] == 8 * mib // row
    assert room_module.rows_at_once(1, 2**22, wide, wide, held=0) == (1, 1)


def test_as_many_target_logits_are_made_as_take_what_the_drafts_will() -> None:
    room = Room(rows=512, compared=8, row_bytes=1024 * 2 * 2)
    assert room.made(512, 65536, torch.float32) == 8
    assert room.made(512, 1024, torch.bfloat16) == 1024
    assert room.made(1, 65536, torch.float32) == 1


def test_a_normaliser_below_its_own_part_never_makes_a_law_outweigh_one() -> None:
    draw = torch.Generator().manual_seed(0)
    head, top, vocab = torch.randn(23, 12, generator=draw), torch.randn(6, 12, generator=draw), torch.arange(9)
    kept = top @ head[vocab].T
    short = LogitSummary(kept.argmax(-1), kept.logsumexp(-1) - 0.1)
    law = teach_by_summary(lambda x: x @ head[vocab].T, top, short, vocab, "mass")
    torch.testing.assert_close(law.p.sum(-1), torch.ones(6))


def test_the_edge_that_nothing_is_known_of_is_refused(make_lab: Any, make_batch: Any) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    with pytest.raises(ValueError, match="edge 'counted' is taught by rows past the text, of which nothing is kept"):
        case.run(UnrolledLoss([SoftCE()], mask="official", edge="counted"), summary=summarised(case))


# ---- laws


def test_the_backward_scales_with_what_comes_in_and_may_be_repeated(make_lab: Any, make_batch: Any) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    total = case.run(UnrolledLoss([SoftCE()])).total
    once, tripled = case.gradients(total), case.gradients(3 * total)
    torch.testing.assert_close(tripled, {name: 3 * value for name, value in once.items()})


def test_a_step_that_nearly_all_teachers_teach_drops_what_the_others_give(
    make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    """Documents of 20 and 19 tokens at once: steps 1 and 2 lack a row or two of 35 teachers, and none counts twice."""
    few_at_once(1000)
    batch = make_batch([(20, 1), (19, 1)], length=40)
    wanted = UnrolledLoss([SoftCE()]).weights(batch, 3) > 0
    (chunk,) = chunks(wanted, 1000)
    first, *later = chunk.pieces
    assert first.beside is None and first.rows is first.place
    for piece in later:
        assert piece.beside is not None and piece.rows.shape == chunk.row.shape
        assert torch.equal(piece.pick(piece.rows), piece.place)
        assert piece.spread(torch.ones(len(piece.slot))).sum() == len(piece.place) < len(chunk.row)
    Case(make_lab, batch).agrees(UnrolledLoss([SoftCE(), HardCE(0.3), TopKCE(0.2, k=3)]))


def test_without_gradients_the_numbers_are_the_same(make_lab: Any, make_batch: Any) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    loss = UnrolledLoss([SoftCE(), HardCE()])
    learning = case.run(loss)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            looking = case.run(loss)
        assert not looking.total.requires_grad
        assert looking.total == learning.total
        assert torch.equal(looking.overlap, learning.overlap)


def test_under_autocast_gradients_are_those_of_float32_to_bfloat16(
    make_lab: Any, make_batch: Any, few_at_once: Any
) -> None:
    few_at_once(3)
    case = Case(make_lab, make_batch([(9, 3), (8, 2)], length=17))
    loss = UnrolledLoss([SoftCE()])
    exact = case.gradients(case.run(loss).total)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = case.run(loss)
    assert narrow.total.dtype == torch.float32
    for name, found in case.gradients(narrow.total).items():
        assert found.dtype == torch.float32
        assert (found - exact[name]).norm() <= 0.02 * exact[name].norm(), name


def test_micro_batches_with_shared_denominators_add_up(make_lab: Any, make_batch: Any, few_at_once: Any) -> None:
    few_at_once(2)
    batch = make_batch([(9, 3)], [(7, 2)], length=9)
    whole, loss = Case(make_lab, batch), UnrolledLoss([SoftCE()])
    counts, parts = loss.denominators(batch, 3), []
    for b in (0, 1):
        one = Batch(*(x[b : b + 1] for x in vars(batch).values()))
        case = Case(make_lab, one)
        total = case.run(loss, denominators=counts).total
        parts.append(torch.autograd.grad(total, list(case.parameters.values())))
    told = torch.autograd.grad(whole.run(loss).total, list(whole.parameters.values()))
    torch.testing.assert_close([a + b for a, b in zip(*parts, strict=True)], list(told), rtol=1e-5, atol=1e-6)


def test_gradients_far_below_float16_survive_a_half_precision_head(make_lab: Any, make_batch: Any) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    many = torch.full((3,), 1e9)  # as if this were a small part of a huge optimizer step
    exact = case.gradients(case.run(UnrolledLoss([SoftCE()]), denominators=many).total)
    half = copy.deepcopy(case.draft).half()
    case.draft = half
    case.steps = [DraftOut(out.head_in.detach().half().requires_grad_(), out.carry) for out in case.steps]
    total = case.run(UnrolledLoss([SoftCE()]), denominators=many).total
    (found,) = torch.autograd.grad(1e9 * total, [half.lm_head.weight])
    wanted = 1e9 * exact["lm_head.weight"]
    assert (found - wanted).norm() <= 0.01 * wanted.norm()


def live_peak(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` holds at once beyond what was there before."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:  # else 2.11 warns
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.fixture
def peak_of(make_target: Any, make_batch: Any) -> Callable[..., int]:
    """The most bytes that head and loss, backward included, hold beside the heads' inputs, in bfloat16 products: the
    embedded target at a fourth of its width, vocabulary and rows, so in a sixteenth of its memory."""

    def measure(size: int, depth: int, taught: int, budget_mib: int | None = 16) -> int:
        width, vocab, rows = 144, 49152 // 4, 256
        draw = torch.Generator().manual_seed(0)
        target = make_target(torch.zeros(vocab, width), torch.randn(vocab, width, generator=draw))
        draft = Eagle3(head="target")
        draft.build(target, width, torch.arange(vocab)[:size])
        top = torch.randn(1, rows, width, generator=draw)
        batch = make_batch([(rows, rows - taught)], length=rows, vocab=vocab)
        outs = [torch.randn(1, rows, width, generator=draw, requires_grad=True) for _ in range(depth)]
        steps = [DraftOut(x, x) for x in outs]
        loss = UnrolledLoss([SoftCE(), TopKCE()], oov="renormalise", budget_mib=budget_mib)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                total = loss(draft, steps, batch, target, top).total
            total.backward()

        found = live_peak(step)
        assert all(x.grad is not None for x in [*outs, draft.lm_head.weight])
        return found

    return measure


def test_memory_of_head_and_loss_grows_little_with_depth_and_stays_in_the_budget(peak_of: Any) -> None:
    """As at draft vocabulary 8192, rows of 1024 and 256 MiB."""
    once, deep = peak_of(2048, depth=1, taught=254), peak_of(2048, depth=7, taught=254)
    assert once < deep < 1.2 * once
    assert deep < 16 * 2**20
    assert peak_of(2048, depth=1, taught=254, budget_mib=None) > 1.5 * once


def test_memory_stays_in_the_budget_where_gradients_take_most_of_it(peak_of: Any) -> None:
    """As at draft vocabulary 49152 and 256 MiB, of which the head's gradient and the cast of its weights are 162."""
    gradients = 49152 // 4 * 144 * (4 + 2)
    assert gradients < peak_of(49152 // 4, depth=7, taught=77) < 16 * 2**20


def test_a_backward_that_kept_nothing_is_not_repeated(make_lab: Any, make_batch: Any) -> None:
    case = Case(make_lab, make_batch([(9, 3)], length=9))
    case.steps = [DraftOut(out.head_in.detach().requires_grad_(), out.carry) for out in case.steps]
    total = case.run(UnrolledLoss([SoftCE()])).total
    total.backward()
    with pytest.raises(RuntimeError, match="the first needs retain_graph=True"):
        total.backward()


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_mib must be >= 1, or null for all rows at once, got 0"):
        UnrolledLoss([SoftCE()], budget_mib=0)
