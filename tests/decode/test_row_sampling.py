"""Draws: never a token of probability zero, top-p as transformers has it, and sums over any vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from eagle3_lab.decode import sampling


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros before, between and behind, at the smallest and the largest uniform there are."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.3, -torch.inf], [-1e4, -1e4, 2.0, -1e4, -1e4]])
    generators = [torch.Generator(), torch.Generator()]
    for uniform, expected in ((0.0, [1, 2]), (1 - 2.0**-53, [3, 2])):
        monkeypatch.setattr(torch, "rand", lambda *a, u=uniform, **k: torch.tensor([u], dtype=torch.float64))
        assert sampling.draw(logits, 0.7, generators).tolist() == expected
        assert sampling.draw(logits.double(), 0.7, generators).tolist() == expected


def test_a_draw_is_the_first_token_up_to_which_the_sum_exceeds_the_uniform_number() -> None:
    """By a plain running sum over vocabularies below, at and beyond whole blocks, zeros in them."""
    draw = torch.Generator().manual_seed(0)
    for vocab in (1, 5, sampling.BLOCK, sampling.BLOCK + 1, 3 * sampling.BLOCK + 7):
        probs = torch.rand(200, vocab, generator=draw).masked_fill(torch.rand(200, vocab, generator=draw) < 0.3, 0.0)
        probs[:, -1] += 0.1
        uniform = torch.rand(200, 1, dtype=torch.float64, generator=draw)
        upto = probs.double().cumsum(-1)
        index, total = sampling.pick(probs, uniform)
        assert torch.equal(index[:, 0], (upto <= uniform * upto[:, -1:]).sum(-1))
        torch.testing.assert_close(total, upto[:, -1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_tokens_that_transformers_keeps(top_p: float) -> None:
    logits = torch.randn(40, 23, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(40, 1, dtype=torch.long), logits)
    kept = sampling.keep_top_p(logits.softmax(-1), top_p)
    assert torch.equal(kept > 0, theirs > -torch.inf)


def sorted_whole(probs: Tensor, top_p: float) -> Tensor:
    """The rule in full: all tokens in ascending order, the least likely ones dropped up to 1 - top_p."""
    ascending, order = probs.sort(dim=-1, stable=True)
    drop = ascending.cumsum(-1) <= 1 - top_p
    drop[..., -1] = False
    return probs.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), 0.0)


def test_top_p_is_the_whole_sort_however_many_tokens_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at 2, 8, 32 ... tokens first, rows that are peaked and flat in one batch. All probabilities are multiples
    of a power of two, many of them equal, so that sums are exact and ties fall on the border."""
    monkeypatch.setattr(sampling, "LIKELIEST", 2)
    monkeypatch.setattr(sampling, "MORE", 4)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for vocab in (1, 2, 3, 40, 200):
            parts = torch.randint(0, 5, (300, vocab), generator=generator)
            parts[::3] = torch.randint(0, 2, (100, vocab), generator=generator)
            parts[:, 0] += 1024 - parts.sum(-1)
            parts[::2] = parts[::2].flip(-1)
            probs = (parts / 1024).to(dtype)
            for top_p in (1 / 1024, 0.25, 0.5, 0.75, 1 - 2 / 1024, 1 - 2**-20):
                assert torch.equal(sampling.keep_top_p(probs, top_p), sorted_whole(probs, top_p)), (vocab, top_p)


def test_of_equally_likely_tokens_top_p_keeps_the_last() -> None:
    flat = torch.full((2, 1024), 2.0**-10)
    kept = sampling.keep_top_p(flat, 0.25)
    assert torch.equal(kept[0].nonzero()[:, 0], torch.arange(768, 1024))
    assert torch.equal(kept, sorted_whole(flat, 0.25))


def test_top_p_leaves_a_row_that_is_nan_to_be_told() -> None:
    probs = torch.tensor([[torch.nan, 0.5, 0.5], [0.2, 0.7, 0.1]])
    kept = sampling.keep_top_p(probs, 0.5)
    assert kept[0].isnan().any() and kept[1].tolist() == pytest.approx([0.0, 0.7, 0.0])
    logits = torch.tensor([[torch.nan, 0.5, 0.5], [0.2, 70.0, 0.1]])
    assert sampling.draw(logits, 1.0, [None, None], top_p=0.5).tolist() == [sampling.PADDING, 1]
