"""The EAGLE head on the target's top state through the same proposer: lossless, and the hit table's decoder."""

from __future__ import annotations

import pytest
import torch
from test_eagle_proposer import DEPTH, VOCAB, answer, packed, prompts, tiny_target

from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.features import TopFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.hit_reading import read_hits
from eagle3_lab.training.loss.terms import SmoothL1, SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization
from eagle3_lab.types import Needs


def train(unroll: Unroll, judged_depth: int | None = None) -> tuple[HFTarget, DraftModule]:
    """A head that learned a little of the target's greedy answers, so that acceptance is neither 0 nor 1."""
    target = tiny_target()
    greedy = [(p, answer(target, Vanilla(), p, SamplingLaw()).tokens) for p in prompts(24)]
    source, draft = TopFeature(), Eagle1()
    draft.build(target, source.build(target), torch.arange(VOCAB))
    loss = UnrolledLoss([SmoothL1(1.0), SoftCE(0.1)], step_decay=1.0)
    module = DraftModule(target, source, draft, unroll, loss, Optimization(), judged_depth=judged_depth).double()
    batch = packed(greedy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        module.run(batch)[0].total.backward()
        optimizer.step()
    return target, module.eval()


@pytest.fixture(scope="module")
def trained() -> tuple[HFTarget, DraftModule]:
    """By HASS."""
    return train(Unroll(DEPTH, detach=True))


def test_the_feature_that_the_proposer_taps_is_the_heads_input(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    needs = Eagle(module.source, module.draft, Chain(2), target.spec.layers).needs | Needs(logits=True)
    ids = torch.tensor([prompts(1)[0]])
    out = target.open(1, 16, needs).prefill(ids, torch.tensor([4]))
    assert needs.layers == (target.spec.layers,)
    torch.testing.assert_close(target.logits(out.taps[0][:, -1:]), out.logits)


@pytest.mark.parametrize("grow", [Chain(DEPTH), DynamicTree(levels=4, width=3, budget=12)])
def test_greedy_answers_are_vanillas(trained: tuple[HFTarget, DraftModule], grow: Grow) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, grow, target.spec.layers)
    accepted = 0
    for prompt in prompts(12, first=24):
        made = answer(target, proposer, prompt, SamplingLaw())
        assert made.tokens == answer(target, Vanilla(), prompt, SamplingLaw()).tokens
        accepted += sum(r.accepted for r in made.rounds)
    assert accepted > 10, "a head that is never right shows nothing"


@pytest.mark.parametrize(
    ("depth", "judged"),
    [(DEPTH, DEPTH), (1, 7), (3, 2)],
    ids=["as trained", "deeper than one step", "shallower"],
)
def test_the_walked_hit_table_is_the_chain_decoder_integer_for_integer(depth: int, judged: int) -> None:
    target, module = train(Unroll(depth, detach=True), judged)
    proposer = Eagle(module.source, module.draft, Chain(judged), target.spec.layers)
    asked = prompts(16, first=24)
    decoded = [answer(target, proposer, p, SamplingLaw()) for p in asked]
    reading = read_hits(module, [packed([(p, d.tokens) for p, d in zip(asked, decoded, strict=True)])])
    assert [[(r.judged, r.accepted, r.emitted) for r in rounds] for rounds in reading.answers] == [
        [(r.judged, r.accepted, r.emitted) for r in d.rounds] for d in decoded
    ]
    counted = Acceptance.of((r for d in decoded for r in d.rounds), judged)
    assert (reading.visited.judged, reading.visited.accepted) == (counted.judged, counted.accepted)
    assert (reading.visited.rounds, reading.visited.emitted) == (counted.rounds, counted.emitted)
    assert sum(counted.accepted) > 10
    assert counted.accepted[min(judged, 2) - 1] > 0, "nothing beyond the first draft shows no feedback"
