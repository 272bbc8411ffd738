"""Sliding windows: put into our mask over a full-length cache, against the models' own generation."""

from __future__ import annotations

import pytest
import torch
from random_targets import random_target

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.pld import PromptLookup
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.probe import probe
from eagle3_lab.target_model.windows import FULL, SLIDING, Windows
from eagle3_lab.types import Batch, Needs

WINDOW, ANSWER = 6, 20
MIXED = {"layer_types": [SLIDING, FULL, SLIDING, FULL]}
HEADS = {"head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES = [
    ("mistral", {}, "sdpa"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sdpa"),
    ("qwen3", {"use_sliding_window": True, "head_dim": 8, **MIXED}, "sdpa"),
    ("gemma2", {**HEADS, **MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}, "eager"),
    ("gemma3_text", {**HEADS, **MIXED}, "sdpa"),
]


def test_a_window_by_hand() -> None:
    """Three committed tokens, then two nodes of one depth: by position, not by slot."""
    visible = torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]]).bool()
    key, query = torch.tensor([[0, 1, 2, 3, 3]]), torch.tensor([[3, 3]])
    mask = Windows(3).masks(visible, query, key, torch.float32)
    assert isinstance(mask, torch.Tensor)
    assert (mask[0, 0] == 0).tolist() == [[False, True, True, True, False], [False, True, True, False, True]]
    both = Windows(3, by_type=True).masks(visible, query, key, torch.float32)
    assert isinstance(both, dict)
    assert both[SLIDING].equal(mask)
    assert both[FULL].equal(Windows().masks(visible, query, key, torch.float32))


def windowed(kind: str, more: dict[str, object], attention: str) -> HFTarget:
    return random_target(kind, attention=attention, **({"sliding_window": WINDOW} | more))


@pytest.mark.parametrize(("kind", "more", "attention"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_answers_are_the_models_own(kind: str, more: dict[str, object], attention: str) -> None:
    target = windowed(kind, more, attention)
    assert target.window is not None
    assert probe(target) < 1e-5
    prompt = torch.randint(2, 97, (1, 12), generator=torch.Generator().manual_seed(3))
    made = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
    )
    wanted = made[0, 12:].tolist()
    assert answer(target, Vanilla(), prompt) == wanted
    assert answer(target, PromptLookup(1, 3, full=False), prompt) == wanted


@pytest.mark.parametrize(("kind", "more", "attention"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_features_of_a_packed_row_are_those_of_each_document(
    kind: str, more: dict[str, object], attention: str
) -> None:
    target = windowed(kind, more, attention)
    texts = [torch.randint(2, 97, (1, n), generator=torch.Generator().manual_seed(n)) for n in (15, 11)]
    position = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    document = torch.cat([torch.full_like(t, i) for i, t in enumerate(texts)], dim=1)
    ids = torch.cat(texts, dim=1)
    out = target.features(Batch(ids, ids > 0, position, document), Needs(logits=True))
    apart = torch.cat([target.model(t).logits for t in texts], dim=1)
    torch.testing.assert_close(out.logits, apart, atol=5e-5, rtol=1e-4)


def test_a_window_left_out_of_the_mask_does_not_pass_the_probe() -> None:
    target = windowed("mistral", {}, "sdpa")
    target._windows = Windows(10_000)
    with pytest.raises(UserError, match="cannot be decoded by trees"):
        probe_with_window(target, WINDOW)


def probe_with_window(target: HFTarget, width: int) -> float:
    """The probe reads a prompt longer than the window that the target says it has."""
    kind = type("Told", (type(target),), {"window": property(lambda _: width)})
    target.__class__ = kind
    return probe(target)


def answer(target: HFTarget, proposer: Proposer, prompt: torch.Tensor) -> list[int]:
    session = target.open(1, prompt.shape[1] + ANSWER + proposer.nodes + 1, Needs(logits=True))
    (made,) = decode(
        session,
        proposer,
        SamplingLaw(),
        ExactVerifier(),
        prompt,
        torch.tensor([prompt.shape[1]]),
        max_new_tokens=ANSWER,
        end_tokens=[],
        context_limit=256,
        generators=[torch.Generator()],
    )
    return list(made.tokens)
