"""Rotary embeddings as configurations write them, transformers 4 and 5 alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_lab.errors import UserError
from eagle3_lab.types import Rotary

KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Those whose angles do not depend on how long the batch is, and the numbers that each needs."""

BASE = 10000.0
"""Where a configuration names none."""


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The one form that transformers 5 reads, from a configuration's ``rope_parameters``, or from the older
    ``rope_scaling`` and ``rope_theta``.

    {"rope_theta": 500000} -> {"rope_type": "default", "rope_theta": 500000}
    """
    said = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    kind = said.pop("type", None)
    said.setdefault("rope_type", kind or "default")
    said.setdefault("rope_theta", fields.get("rope_theta") or BASE)
    return said


def older_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, as engines and older versions read them."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    plain = parameters["rope_type"] == "default"
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": None if plain else scaling}


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of a loaded model's configuration."""
    return older_fields(rope_parameters(config.to_dict()))


def rotary_of(fields: Mapping[str, Any], head_dim: int) -> Rotary:
    """The rotary embedding that a Llama configuration describes, at a head width.

    Raises:
        UserError: a kind whose angles depend on the batch's length, an unknown one, or one without a number that it
            needs.
    """
    parameters = rope_parameters(fields)
    kind = parameters["rope_type"]
    if kind not in KINDS:
        raise UserError(f"rope type {kind!r}: one of {', '.join(KINDS)} is needed")
    if missing := [name for name in KINDS[kind] if parameters.get(name) is None]:
        raise UserError(f"rope type {kind!r}: no {missing[0]}")
    positions = fields.get("max_position_embeddings") or LlamaConfig().max_position_embeddings
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=parameters,
    )
    module = LlamaRotaryEmbedding(config)
    return Rotary(module.inv_freq.detach().clone(), float(module.attention_scaling))
