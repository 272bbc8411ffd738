"""Tiny random models of any family as targets, in float64 unless said otherwise."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe


def random_target(
    kind: str = "llama", *, dtype: torch.dtype = torch.float64, attention: str = "sdpa", seed: int = 0, **more: object
) -> HFTarget:
    """A target of four blocks and 97 tokens (or what ``more`` says of its configuration)."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "pad_token_id": 1,
    }
    config = AutoConfig.for_model(kind, **(sizes | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits far enough apart for differences to show
    return HFTarget(model, None, describe(model, None, kind))
