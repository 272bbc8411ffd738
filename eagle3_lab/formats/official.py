"""Heads in the layouts of their authors: EAGLE-3 and EAGLE (SafeAILab/EAGLE, SpecForge, HASS), Medusa.

EAGLE-3 and EAGLE: flat fields of a Llama configuration; the first layer of an EAGLE-3 head is called ``midlayer``.
SGLang and vLLM read this layout with additions of their own, so :func:`read` understands theirs too. Medusa: its
configuration counts heads and blocks, and a head's tensors are numbered, ``HEAD.BLOCK.linear.*``, the linear head last.

Source: EAGLE cb7e084 eagle/model/cnets.py:488-534, cnets1.py:480-528, ea_model.py:51-76, 124-135; SGLang 0.5.23
models/llama_eagle3.py:330-370; Medusa 0bfdcd2 medusa/model/medusa_model.py:37-66, 100-108; vLLM 0.32.0
models/medusa.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from eagle3_lab.formats.description import HeadDescription, Kind
from eagle3_lab.formats.layer_ids import layer_fields
from eagle3_lab.target_model.hf_target import HFTarget

FIRST, OURS = "midlayer.", "layers.0."
DERIVED = "rotary_emb.inv_freq"
"""Ends the name of a buffer that old heads have, and that their configuration decides."""

OLDER = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
ADDITIONAL = re.compile(r"^additional_layers\.(\d+)\.")
SECOND_NORM = re.compile(r"^(layers\.[1-9]\d*)\.hidden_norm\.")
"""What SGLang calls the input norm of every layer but the first."""

OF_EAGLE3 = ("layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d")
BLOCK = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
LINEAR = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(\d+)\.weight$")


# ------------------------------------------------------------------------------------------------------------- EAGLE


def read(place: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadDescription | None:
    """Return a flat EAGLE-3 or EAGLE head; None for another format.

    Raises:
        ValueError: one tensor by two names, with two contents.
    """
    names = _by_our_names(tensors)
    if "fc.weight" not in names and not any(name in names for name in OF_EAGLE3):
        return None
    kind: Kind = "EAGLE-3" if any(name in names for name in OF_EAGLE3) else "EAGLE"
    section = config.get("eagle_config") or {}
    switches = {
        "norm_before_fc": section.get("norm_before_fc", config.get("norm_before_fc", False)),
        "fc_norm": config.get("fc_norm") or config.get("use_aux_norm") or False,
    }
    return HeadDescription(place, kind, config | switches, names)


def _by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(DERIVED):
            continue
        ours = name.removeprefix("model.").replace(FIRST, OURS)
        for older, newer in OLDER.items():
            ours = ours.replace(older, newer)
        ours = ADDITIONAL.sub(lambda match: f"layers.{int(match[1]) + 1}.", ours)
        ours = SECOND_NORM.sub(r"\1.input_layernorm.", ours)
        if ours in named and not torch.equal(named[ours], value):
            raise ValueError(f"{ours} stands there by two names, {name} is one, with two contents")
        named[ours] = value
    return named


def write(head: HeadDescription, target: HFTarget) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a head in its authors' layout.

    Raises:
        ValueError: what this layout cannot hold.
    """
    if head.kind == "Medusa":
        return _write_medusa(head)
    if head.kind == "EAGLE":
        return {"architectures": ["LlamaForCausalLM"]} | head.config, dict(head.tensors)
    if head.config["num_hidden_layers"] != 1:
        raise ValueError(f"it has one layer (midlayer), the draft has {head.config['num_hidden_layers']}")
    if head.config["fc_norm"] or head.config["norm_output"]:
        raise ValueError("it has no place for EAGLE-3.1's norms (features.normed, draft.feedback: post_norm)")
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | head.config
    config |= layer_fields(head.layers, target.spec.layers, target.family)
    return config, {name.replace(OURS, FIRST): value for name, value in head.tensors.items()}


# ------------------------------------------------------------------------------------------------------------ Medusa


def read_medusa(place: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadDescription | None:
    """Return a Medusa head in its authors' layout or vLLM's; None for another format."""
    numbered = {name: BLOCK.match(name) or LINEAR.match(name) for name in tensors}
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if match := BLOCK.match(name):
            named[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = value
        elif match := LINEAR.match(name):
            named[f"lm_heads.{match[1]}.weight"] = value
        else:  # vLLM's
            named[re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2.linear.", name)] = value
    if not any(numbered.values()) and not any(name.startswith("lm_heads.") for name in named):
        return None
    counts = {
        "num_heads": config.get("medusa_num_heads", config.get("num_heads")),
        "num_hidden_layers": config.get("medusa_num_layers", config.get("num_hidden_layers")),
    }
    return HeadDescription(place, "Medusa", config | counts, named)


def _write_medusa(head: HeadDescription) -> tuple[dict[str, Any], dict[str, Tensor]]:
    heads, blocks = head.config["num_heads"], head.config["num_hidden_layers"]
    if blocks > 1:
        raise ValueError(f"its code has one block a head, used {blocks} times, the draft {blocks} of their own")
    if head.config["draft_vocab_size"] != head.config["vocab_size"]:
        raise ValueError("it has no place for a reduced vocabulary (model.draft_vocab)")
    tensors = {f"{step}.{blocks}.weight": head.tensors[f"lm_heads.{step}.weight"] for step in range(heads)}
    tensors |= {name.removeprefix("blocks."): value for name, value in head.tensors.items() if "blocks." in name}
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": head.config["base_model_name_or_path"],
        "hidden_size": head.config["hidden_size"],
        "vocab_size": head.config["vocab_size"],
    }
    return config, tensors
