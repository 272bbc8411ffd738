"""Rotary embeddings as configurations write them, transformers 4 and 5 alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.windows import FULL
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
    """Return the one form that transformers 5 reads, from a configuration's ``rope_parameters``, or from the older
    ``rope_scaling`` and ``rope_theta``. Where each layer type has its own entry (gemma3), the full layers' is returned,
    which is the one that a draft follows.

    {"rope_theta": 500000} -> {"rope_type": "default", "rope_theta": 500000}
    """
    return _flat(fields.get("rope_parameters") or fields.get("rope_scaling") or {}, fields)


def _flat(entry: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return one rope entry with its type and its base; the base stands beside it in older configurations."""
    flat = dict(entry.get(FULL) or entry)
    kind = flat.pop("type", None)
    flat.setdefault("rope_type", kind or "default")
    flat.setdefault("rope_theta", fields.get("rope_theta") or BASE)
    return flat


def written_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope as configurations write it: ``rope_theta`` and ``rope_scaling``, which engines and transformers 4
    read, and ``rope_parameters``, which transformers 5 reads."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    plain = parameters["rope_type"] == "default"
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if plain else scaling,
        "rope_parameters": dict(parameters),
    }


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rope of a loaded model's configuration, as :func:`written_fields` writes it."""
    return written_fields(rope_parameters(config.to_dict()))


def _refuse_contradiction(fields: Mapping[str, Any]) -> None:
    """Raise UserError where the older and the newer fields name two ropes: readers differ in which one they take."""
    if not fields.get("rope_parameters"):
        return
    newer = rope_parameters(fields)
    older = newer
    if fields.get("rope_scaling"):
        older = _flat(fields["rope_scaling"], {"rope_theta": fields.get("rope_theta") or newer["rope_theta"]})
    elif fields.get("rope_theta"):
        older = newer | {"rope_theta": fields["rope_theta"]}
    for name in ("rope_type", "rope_theta", *KINDS.get(newer["rope_type"], ())):
        if older.get(name) != newer.get(name):
            raise UserError(
                f"{name} is {newer.get(name)} in rope_parameters and {older.get(name)} in the older rope_theta and "
                "rope_scaling; leave out the one that is wrong"
            )


def rotary_of(fields: Mapping[str, Any], head_dim: int) -> Rotary:
    """Return the rotary embedding that a Llama configuration describes, at a head width.

    Raises:
        UserError: a kind whose angles depend on the batch's length, an unknown one, one without a number that it needs,
            or two that contradict each other.
    """
    _refuse_contradiction(fields)
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
