"""The decoder at temperature 1: its texts follow the target's law, and seeds and rows mean what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from decode_toys import PROMPTS, Drawing, Gullible, RandomFixed, ToyTarget, run, seeded, stepped, table
from torch import Tensor

from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.interfaces import Proposer, Verifier

VOCAB = 4
LOGITS = table(VOCAB, 0, scale=1.0)
DRAFT = table(VOCAB, 1, scale=1.0)[:VOCAB].softmax(-1)
LAW = SamplingLaw(1.0)

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "vanilla": Vanilla,
    "fixed tree": lambda: RandomFixed(VOCAB),
    "drawn chain": lambda: Drawing(DRAFT, (0, 0, 1, 2), True),
    "drawn siblings": lambda: Drawing(DRAFT, (0, 0, 0, 0, 1, 1), True),
    "drawn siblings without replacement": lambda: Drawing(DRAFT, (0, 0, 0, 0, 1, 1), False),
}


def texts_law(prompt: list[int], count: int) -> Tensor:
    """The exact law of the answer's first ``count`` tokens, one cell a text."""
    law = []
    for text in itertools.product(range(VOCAB), repeat=count):
        state = torch.tensor(0)
        for token in prompt:
            state = stepped(state, torch.tensor(token))
        weight = 1.0
        for token in text:
            weight *= LOGITS[state].softmax(-1)[token].item()
            state = stepped(state, torch.tensor(token))
        law.append(weight)
    return torch.tensor(law, dtype=torch.float64)


def p_value(proposer: Proposer, verifier: Verifier, rows: int = 2500, count: int = 3) -> float:
    """Chi-square of the first tokens of many answers to one prompt; cells expected below 5 are pooled."""
    prompt = PROMPTS[0]
    answers = run(ToyTarget(LOGITS), proposer, LAW, prompts=[prompt] * rows, max_new_tokens=count + 1,
                  seeds=range(rows), verifier=verifier)  # fmt: skip
    digits = VOCAB ** torch.arange(count - 1, -1, -1)
    seen = (torch.tensor([a.tokens[:count] for a in answers]) * digits).sum(1).bincount(minlength=VOCAB**count).double()
    expected = rows * texts_law(prompt, count)
    rare = expected < 5
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert len(expected) > 20
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


@pytest.mark.parametrize("name", PROPOSERS)
def test_texts_follow_the_targets_law_at_temperature_one(name: str) -> None:
    assert p_value(PROPOSERS[name](), ExactVerifier()) > 1e-3


def test_the_test_above_sees_a_verifier_that_is_not_exact() -> None:
    assert p_value(PROPOSERS["drawn chain"](), Gullible()) < 1e-6


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_seed_gives_the_same_text_whatever_was_decoded_before(name: str) -> None:
    proposer, verifier, law = PROPOSERS[name](), ExactVerifier(), SamplingLaw(0.9, top_p=0.95)
    first = run(ToyTarget(LOGITS), proposer, law, verifier=verifier)
    other = run(ToyTarget(LOGITS), proposer, law, verifier=verifier, seeds=(5, 6, 7), max_new_tokens=9)
    again = run(ToyTarget(LOGITS), proposer, law, verifier=verifier)
    assert first == again
    assert [a.tokens[:9] for a in first] != [a.tokens for a in other]


@pytest.mark.parametrize("name", [n for n in PROPOSERS if n != "fixed tree"])
def test_a_row_of_a_batch_is_the_text_of_that_row_alone(name: str) -> None:
    together = run(ToyTarget(LOGITS), PROPOSERS[name](), LAW, end_tokens=(2,), max_new_tokens=15, seeds=(11, 12, 13))
    assert len({len(a.tokens) for a in together}) > 1
    for b, prompt in enumerate(PROMPTS):
        (alone,) = run(ToyTarget(LOGITS), PROPOSERS[name](), LAW, prompts=[prompt], end_tokens=(2,), max_new_tokens=15,
                       seeds=(11 + b,))  # fmt: skip
        assert alone == together[b]


def test_seeds_differ() -> None:
    answers = run(ToyTarget(LOGITS), Vanilla(), LAW, prompts=[PROMPTS[0]] * 8, seeds=range(8))
    assert len({a.tokens for a in answers}) == 8
    assert torch.rand(1, generator=seeded(1)) != torch.rand(1, generator=seeded(2))
