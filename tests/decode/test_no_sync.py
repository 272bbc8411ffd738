"""Nothing in a round but the one read makes the host wait: run with CUDA's own check where there is CUDA.

Where there is none the meta device checks it: its tensors hold nothing, so whoever reads one raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from random_targets import random_target
from torch import nn

from eagle3_lab.backend.cuda_graphs import CudaRecord, Record, Tape
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.lookahead import Lookahead
from eagle3_lab.decode.propose.pld import PromptLookup
from eagle3_lab.decode.propose.sps import Lengths, SpeculativeSampling
from eagle3_lab.decode.rounds import block
from eagle3_lab.decode.sampled_trees import DrawnTree
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_growth import Grow
from eagle3_lab.decode.tree_shapes import DynamicTree, McSim7b63
from eagle3_lab.decode.trees import cut, merge, root_only
from eagle3_lab.decode.verify import ExactVerifier, Uniforms
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.kv_cache import KVCache
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Needs, TargetOut, Tree

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


def record_for(device: str) -> Record:
    return CudaRecord(torch.device(device)) if device == "cuda" else Tape()


def grown(grow: Grow, root: torch.Tensor, log_q: torch.Tensor, vocab: torch.Tensor) -> Tree:
    growth = grow.begin()
    frontier = growth.expand(log_q[:, :1])
    while frontier is not None:
        frontier = growth.expand(log_q[:, : frontier.tokens.shape[1]])
    return growth.finish().tree(root, vocab)


@pytest.mark.parametrize("device", ["cpu", "meta", CUDA])
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
        assert device == "meta" or ((piece.emitted >= 1) & (piece.emitted <= 5)).all()


@pytest.mark.parametrize("device", ["cpu", "meta", CUDA])
@pytest.mark.parametrize("replacement", [False, True])
def test_drawing_a_tree_never_waits_for_the_device(device: str, replacement: bool) -> None:
    batch, kept = 3, VOCAB - 7
    streams = [torch.Generator().manual_seed(b) for b in range(batch)]
    grow = DrawnTree(McSim7b63(), SamplingLaw(0.8, top_k=20, top_p=0.9, min_p=0.01), VOCAB, replacement)
    root, vocab = torch.arange(batch, device=device), torch.arange(kept, device=device) + 7
    log_q = torch.randn(batch, 4, kept, device=device).log_softmax(-1)
    logits, ids = torch.randn(batch, grow.nodes, VOCAB, device=device), torch.full((batch, 9), -1, device=device)
    for warm in (False, True):  # index tensors are made once
        with no_waiting(device) if warm else nullcontext():
            growth = grow.begin(Uniforms.draw(streams, grow.draws, root.device))
            frontier = growth.expand(log_q[:, :1])
            while frontier is not None:
                frontier = growth.expand(log_q[:, : frontier.tokens.shape[1]])
            tree = growth.finish().tree(root, vocab)
            verdict = ExactVerifier()(SamplingLaw(1.0).probs(logits, ids, tree), tree, streams)
        assert tree.q is not None and tree.q.shape == (batch, 26, VOCAB)
        assert verdict.path.shape == (batch, 26)


@pytest.mark.parametrize("device", ["cpu", "meta", CUDA])
@pytest.mark.parametrize("name", ["lookup", "lookahead", "draft LM, greedy", "draft LM, drawn", "draft LM, recorded"])
def test_proposers_without_a_head_never_wait_for_the_device(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup, Lookahead, and a second language model that drafts: the second round, when all memory is there
    and Lookahead's window is full."""
    draft = random_target(dtype=torch.float32)
    draft.model.to(device)
    if name == "draft LM, recorded":
        draft.record = record_for(device)
    proposer = {
        "lookup": PromptLookup(3, 4),
        "lookahead": Lookahead(3, 3, 2, end_tokens=(0,)),
        "draft LM, greedy": drafting(draft, SamplingLaw()),
        "draft LM, drawn": drafting(draft, SamplingLaw(0.8, top_k=20)),
        "draft LM, recorded": drafting(draft, SamplingLaw()),
    }[name]
    vocab = draft.spec.vocab
    prompt = torch.randint(vocab, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([9, 6], device=device)
    generators = [torch.Generator().manual_seed(b) for b in range(2)]
    logits = torch.randn(2, proposer.nodes, vocab, device=device)
    ends, remaining = torch.arange(3, device=device), torch.full((2,), 50, device=device)
    ids, root = torch.full((2, 9), -1, device=device), prompt[:, 0].clone()
    with monkeypatch.context() as patch:
        if device == "meta":
            patch.setattr(KVCache, "settle", lambda _: None)  # a prompt's own read
        proposer.start(prompt, lengths, TargetOut(), 100, generators)
    for warm in (False, True):
        with no_waiting(device) if warm else nullcontext():
            tree = proposer.propose(root)
            verdict = ExactVerifier()(SamplingLaw().probs(logits, ids, tree), tree, generators)
            piece = block(tree, verdict, ends, remaining)
            proposer.observe(tree, piece.verdict, TargetOut(logits=logits))
            root = piece.verdict.bonus
        assert tree.tokens.shape == (2, proposer.nodes)
        assert device == "meta" or (piece.emitted >= 1).all()


def drafting(draft: HFTarget, law: SamplingLaw) -> SpeculativeSampling:
    vocab = draft.spec.vocab
    return SpeculativeSampling(
        lambda rows, capacity: draft.open(rows, capacity, Needs(logits=True)),
        vocab=vocab,
        target_vocab=vocab,
        max_positions=draft.spec.max_positions,
        lengths=Lengths(3, adaptive=True, longest=4),
        law=law,
    )


@pytest.mark.parametrize("device", ["cpu", "meta", CUDA])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("grow", [DynamicTree(levels=3, width=3, budget=9), McSim7b63()])
def test_a_head_never_waits_for_the_device(device: str, grow: Grow, recorded: bool) -> None:
    """The third round, when a round of its kind has been recorded."""
    target = random_target(dtype=torch.float32)
    source, draft = FusedFeature(), Eagle3()
    draft.build(target, source.build(target), torch.arange(5, 97))
    for module in (target.model, source, draft):
        nn.Module.to(module, device)
    eagle = Eagle(source, draft, grow, target.spec.layers, record=record_for(device) if recorded else None)
    prompt = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([9, 6], device=device)
    shown = {
        n: TargetOut(tuple(torch.randn(2, n, 32, device=device) for _ in eagle.needs.layers)) for n in (9, eagle.nodes)
    }
    logits = torch.randn(2, eagle.nodes, 97, device=device)
    ends, remaining = torch.arange(3, device=device), torch.full((2,), 50, device=device)
    ids, root = torch.full((2, 9), -1, device=device), prompt[:, 0].clone()
    generators = [torch.Generator().manual_seed(b) for b in range(2)]
    eagle.start(prompt, lengths, shown[9], 100, generators)
    for i in range(3):
        with no_waiting(device) if i == 2 else nullcontext():
            tree = eagle.propose(root)
            verdict = ExactVerifier()(SamplingLaw().probs(logits, ids, tree), tree, generators)
            piece = block(tree, verdict, ends, remaining)
            eagle.observe(tree, piece.verdict, shown[eagle.nodes])
            root = piece.verdict.bonus
    assert tree.tokens.shape == (2, eagle.nodes)
