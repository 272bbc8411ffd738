"""Nothing in a round but the one read makes the host wait: run with CUDA's own check where there is CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from eagle3_lab.decode.block import block
from eagle3_lab.decode.grow import DynamicTree, McSim7b63
from eagle3_lab.decode.growth import Grow
from eagle3_lab.decode.law import SamplingLaw
from eagle3_lab.decode.trie import cut, merge, root_only
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.types import Tree

VOCAB = 50
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Any host synchronisation inside raises RuntimeError, where the device is one that can be waited for."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def grown(grow: Grow, root: torch.Tensor, log_q: torch.Tensor, vocab: torch.Tensor) -> Tree:
    growth = grow.begin()
    frontier = growth.expand(log_q[:, :1])
    while frontier is not None:
        frontier = growth.expand(log_q[:, : frontier.tokens.shape[1]])
    return growth.finish().tree(root, vocab)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("generators_on", ["cpu", CUDA])
def test_a_round_never_waits_for_the_device(device: str, drawn: bool, generators_on: str) -> None:
    batch = 3
    generators = [torch.Generator(generators_on).manual_seed(b) for b in range(batch)]
    root, vocab = torch.arange(batch, device=device), torch.arange(VOCAB, device=device)
    log_q = torch.randn(batch, 10, VOCAB, device=device).log_softmax(-1)
    ids = torch.full((batch, 9), -1, device=device)
    ends, remaining = torch.arange(30, device=device), torch.full((batch,), 5, device=device)
    room = torch.tensor([1, 2, 9], device=device)
    law = SamplingLaw(0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    for grow in (McSim7b63(), DynamicTree(levels=8, width=10, budget=60)):
        grown(grow, root, log_q, vocab)  # a static tree's index tensors are made once
        logits = torch.randn(batch, grow.nodes, VOCAB, device=device)
        with no_waiting(device):
            tree = merge(cut(grown(grow, root, log_q, vocab), room))
            if drawn:
                tree = Tree(tree.tokens, tree.parents, tree.candidate, logits.roll(1, 0).softmax(-1), replacement=False)
            verdict = ExactVerifier()(law.probs(logits, ids, tree), tree, generators)
            piece = block(tree, verdict, ends, remaining)
            root_only(piece.verdict.bonus, grow.nodes)
        assert piece.tokens.shape == (batch, grow.nodes)
        assert ((piece.emitted >= 1) & (piece.emitted <= 5)).all()
