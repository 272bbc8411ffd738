"""A target of a few tensors, tiny heads on it, and the simplest context that can decode."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from laws import Growing
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.llama import plain_rotary
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Context, FrozenTarget
from eagle3_lab.types import PADDING, Batch, DraftOut, Rotary, TargetSpec


class StubTarget(FrozenTarget):
    """An embedding, a head and a rotary base; no body."""

    def __init__(self, spec: TargetSpec, embedding: Tensor, head: Tensor, rope_base: float = 10000.0) -> None:
        self.spec, self.embedding, self.head, self.rope_base = spec, embedding, head, rope_base

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def logits(self, top: Tensor) -> Tensor:
        return top @ self.head.T

    def head_rows(self, ids: Tensor) -> Tensor:
        return self.head[ids]

    def rotary(self, head_dim: int | None = None) -> Rotary:
        return plain_rotary(self.rope_base, head_dim or self.spec.head_dim)


class Lab(NamedTuple):
    """Everything a training step needs, on random tensors."""

    target: FrozenTarget
    source: FusedFeature
    draft: Eagle3
    vocab: Tensor

    def taps(self, batch: Batch, seed: int = 1) -> tuple[tuple[Tensor, ...], Tensor]:
        """Random taps and top state of the batch's tokens, each a function of token and position alone."""
        draw = torch.Generator().manual_seed(seed)
        table = torch.randn(self.target.spec.vocab, 4 * self.target.spec.hidden, generator=draw).double()
        place = torch.randn(64, 4 * self.target.spec.hidden, generator=draw).double()
        low, mid, high, top = (table[batch.ids] + place[batch.position]).chunk(4, dim=-1)
        return (low, mid, high), top

    def unrolled(self, batch: Batch, unroll: Unroll) -> list[DraftOut]:
        return list(unroll(self.draft, self.source(self.taps(batch)[0]), batch))

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.source.named_parameters()) | dict(self.draft.named_parameters())


TINY = TargetSpec(
    name="tiny",
    hidden=12,
    intermediate=20,
    layers=8,
    heads=4,
    kv_heads=2,
    head_dim=6,
    vocab=23,
    rms_eps=1e-5,
    max_positions=64,
    end_tokens=(2,),
)


@pytest.fixture
def make_lab() -> Callable[..., Lab]:
    """Build a random target in float64 and an untrained head on it."""

    def make(
        draft: Eagle3 | None = None,
        vocab_size: int = 9,
        seed: int = 0,
        vocab: int = TINY.vocab,
        width: int | None = None,
    ) -> Lab:
        torch.manual_seed(seed)
        spec = dataclasses.replace(TINY, vocab=vocab)
        target = StubTarget(
            spec, torch.randn(spec.vocab, spec.hidden).double(), torch.randn(spec.vocab, spec.hidden).double()
        )
        kept = torch.randperm(spec.vocab)[:vocab_size].sort().values
        source = FusedFeature(width=width)
        head = Eagle3() if draft is None else draft
        head.build(target, source.build(target), kept)
        return Lab(target, source.double(), head.double(), kept)

    return make


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Pack random documents into rows: ``make([(7, 3), (5, 2)], length=14)`` is one row of a document of 7 tokens, of
    which all from the 3rd on are supervised, one of 5, and two padding rows."""

    def make(*rows: list[tuple[int, int]], length: int, vocab: int = 23, seed: int = 0) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        shape = (len(rows), length)
        ids = torch.randint(vocab, shape, generator=draw)
        supervised = torch.zeros(shape, dtype=torch.bool)
        position = torch.zeros(shape, dtype=torch.int64)
        document = torch.full(shape, PADDING)
        for b, documents in enumerate(rows):
            begin = 0
            for number, (size, prompt) in enumerate(documents):
                here = slice(begin, begin + size)
                supervised[b, begin + prompt : begin + size] = True
                position[b, here], document[b, here] = torch.arange(size), number
                begin += size
        return Batch(ids, supervised, position, document)

    return make


@pytest.fixture
def growing() -> Callable[[], Context]:
    return Growing


@pytest.fixture
def make_target() -> Callable[..., FrozenTarget]:
    """A stub of this embedding and head; other sizes by name."""

    def make(embedding: Tensor, head: Tensor, **sizes: int) -> FrozenTarget:
        vocab, hidden = embedding.shape
        spec = dataclasses.replace(TINY, vocab=vocab, hidden=hidden, **sizes)
        return StubTarget(dataclasses.replace(spec, head_dim=hidden // spec.heads), embedding, head)

    return make


@pytest.fixture
def oracle_target(oracles: Path) -> FrozenTarget:
    """Embedding, head and sizes of the golden tensors' target."""
    config = json.loads((oracles / "target" / "config.json").read_text())
    weights = load_file(oracles / "target" / "model.safetensors")
    spec = TargetSpec(
        name="oracle",
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        rms_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        end_tokens=(config["eos_token_id"],),
    )
    return StubTarget(spec, weights["model.embed_tokens.weight"], weights["lm_head.weight"], config["rope_theta"])
