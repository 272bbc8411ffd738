"""What `gpu_check` measures: a random target of some shape, made on the device, and a head for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_lab.backend.cuda_graphs import CudaRecord, Record, Tape
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.tree_shapes import DynamicTree
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe


@dataclass(frozen=True)
class Sizes:
    """What is built and measured. The defaults are Llama-3.1-8B's and EAGLE-3's own."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
    draft_vocab: int = 32000
    tree: tuple[int, int, int] = (8, 10, 60)  # levels, width, budget
    nodes: tuple[int, ...] = (1, 8, 26, 60)
    widths: tuple[int, ...] = (1, 10)
    context: int = 512
    tokens: int = 128
    rounds: int = 8
    repeats: int = 3
    rows: int = 2048  # of one training batch
    depth: int = 7
    steps: int = 5


TINY = Sizes("cpu", torch.float32, 32, 48, 8, 4, 2, 97, 64, (3, 2, 6), (1, 6), (1, 2), 12, 8, 3, 1, 48, 3, 2)


class Bench:
    """The target and the head under test, made once."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.device = torch.device(sizes.device)
        torch.manual_seed(0)
        self.model = self._model()
        self.target = self.wrapped()
        self.source, self.draft = FusedFeature(), Eagle3()
        width = self.source.build(self.target)
        kept = torch.arange(sizes.draft_vocab, device=self.device) * (sizes.vocab // sizes.draft_vocab)
        self.draft.build(self.target, width, kept)
        nn.Module.to(self.source, self.device)
        nn.Module.to(self.draft, self.device)
        self.ids = torch.randint(sizes.vocab, (sizes.context,), generator=torch.Generator().manual_seed(1)).tolist()

    def record(self) -> Record:
        """A new one: CUDA graphs, or on a CPU what stands in for them."""
        return CudaRecord(self.device) if self.device.type == "cuda" else Tape()

    def wrapped(self, record: Record | None = None) -> HFTarget:
        return HFTarget(self.model, None, describe(self.model, None, "random"), record)

    def eagle(self, record: Record | None = None) -> Eagle:
        levels, width, budget = self.sizes.tree
        grow = DynamicTree(levels, width, budget)
        return Eagle(self.source, self.draft, grow, self.sizes.layers, record=record)

    @contextmanager
    def narrow(self) -> Iterator[None]:
        """The head in the target's dtype, in which it decodes; it trains in its own."""
        before = next(self.draft.parameters()).dtype
        self._cast(self.sizes.dtype)
        try:
            yield
        finally:
            self._cast(before)

    def _cast(self, dtype: torch.dtype) -> None:
        self.draft.to(dtype)
        self.source.to(dtype)

    def _model(self) -> LlamaForCausalLM:
        s = self.sizes
        config = LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]  taken among the keyword arguments
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(s.dtype)
        try:
            with torch.device(self.device):
                return LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
