"""Writing a head in the layout of SafeAILab/EAGLE, SpecForge and SGLang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_lab.draft.eagle3 import Eagle3, FusingLayer
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.errors import UserError
from eagle3_lab.formats.agreement import family_of, same_rotary
from eagle3_lab.formats.layer_ids import layer_fields
from eagle3_lab.formats.official import CONFIG, EMBEDDING, WEIGHTS, public_tensors
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.rope import fields_of, written_fields


def write(
    folder: Path, target: HFTarget, source: FusedFeature, draft: Eagle3, dtype: torch.dtype | None = None
) -> None:
    """Write built parts as a public head: ``config.json`` and ``model.safetensors``, each whole or not at all.

    ``dtype`` is that of the weights; None: the parts' own. What is read back in that dtype is equal bit for bit.

    Raises:
        UserError: a head of several layers or a rope that this layout has no fields for, or a folder that cannot be
            written.
    """
    if draft.num_layers != 1:
        raise UserError(f"{folder}: the official layout holds one layer (midlayer), the draft has {draft.num_layers}")
    tensors = dict(public_tensors(source, draft, dtype))
    config = _config(folder, target, source, draft, tensors["lm_head.weight"].dtype)
    # for people: no engine reads it
    config["embed_tokens"] = "in the file" if EMBEDDING in tensors else "the target's"
    _require_writable_rope(folder, config, draft)
    text = json.dumps(config, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replaced(folder / WEIGHTS[0], lambda place: save_file(tensors, place, metadata={"format": "pt"}))
        _replaced(folder / CONFIG, lambda place: place.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def _config(folder: Path, target: HFTarget, source: FusedFeature, draft: Eagle3, dtype: torch.dtype) -> dict[str, Any]:
    spec, first = target.spec, draft.layers[0]
    assert isinstance(first, FusingLayer)
    attention, base = first.self_attn, draft.body.rope_base
    if base is None:
        rope = fields_of(target.model.config.get_text_config(decoder=True))
    else:
        rope = written_fields({"rope_type": "default", "rope_theta": base})
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": source.fc.out_features,
        "intermediate_size": first.mlp.gate_proj.out_features,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": draft.norm.eps,
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "draft_vocab_size": len(draft.vocab),
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": list(spec.end_tokens),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **rope,
    }
    if source.fc.out_features != spec.hidden:
        config["target_hidden_size"] = spec.hidden
    layers = source.layers(spec.layers)
    config |= layer_fields(folder, layers, spec.layers, family_of(target))
    return config


def _require_writable_rope(folder: Path, config: Mapping[str, Any], draft: Eagle3) -> None:
    """Raise UserError where the fields written describe another rope than the one that the draft was trained with."""
    try:
        reason = (
            "" if same_rotary(config, draft.rotary) else f"written as {config['rope_parameters']} it is another one"
        )
    except UserError as error:
        reason = str(error)
    if reason:
        raise UserError(
            f"{folder}: this layout has no fields for the rope that the draft takes from its target ({reason}); train "
            "one with model.draft.rope_base set to a number"
        )


def _replaced(place: Path, write: Callable[[Path], object]) -> None:
    """Write beside the destination and rename."""
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
