"""Every way of proposing is lossless on the embedded target: 200 rounds each, in float32, greedy.

Heads are untrained and draft models undistilled, so most drafts are wrong and some are right, by chance or because the
text repeats itself; what is accepted is printed (``pytest -s``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from embedded_runs import Run, check_float32, run

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import read_conversations
from eagle3_lab.data.held_out import candidates
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.lookahead import Lookahead
from eagle3_lab.decode.propose.pld import PromptLookup
from eagle3_lab.decode.propose.sps import Lengths, SpeculativeSampling
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow, McSim7b63
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.interfaces import DraftModel, FeatureSource, Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Needs

pytestmark = pytest.mark.slow

ROUNDS, PROMPTS = 200, 16
TREE = DynamicTree(levels=4, width=4, budget=16)


@pytest.fixture(scope="module")
def prompts(embedded: HFTarget) -> list[list[int]]:
    """Held-out first questions, the shortest first."""
    found, _ = read_conversations("package:conversations")
    chat = Chat(embedded.tokenizer)
    first = [chat.prompt_ids(one.messages[:1]) for one in candidates(found, None).held_out]
    return sorted(first, key=len)[:PROMPTS]


@pytest.fixture(scope="module")
def vanilla(embedded: HFTarget, prompts: list[list[int]]) -> Callable[[int], Run]:
    """What plain decoding answers, asked once a prompt."""
    known: dict[int, Run] = {}

    def answer(number: int) -> Run:
        if number not in known:
            known[number] = run(embedded, Vanilla(), prompts[number])
        return known[number]

    return answer


def lookup(target: HFTarget) -> Proposer:
    return PromptLookup(3, 10, full=False)


def lookahead(target: HFTarget) -> Proposer:
    return Lookahead(end_tokens=target.spec.end_tokens)


def draft_model(target: HFTarget) -> Proposer:
    """The target's first layers, as they are before distillation."""
    draft = target.first_layers(6)
    return SpeculativeSampling(
        lambda rows, capacity: draft.open(rows, capacity, Needs(logits=True)),
        vocab=draft.spec.vocab,
        target_vocab=target.spec.vocab,
        max_positions=draft.spec.max_positions,
        lengths=Lengths(3, adaptive=True, longest=6),
        law=SamplingLaw(),
    )


def headed(
    source: Callable[[], FeatureSource], draft: Callable[[], DraftModel], grow: Grow, every: int = 6
) -> Callable[[HFTarget], Proposer]:
    """An untrained head that says every so many of the target's tokens."""

    def make(target: HFTarget) -> Proposer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made, head = source(), draft()
            head.build(target, made.build(target), torch.arange(target.spec.vocab)[::every])
        return Eagle(made.eval(), head.eval(), grow, target.spec.layers)

    return make


METHODS: dict[str, Callable[[HFTarget], Proposer]] = {
    "lookup": lookup,
    "lookahead": lookahead,
    "draft model": draft_model,
    "medusa": headed(TopFeature, lambda: Medusa(heads=4), TREE),
    "hydra": headed(TopFeature, lambda: Hydra(heads=4, num_layers=1), TREE),
    "hydra with prefix": headed(TopFeature, lambda: Hydra(heads=4, num_layers=1, prefix=True), TREE),
    "eagle": headed(TopFeature, Eagle1, McSim7b63(), every=1),
    "eagle, dynamic": headed(TopFeature, Eagle1, TREE, every=1),
    "eagle3": headed(FusedFeature, lambda: Eagle3(head="target"), TREE),
    "eagle3, chain": headed(FusedFeature, lambda: Eagle3(head="target"), Chain(7)),
}


@pytest.mark.parametrize("name", METHODS)
def test_two_hundred_rounds_say_what_vanilla_says(
    name: str, embedded: HFTarget, prompts: list[list[int]], vanilla: Callable[[int], Run]
) -> None:
    proposer = METHODS[name](embedded)
    made: list[Run] = []
    while sum(len(one.decoded.rounds) for one in made) < ROUNDS:
        assert len(made) < len(prompts), "prompts ran out before the rounds were made"
        made.append(run(embedded, proposer, prompts[len(made)]))
    expected = [vanilla(number) for number in range(len(made))]
    tally = check_float32(embedded, made, expected, proposer.nodes, name)
    assert len(tally.rounds) >= ROUNDS
