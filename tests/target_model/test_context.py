"""The target's context, however a family names it, and decoding that ends where it ends."""

from __future__ import annotations

import pytest
import torch
from random_targets import random_target
from transformers import GPT2Config, GPT2LMHeadModel

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.lookahead import Lookahead
from eagle3_lab.decode.propose.pld import PromptLookup
from eagle3_lab.decode.propose.sps import Lengths, SpeculativeSampling
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow, Medusa63
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.interfaces import DraftModel, FeatureSource, Proposer
from eagle3_lab.target_model.decodable import NO_LIMIT, max_positions
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe
from eagle3_lab.types import Needs

CONTEXT = 64


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """A GPT-2, whose positions are rows of a table: one too many is an IndexError."""
    config = GPT2Config(
        n_positions=CONTEXT, vocab_size=97, n_embd=32, n_layer=8, n_head=4, bos_token_id=1, eos_token_id=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
    return HFTarget(model, None, describe(model, None, "gpt2"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "n_positions"),
        ("gptj", "n_positions"),
        ("codegen", "n_positions"),
        ("gpt_bigcode", "n_positions"),
        ("ctrl", "n_positions"),
        ("opt", "max_position_embeddings"),
        ("biogpt", "max_position_embeddings"),
        ("llama", "max_position_embeddings"),
    ],
)
def test_the_context_is_read_under_the_name_that_the_family_gives_it(kind: str, name: str) -> None:
    sizes = {"rotary_dim": 4} if kind in ("gptj", "codegen") else {}
    model = random_target(kind, max_position_embeddings=40, num_hidden_layers=1, **sizes).model
    assert model.config.to_dict()[name] == 40
    assert max_positions(model) == 40


@pytest.mark.parametrize("name", ["n_ctx", "max_sequence_length", "max_seq_len", "seq_length"])
def test_a_name_beside_the_usual_one_counts_where_it_is_less(name: str) -> None:
    model = random_target("llama", num_hidden_layers=1).model
    setattr(model.config, name, 48)
    assert max_positions(model) == 48
    setattr(model.config, name, 10**6)
    assert max_positions(model) == 256


def test_a_table_of_positions_counts_whatever_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("gpt2", "biogpt"):  # biogpt's table has two rows more, before its first position
        model = random_target(kind, num_hidden_layers=1).model
        model.config.max_position_embeddings = 10**6
        assert max_positions(model) == 256
    model = random_target("llama", num_hidden_layers=1).model
    monkeypatch.setattr(type(model.config), "to_dict", lambda _: {})
    assert max_positions(model) == NO_LIMIT


def head(target: HFTarget, source: FeatureSource, draft: DraftModel, grow: Grow) -> Proposer:
    draft.build(target, source.build(target), torch.arange(97))
    return Eagle(source, draft, grow, target.spec.layers, target.spec.max_positions)


def proposers(target: HFTarget) -> dict[str, Proposer]:
    """One of every kind; GPT-2 has no rotary embedding that a draft could take over."""
    tree, first = DynamicTree(levels=5, width=3, budget=12), target.first_layers(1).eval()
    return {
        "vanilla": Vanilla(),
        "prompt lookup": PromptLookup(3, 10, full=False),
        "lookahead": Lookahead(7, 5, 7, end_tokens=()),
        "draft lm": SpeculativeSampling(
            lambda rows, capacity: first.open(rows, capacity, Needs(logits=True)),
            vocab=97,
            target_vocab=97,
            max_positions=target.spec.max_positions,
            lengths=Lengths(5, True, 12),
            law=SamplingLaw(),
        ),
        "medusa": head(target, TopFeature(), Medusa(4), Medusa63()),
        "hydra": head(target, TopFeature(), Hydra(4), Medusa63()),
        "eagle": head(target, TopFeature(), Eagle1(rope_base=1e4), Chain(5)),
        "eagle tree": head(target, TopFeature(), Eagle1(rope_base=1e4), tree),
        "eagle 3": head(target, FusedFeature(), Eagle3(rope_base=1e4), tree),
        "eagle 3 chain": head(target, FusedFeature(), Eagle3(rope_base=1e4), Chain(8)),
    }


def test_every_method_ends_with_the_context_at_the_same_token(target: HFTarget) -> None:
    """Sixty tokens of a context of 64 leave room for four; the last is never read."""
    assert target.spec.max_positions == CONTEXT
    prompt = torch.tensor([[3, 4, 5] * 20])
    answers = {}
    for name, proposer in proposers(target).items():
        (one,) = decode(
            target.open(1, CONTEXT + 80, proposer.needs | Needs(logits=True)),
            proposer,
            SamplingLaw(),
            ExactVerifier(),
            prompt,
            torch.tensor([60]),
            max_new_tokens=16,
            end_tokens=(),
            context_limit=target.spec.max_positions,
            generators=[torch.Generator()],
        )
        assert (len(one.tokens), one.ended) == (4, "context"), name
        answers[name] = one.tokens
    assert set(answers.values()) == {answers["vanilla"]}
