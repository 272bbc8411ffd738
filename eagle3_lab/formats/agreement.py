"""What a public head's configuration says, against the parts that it is read into: a disagreement is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eagle3_lab.draft.eagle3 import Eagle3, FusingLayer
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.errors import UserError
from eagle3_lab.formats.layer_ids import layers_of
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.rope import rope_parameters, rotary_of
from eagle3_lab.types import Rotary, TargetSpec

EXTENSIONS = ("norm_before_residual", "norm_before_fc", "fc_norm")
"""Switches of later variants, each off in EAGLE-3."""

TARGET = "another target is needed"


def refuse_disagreement(
    place: str, config: Mapping[str, Any], target: HFTarget, source: FusedFeature, draft: Eagle3
) -> None:
    """Compare a configuration with parts that were built for ``target``.

    Raises:
        UserError: a variant that is not EAGLE-3, another target's head, or sizes, layers or rope other than the parts'.
    """
    spec = target.spec
    on = [name for name in EXTENSIONS if config.get(name)]
    if on or config.get("norm_output") is False:
        raise UserError(f"{place}: config.json: {(on or ['norm_output: false'])[0]}: a variant that Eagle3 is not")
    _refuse_sizes(place, config, spec, source, draft)
    ours = source.layers(spec.layers)
    try:
        layers = layers_of(config, ours, spec.layers, family_of(target))
    except UserError as error:
        raise UserError(f"{place}: config.json: {error}") from None
    if layers != ours:
        raise UserError(
            f"{place}: config.json: reads hidden states {list(layers)}, the experiment {list(ours)}; set "
            f"model.features.layers: {list(layers)}"
        )
    try:
        same = same_rotary(config, draft.rotary)
    except UserError as error:
        raise UserError(f"{place}: config.json: {error}") from None
    if not same:
        parameters = rope_parameters(config)
        plain = parameters["rope_type"] == "default"
        needed = str(float(parameters["rope_theta"])) if plain else "null (the target's own, where it is that one)"
        raise UserError(
            f"{place}: config.json: turns by rope {parameters['rope_type']} of base {parameters['rope_theta']}, the "
            f"experiment's draft otherwise; set model.draft.rope_base: {needed}"
        )


def family_of(target: HFTarget) -> str:
    """Return the ``model_type`` of a target's language model."""
    return target.model.config.get_text_config(decoder=True).model_type


def same_rotary(config: Mapping[str, Any], rotary: Rotary) -> bool:
    """Return whether a head's configuration describes ``rotary``. Raises UserError for a rope that no head has."""
    described = rotary_of(config, _head_dim(config))
    frequencies = described.inv_freq.cpu(), rotary.inv_freq.cpu().float()
    same = frequencies[0].shape == frequencies[1].shape and torch.allclose(*frequencies, rtol=1e-5, atol=0)
    return same and abs(described.scale - rotary.scale) <= 1e-6


def _refuse_sizes(place: str, config: Mapping[str, Any], spec: TargetSpec, source: FusedFeature, draft: Eagle3) -> None:
    first = draft.layers[0]
    assert isinstance(first, FusingLayer)
    attention = first.self_attn
    ours = {
        "vocab_size": (spec.vocab, TARGET),
        "target_hidden_size": (spec.hidden, TARGET),
        "hidden_size": (source.fc.out_features, "model.features.width"),
        "num_hidden_layers": (draft.num_layers, "model.draft.num_layers"),
        "intermediate_size": (first.mlp.gate_proj.out_features, "model.draft.intermediate"),
        "num_attention_heads": (attention.q_proj.out_features // attention.head_dim, "model.draft.heads"),
        "num_key_value_heads": (attention.k_proj.out_features // attention.head_dim, "model.draft.kv_heads"),
        "head_dim": (attention.head_dim, "model.draft.head_dim"),
        "rms_norm_eps": (draft.norm.eps, "model.draft.rms_eps"),
    }
    theirs = {"target_hidden_size": spec.hidden, "num_key_value_heads": config.get("num_attention_heads")}
    theirs |= {name: value for name, value in config.items() if value is not None}
    for name, (mine, key) in ours.items():
        if name == "head_dim":
            theirs[name] = _head_dim(theirs)
        if theirs.get(name) is None:
            raise UserError(f"{place}: config.json: no {name}")
        if theirs[name] != mine:
            needed = key if key == TARGET else f"set {key}: {theirs[name]}"
            raise UserError(f"{place}: config.json: {name} is {theirs[name]}, the experiment has {mine}; {needed}")


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
