"""What a head's configuration says, against the parts that it is read into: a disagreement is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.llama import DecoderLayer
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.errors import UserError
from eagle3_lab.formats.description import HeadDescription, head_dim_of, same_rotary
from eagle3_lab.formats.layer_ids import layers_of
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.rope import rope_parameters
from eagle3_lab.types import Rotary, TargetSpec

FOREIGN = ("norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")
"""Switches of variants that no part of ours has, each off where it is absent."""

TARGET = "another target is needed"


def refuse_eagle3(head: HeadDescription, target: HFTarget, source: FusedFeature, draft: Eagle3) -> None:
    """Compare an EAGLE-3 head's configuration with parts that were built for ``target``.

    Raises:
        UserError: another variant, another target's head, or sizes, switches, layers or rope other than the parts'.
    """
    config, where = head.config, f"{head.place}: config.json"
    _refuse_variants(where, config)
    switches = {
        "fc_norm": (source.normed, "model.features.normed: true", "model.features.normed: false"),
        "norm_output": (
            draft.feedback == "post_norm",
            "model.draft.feedback: post_norm",
            "model.draft.feedback: pre_norm",
        ),
    }
    for name, (ours, on, off) in switches.items():
        theirs = bool(config.get(name))
        if theirs != ours:
            raise UserError(f"{where}: {name} is {theirs}, the experiment's is {ours}; set {on if theirs else off}")
    sizes = {"target_hidden_size": (target.spec.hidden, TARGET)}
    sizes |= _llama_sizes(target.spec, draft.layers[0], source.fc.out_features, draft.num_layers, draft.norm.eps)
    sizes["hidden_size"] = (source.fc.out_features, "model.features.width")
    _refuse_sizes(where, {"target_hidden_size": target.spec.hidden} | config, sizes)
    ours = source.layers(target.spec.layers)
    try:
        layers = layers_of(config, ours, target.spec.layers, target.family)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if layers != ours:
        raise UserError(
            f"{where}: reads hidden states {list(layers)}, the experiment {list(ours)}; set "
            f"model.features.layers: {list(layers)}"
        )
    _refuse_rope(where, config, draft.rotary)


def refuse_eagle(head: HeadDescription, target: HFTarget, draft: Eagle1) -> None:
    """Compare an EAGLE head's configuration with parts that were built for ``target``. Raises UserError as
    `refuse_eagle3`."""
    config, where = head.config, f"{head.place}: config.json"
    _refuse_variants(where, config)
    spec = target.spec
    _refuse_sizes(where, config, _llama_sizes(spec, draft.layers[0], spec.hidden, draft.num_layers, spec.rms_eps))
    _refuse_rope(where, config, draft.rotary)


def refuse_medusa(head: HeadDescription, target: HFTarget, draft: Medusa) -> None:
    """Compare a Medusa head's configuration with the draft. Raises UserError for other counts or another target."""
    sizes = {
        "num_heads": (draft.steps, "model.draft.heads"),
        "num_hidden_layers": (draft.blocks_each, "model.draft.num_layers"),
    }
    optional = {"hidden_size": (target.spec.hidden, TARGET), "vocab_size": (target.spec.vocab, TARGET)}
    sizes |= {name: size for name, size in optional.items() if head.config.get(name) is not None}
    _refuse_sizes(f"{head.place}: config.json", head.config, sizes)


def _refuse_variants(where: str, config: Mapping[str, Any]) -> None:
    if on := [name for name in FOREIGN if config.get(name)]:
        raise UserError(f"{where}: {on[0]}: a variant that no part of ours is")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act is {config['hidden_act']!r}; 'silu' is needed")


def _refuse_rope(where: str, config: Mapping[str, Any], rotary: Rotary) -> None:
    try:
        same = same_rotary(config, rotary)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not same:
        parameters = rope_parameters(config)
        plain = parameters["rope_type"] == "default"
        needed = str(float(parameters["rope_theta"])) if plain else "null (the target's own, where it is that one)"
        raise UserError(
            f"{where}: turns by rope {parameters['rope_type']} of base {parameters['rope_theta']}, the "
            f"experiment's draft otherwise; set model.draft.rope_base: {needed}"
        )


Sizes = dict[str, tuple[Any, str]]
"""Field -> what the built parts have, and the key that sets it, or what else is needed."""


def _llama_sizes(spec: TargetSpec, first: object, width: int, num_layers: int, eps: float) -> Sizes:
    assert isinstance(first, DecoderLayer)
    attention = first.self_attn
    return {
        "vocab_size": (spec.vocab, TARGET),
        "hidden_size": (width, TARGET),
        "num_hidden_layers": (num_layers, "model.draft.num_layers"),
        "intermediate_size": (first.mlp.gate_proj.out_features, "model.draft.intermediate"),
        "num_attention_heads": (attention.q_proj.out_features // attention.head_dim, "model.draft.heads"),
        "num_key_value_heads": (attention.k_proj.out_features // attention.head_dim, "model.draft.kv_heads"),
        "head_dim": (attention.head_dim, "model.draft.head_dim"),
        "rms_norm_eps": (eps, "model.draft.rms_eps"),
    }


def _refuse_sizes(where: str, config: Mapping[str, Any], ours: Sizes) -> None:
    theirs = {"num_key_value_heads": config.get("num_attention_heads")}
    theirs |= {name: value for name, value in config.items() if value is not None}
    for name, (mine, key) in ours.items():
        if name == "head_dim":
            theirs[name] = head_dim_of(theirs)
        if theirs.get(name) is None:
            raise UserError(f"{where}: no {name}")
        if theirs[name] != mine:
            needed = key if key == TARGET else f"set {key}: {theirs[name]}"
            raise UserError(f"{where}: {name} is {theirs[name]}, the experiment has {mine}; {needed}")
