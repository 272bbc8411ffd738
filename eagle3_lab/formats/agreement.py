"""What a public head's configuration says, against the parts that it is read into: a disagreement is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eagle3_lab.draft.layer import Eagle3, FusingLayer
from eagle3_lab.draft.source import FusedFeature
from eagle3_lab.errors import UserError
from eagle3_lab.target.rope import rope_parameters, rotary_of
from eagle3_lab.types import TargetSpec

EXTENSIONS = ("norm_before_residual", "norm_before_fc", "fc_norm")
"""Switches of later variants, each off in EAGLE-3."""

LAYERS = "eagle_aux_hidden_state_layer_ids"
INPUT, OUTPUT = LAYERS, "eagle_config"
"""The list at the top counts a block's inputs, as we do (vLLM, speculators); the one inside ``eagle_config`` counts its
outputs, one less (SGLang, SpecForge)."""


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The states that a head without a list reads."""
    return 2, num_layers // 2, num_layers - 3


def layers_of(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads, by our ids."""
    if config.get(INPUT):
        return tuple(config[INPUT])
    if nested := (config.get(OUTPUT) or {}).get(LAYERS):
        return tuple(layer + 1 for layer in nested)
    return default_layers(num_layers)


def refuse_disagreement(
    place: str, config: Mapping[str, Any], spec: TargetSpec, source: FusedFeature, draft: Eagle3
) -> None:
    """Compare a configuration with built parts.

    Raises:
        UserError: a variant that is not EAGLE-3, another target's head, or sizes, layers or rope other than the parts'.
    """
    on = [name for name in EXTENSIONS if config.get(name)]
    if on or config.get("norm_output") is False:
        raise UserError(f"{place}: config.json: {(on or ['norm_output: false'])[0]}: a variant that Eagle3 is not")
    _refuse_sizes(place, config, spec, source, draft)
    layers, ours = layers_of(config, spec.layers), source.layers(spec.layers)
    if layers != ours:
        raise UserError(
            f"{place}: config.json: reads hidden states {list(layers)}, the experiment {list(ours)}; set "
            f"model.features.init_args.layers: {list(layers)}"
        )
    theirs = rotary_of(config, _head_dim(config))
    mine = draft.rotary
    same = torch.allclose(theirs.inv_freq.cpu(), mine.inv_freq.cpu().float(), rtol=1e-5)
    if not same or abs(theirs.scale - mine.scale) > 1e-6:
        parameters = rope_parameters(config)
        plain = parameters["rope_type"] == "default"
        needed = str(float(parameters["rope_theta"])) if plain else "null (the target's own, where it is that one)"
        raise UserError(
            f"{place}: config.json: turns by rope {parameters['rope_type']} of base {parameters['rope_theta']}, the "
            f"experiment's draft otherwise; set model.draft.init_args.rope_base: {needed}"
        )


def _refuse_sizes(place: str, config: Mapping[str, Any], spec: TargetSpec, source: FusedFeature, draft: Eagle3) -> None:
    first = draft.layers[0]
    assert isinstance(first, FusingLayer)
    attention = first.self_attn
    heads = config.get("num_attention_heads")
    compared = (
        ("vocab_size", config.get("vocab_size"), spec.vocab, "target"),
        ("target_hidden_size", config.get("target_hidden_size") or spec.hidden, spec.hidden, "target"),
        ("hidden_size", config.get("hidden_size"), source.fc.out_features, "model.features.init_args.width"),
        ("num_hidden_layers", config.get("num_hidden_layers"), draft.num_layers, "model.draft.init_args.num_layers"),
        (
            "intermediate_size",
            config.get("intermediate_size"),
            first.mlp.gate_proj.out_features,
            "model.draft.init_args.intermediate",
        ),
        ("head_dim", _head_dim(config), attention.head_dim, "model.draft.init_args.head_dim"),
        (
            "num_attention_heads",
            heads,
            attention.q_proj.out_features // attention.head_dim,
            "model.draft.init_args.heads",
        ),
        (
            "num_key_value_heads",
            config.get("num_key_value_heads") or heads,
            attention.k_proj.out_features // attention.head_dim,
            "model.draft.init_args.kv_heads",
        ),
        ("rms_norm_eps", config.get("rms_norm_eps"), draft.norm.eps, "model.draft.init_args.rms_eps"),
    )
    for name, theirs, ours, key in compared:
        if theirs is None:
            raise UserError(f"{place}: config.json: no {name}")
        if theirs != ours:
            wanted = "another target is needed" if key == "target" else f"set {key}: {theirs}"
            raise UserError(f"{place}: config.json: {name} is {theirs}, the experiment has {ours}; {wanted}")


def _head_dim(config: Mapping[str, Any]) -> int:
    said = config.get("head_dim")
    return said if said else config["hidden_size"] // config["num_attention_heads"]
