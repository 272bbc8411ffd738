"""Heads as vLLM and SGLang read them: the authors' flat layout, with what each engine needs beside it.

    EAGLE-3   vLLM: any number of layers, ``layers.I``; SGLang calls the input norm of a later layer ``hidden_norm``.
    EAGLE     vLLM's ``fc`` has no bias, SGLang's always has one.
    Medusa    vLLM alone.

`write_both` writes one folder that both engines read alike. What ran in vLLM 0.32.0 is said in the documentation;
SGLang's side follows its source, 0.5.23, and has not been run.

Source: vLLM 0.32.0 models/llama_eagle3.py, llama_eagle.py, medusa.py, utils.py:457 (a bias too many is dropped);
SGLang 0.5.23 models/llama_eagle3.py, llama_eagle.py, llama.py:895-930.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from eagle3_lab.formats.description import EMBEDDING, HeadDescription
from eagle3_lab.formats.layer_ids import COUNT, LIST, default_layers, layer_fields
from eagle3_lab.formats.official import FIRST, OURS
from eagle3_lab.target_model.hf_target import HFTarget

Content = tuple[dict[str, Any], dict[str, Tensor]]

LATER_NORM = re.compile(r"^(layers\.[1-9]\d*)\.input_layernorm\.")


def write_vllm(head: HeadDescription, target: HFTarget) -> Content:
    """Return the configuration and the tensors of a head for vLLM. Raises ValueError for what it cannot hold."""
    if head.kind == "Medusa":
        return _vllm_medusa(head)
    if head.kind == "EAGLE":
        if head.config["bias"]:
            raise ValueError("fc has no bias there, and one in the file is dropped; train with model.draft.bias: false")
        return {"architectures": ["EagleLlamaForCausalLM"]} | head.config, dict(head.tensors)
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | head.config
    if head.layers != default_layers(target.spec.layers):
        config |= {LIST: list(head.layers), COUNT: len(head.layers)}
    return config, dict(head.tensors)


def write_sglang(head: HeadDescription, target: HFTarget) -> Content:
    """Return the configuration and the tensors of a head for SGLang. Raises ValueError for what it cannot hold."""
    if head.kind == "Medusa":
        raise ValueError("SGLang has no Medusa; export with --to vllm")
    if head.kind == "EAGLE":
        width = head.config["hidden_size"]
        bias = head.tensors.get("fc.bias", torch.zeros(width, dtype=head.dtype))  # left unset there where it is absent
        return {"architectures": ["LlamaForCausalLMEagle"]} | head.config, head.tensors | {"fc.bias": bias}
    if EMBEDDING in head.tensors and head.config["hidden_size"] == target.spec.hidden:
        raise ValueError("a head as wide as its target reads the target's embedding there, and this one has its own")
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | head.config
    config |= layer_fields(head.layers, target.spec.layers, target.family)
    tensors = {name.replace(OURS, FIRST): value for name, value in head.tensors.items()}
    for name in list(tensors):
        if LATER_NORM.match(name):
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensors[name].clone()
    return config, tensors


def write_both(head: HeadDescription, target: HFTarget) -> Content:
    """Return the configuration and the tensors of a head for vLLM and SGLang alike. Raises ValueError for what one of
    them cannot hold."""
    vllm, _ = write_vllm(head, target)
    config, tensors = write_sglang(head, target)
    if head.kind == "EAGLE":  # each engine takes the one that it knows
        config["architectures"] = [*config["architectures"], *vllm["architectures"]]
    return config, tensors


def _vllm_medusa(head: HeadDescription) -> Content:
    fields = head.config
    if fields["draft_vocab_size"] != fields["vocab_size"]:
        raise ValueError("a reduced vocabulary (model.draft_vocab) has not been seen to load there")
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": fields["hidden_size"],
        "vocab_size": fields["vocab_size"],
        "truncated_vocab_size": fields["vocab_size"],
        "num_heads": fields["num_heads"],
        "num_hidden_layers": fields["num_hidden_layers"],
        "medusa_fc_bias": True,
    }
    tensors = {
        re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): value
        for name, value in head.tensors.items()
    }
    return config, tensors
