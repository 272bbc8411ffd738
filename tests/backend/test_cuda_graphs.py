"""Recorded forwards: inputs are copied in, outputs copied out, and a cache's recordings serve session after session.

On a CPU a tape records: like a graph it repeats operations on the memory they were recorded with, and runs no Python.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from counted_record import Counted
from random_targets import random_target
from torch import Tensor

from eagle3_lab.backend.cuda_graphs import Captured, CudaRecord, Inputs, Record, Replay, T, Tape, Unrecorded, settled
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Needs, TargetOut, Tree, Verdict

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


def answers(target: HFTarget, rounds: int = 4) -> list[TargetOut]:
    """Two ragged prompts, then trees of one shape whose tokens, depths and kept paths change."""
    device = target.device
    session = target.open(2, 60, Needs((1, 4)))
    session.prefill(torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]]).to(device), torch.tensor([5, 3]).to(device))
    made = []
    for i in range(rounds):
        tokens = (torch.arange(8).view(2, 4) * 7 + 5 * i) % 97
        parents = torch.tensor([[0, 0, 0, 2], [0, 0, 1, 1]]).roll(i % 2, 0)
        tree = Tree(tokens.to(device), parents.to(device), torch.ones(2, 4, dtype=torch.bool, device=device))
        made.append(session.score(tree))
        path = torch.tensor([[0, 2], [0, 1]]).roll(i % 2, 0).to(device)
        ones = torch.ones(2, dtype=torch.long, device=device)
        session.commit(Verdict(path, ones, ones))
    return made


def test_recorded_trees_score_as_plain_ones_in_one_session_after_another() -> None:
    plain, target = random_target(), random_target()
    record = target.record = Counted()
    wanted = answers(plain)
    for _ in range(3):
        for ours, theirs in zip(answers(target), wanted, strict=True):
            # but for rounding: what is recorded reads whole buckets
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-12, rtol=0)
            for mine, other in zip(ours.taps, theirs.taps, strict=True):
                torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)
        gc.collect()
    assert record.recorded == 1


def test_two_sessions_at_once_never_share_a_cache() -> None:
    target = random_target()
    target.record = Tape()
    first, second = target.open(1, 20, Needs()), target.open(1, 20, Needs())
    assert first.cache is not second.cache
    taken = first.cache
    del first
    gc.collect()
    assert target.open(1, 24, Needs()).cache is taken


def test_what_was_returned_stays_when_the_next_forward_runs() -> None:
    target = random_target()
    target.record = Tape()
    first, second, *_ = answers(target)
    assert not torch.equal(first.logits, second.logits)


@dataclass(frozen=True)
class Some:
    sum: Tensor
    parts: tuple[Tensor, ...]
    nothing: Tensor | None = None


def test_outputs_of_any_make_are_filled_anew_from_new_inputs() -> None:
    record = Counted()
    captured = Captured(record, "it")
    memory = torch.zeros(3)

    def forward(inputs: Inputs) -> Some:
        memory.add_(inputs[0])
        total = memory + 1
        return Some(total.sum(), (total[1:], torch.stack((total, inputs[0])).amax(0)))

    one = captured.run(0, forward, (torch.tensor([1.0, 2.0, 3.0]),))
    memory.zero_()
    two = captured.run(0, forward, (torch.tensor([5.0, 0.0, 9.0]),))
    assert two.sum.item() == 17 and two.nothing is None
    assert [t.tolist() for t in two.parts] == [[1, 10], [6, 1, 10]]
    assert one.parts[0].data_ptr() != two.parts[0].data_ptr()
    assert record.recorded == 1


def test_what_is_no_input_stays_as_it_was_when_it_was_recorded() -> None:
    """As in a graph: a tape that ran the Python again would hide that a forward reads what it was not handed."""
    factor, shift = [2.0], torch.ones(1)
    captured = Captured(Tape(), "it")

    def forward(inputs: Inputs) -> Tensor:
        return inputs[0] * factor[0] + shift

    assert captured.run(0, forward, (torch.ones(1),)).item() == 3
    factor[0], shift = 9.0, torch.full((1,), 7.0)
    assert captured.run(0, forward, (torch.ones(1),)).item() == 3
    assert captured.run(1, forward, (torch.ones(1),)).item() == 16


def test_other_shapes_are_recorded_apart() -> None:
    record = Counted()
    captured = Captured(record, "it")
    for n in (1, 2, 1):
        assert captured.run(0, lambda inputs: inputs[0] * 2, (torch.ones(n),)).tolist() == [2] * n
    assert record.recorded == 2


def test_what_cannot_be_recorded_is_told_in_one_line() -> None:
    class Never(Record):
        def __call__(self, forward: Callable[[Inputs], T], inputs: Inputs) -> tuple[T, Replay]:
            raise Unrecorded("operation not permitted\nwhen stream is capturing")

    with pytest.raises(UserError) as told:
        Captured(Never(), "the draft").run(0, lambda inputs: inputs, (torch.ones(1),))
    assert str(told.value) == (
        "target.capture: the draft cannot be recorded as a CUDA graph "
        "(operation not permitted when stream is capturing); false"
    )


def test_capturing_needs_cuda() -> None:
    with pytest.raises(UserError, match=r"target\.capture: needs CUDA, the target is on cpu; false"):
        CudaRecord(torch.device("cpu"))


@pytest.mark.parametrize("_", [pytest.param(0, marks=CUDA)])
def test_cuda_graphs_score_as_plain_forwards(_: int) -> None:
    plain, target = random_target(dtype=torch.float32), random_target(dtype=torch.float32)
    for one in (plain, target):
        one.model.to("cuda")
    target.record = CudaRecord(target.device)
    for _session in range(2):
        for ours, theirs in zip(answers(target), answers(plain), strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        gc.collect()


def test_work_in_which_something_was_recorded_is_done_once_more() -> None:
    captured, given = Captured(Tape(), "it"), iter(range(9))

    def work() -> tuple[int, float]:
        return next(given), captured.run(0, lambda inputs: inputs[0] + 1, (torch.zeros(()),)).item()

    assert settled(work) == (1, 1.0)
    assert settled(work) == (2, 1.0), "nothing is left to record"
