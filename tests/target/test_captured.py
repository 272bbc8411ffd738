"""Recorded forwards: inputs are copied in, outputs copied out, and a cache's recordings serve session after session.

On a CPU a stand-in records: like a graph it reads and writes memory of its own, whatever it is called with.
"""

from __future__ import annotations

import gc

import pytest
import torch
from random_targets import random_target

from eagle3_lab.errors import UserError
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.target.captured import Captured, CudaRecord, Forward, Inputs, Replay
from eagle3_lab.types import Needs, TargetOut, Tree, Verdict

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


class Standin:
    """Runs the forward anew at each replay, from its own inputs into its own outputs."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, forward: Forward, inputs: Inputs) -> tuple[TargetOut, Replay]:
        self.recorded += 1
        out = forward(inputs)

        def replay() -> None:
            fresh = forward(inputs)
            for mine, new in zip((*out.taps, out.logits), (*fresh.taps, fresh.logits), strict=True):
                mine.copy_(new)

        return out, replay


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
    record = target._record = Standin()
    wanted = answers(plain)
    for _ in range(3):
        for ours, theirs in zip(answers(target), wanted, strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=0, rtol=0)
            for mine, other in zip(ours.taps, theirs.taps, strict=True):
                torch.testing.assert_close(mine, other, atol=0, rtol=0)
        gc.collect()
    assert record.recorded == 1


def test_two_sessions_at_once_never_share_a_cache() -> None:
    target = random_target()
    target._record = Standin()
    first, second = target.open(1, 20, Needs()), target.open(1, 20, Needs())
    assert first.cache is not second.cache
    taken = first.cache
    del first
    gc.collect()
    assert target.open(1, 24, Needs()).cache is taken


def test_what_was_returned_stays_when_the_next_forward_runs() -> None:
    target = random_target()
    target._record = Standin()
    first, second, *_ = answers(target)
    assert not torch.equal(first.logits, second.logits)


def test_other_shapes_are_recorded_apart() -> None:
    record = Standin()
    captured = Captured(record)
    for n in (1, 2, 1):
        captured.run(0, lambda inputs: TargetOut(logits=inputs[0][None, :, None] * 2), (torch.ones(n),))
    assert record.recorded == 2


def test_capturing_needs_cuda() -> None:
    plain = random_target()
    with pytest.raises(UserError, match=r"target\.capture: needs CUDA, the target is on cpu"):
        HFTarget(plain.model, None, plain.spec, capture=True)


@pytest.mark.parametrize("_", [pytest.param(0, marks=CUDA)])
def test_cuda_graphs_score_as_plain_forwards(_: int) -> None:
    plain, target = random_target(dtype=torch.float32), random_target(dtype=torch.float32)
    for one in (plain, target):
        one.model.to("cuda")
    target._record = CudaRecord()
    for _session in range(2):
        for ours, theirs in zip(answers(target), answers(plain), strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        gc.collect()
