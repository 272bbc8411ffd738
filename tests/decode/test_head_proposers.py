"""Medusa's and Hydra's heads through the same proposer: lossless, and the hit table's decoder."""

from __future__ import annotations

import pytest
import torch
from test_eagle_proposer import VOCAB, answer, packed, prompts, tiny_target

from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow, Medusa63
from eagle3_lab.draft.features import TopFeature
from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import DraftModel
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.hit_reading import read_hits
from eagle3_lab.training.loss.terms import TokenCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization

HEADS = 4


@pytest.fixture(scope="module", params=["medusa", "hydra", "hydra with a prefix layer"])
def trained(request: pytest.FixtureRequest) -> tuple[HFTarget, DraftModule]:
    return trained_heads(request.param)


def trained_heads(kind: str) -> tuple[HFTarget, DraftModule]:
    """Heads trained a little on the target's greedy answers."""
    torch.manual_seed(0)
    target = tiny_target()
    greedy = [(p, answer(target, Vanilla(), p, SamplingLaw()).tokens) for p in prompts(24)]
    kinds: dict[str, DraftModel] = {"medusa": Medusa(HEADS), "hydra": Hydra(HEADS, num_layers=2)}
    source, draft = TopFeature(), kinds.get(kind, Hydra(HEADS, prefix=True))
    draft.build(target, source.build(target), torch.arange(VOCAB))
    loss = UnrolledLoss([TokenCE()], step_decay=1.0, mask="predicted")
    module = DraftModule(target, source, draft, Unroll(HEADS), loss, Optimization()).double()
    batch, optimizer = packed(greedy), torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        module.run(batch)[0].total.backward()
        optimizer.step()
    return target, module.eval()


@pytest.mark.parametrize("grow", [Chain(HEADS), Medusa63(), DynamicTree(levels=3, width=3, budget=10)])
def test_greedy_answers_are_vanillas(trained: tuple[HFTarget, DraftModule], grow: Grow) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, grow, target.spec.layers)
    accepted = 0
    for prompt in prompts(12, first=24):
        made = answer(target, proposer, prompt, SamplingLaw())
        assert made.tokens == answer(target, Vanilla(), prompt, SamplingLaw()).tokens
        accepted += sum(r.accepted for r in made.rounds)
    assert accepted > 5, "heads that are never right show nothing"


def test_the_walked_hit_table_is_the_chain_decoder_integer_for_integer(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, Chain(HEADS), target.spec.layers)
    asked = prompts(16, first=24)
    decoded = [answer(target, proposer, p, SamplingLaw()) for p in asked]
    reading = read_hits(module, [packed([(p, d.tokens) for p, d in zip(asked, decoded, strict=True)])])
    assert [[(r.judged, r.accepted, r.emitted) for r in rounds] for rounds in reading.answers] == [
        [(r.judged, r.accepted, r.emitted) for r in d.rounds] for d in decoded
    ]


def test_more_steps_than_heads_are_refused(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    with pytest.raises(ValueError, match="a tree of 5 levels needs as many heads, the draft has 4"):
        Eagle(module.source, module.draft, Chain(5), target.spec.layers)
    with pytest.raises(ValueError, match="unroll.depth must be <= 4, as many heads as the draft has, got 5"):
        DraftModule(target, module.source, module.draft, Unroll(5), module.loss, Optimization())
