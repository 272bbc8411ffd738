"""A head as files describe it, whatever their format: its kind, its configuration and its tensors by one set of names.

Every reader of a format returns a :class:`HeadDescription`, every writer takes one, and :func:`describe` makes one of
built parts. The configuration has the flat fields of a Llama configuration; the tensors are named as our modules are:

    EAGLE-3   fc.weight, fc_norm.I.weight (3.1), layers.I.*, norm.weight, lm_head.weight
    EAGLE     fc.weight, fc.bias, layers.I.*                          (HASS's heads are of this kind)
    Medusa    blocks.I.J.linear.*, lm_heads.I.weight

Beside them ``embed_tokens.weight`` where the head has a table of its own, ``d2t`` (offsets) and ``t2d`` where its
vocabulary is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.draft.llama import DecoderLayer
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.rope import fields_of, rotary_of, written_fields
from eagle3_lab.types import Rotary

Kind = Literal["EAGLE-3", "EAGLE", "Medusa"]

EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class HeadDescription:
    """A head outside our parts.

    ``place`` names it in messages. ``tensors`` are on the CPU. ``layers`` are the hidden states that it reads where it
    was made of parts; a file lists them in its configuration, in ways that only a target settles (`layer_ids`).
    """

    place: str
    kind: Kind
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of its floating point tensors."""
        return next(value.dtype for value in self.tensors.values() if value.is_floating_point())


def describe(
    target: HFTarget, source: FeatureSource, draft: DraftModel, dtype: torch.dtype | None = None
) -> HeadDescription:
    """Return built parts as a description, its tensors in ``dtype`` (None: the parts' own).

    Raises:
        UserError: parts that no format has.
    """
    if isinstance(draft, Eagle3) and isinstance(source, FusedFeature):
        return _eagle3(target, source, draft, dtype)
    if isinstance(draft, Eagle1) and isinstance(source, TopFeature):
        return _eagle(target, draft, dtype)
    if isinstance(draft, Medusa) and isinstance(source, TopFeature):
        return _medusa(target, draft, dtype)
    raise UserError(
        f"{type(draft).__name__} on {type(source).__name__}: no format holds such a head; Eagle3 on FusedFeature, and "
        "Eagle1 or Medusa on TopFeature, have one"
    )


def same_rotary(config: Mapping[str, Any], rotary: Rotary) -> bool:
    """Return whether a head's configuration describes ``rotary``. Raises UserError for a rope that no head has."""
    described = rotary_of(config, head_dim_of(config))
    frequencies = described.inv_freq.cpu(), rotary.inv_freq.cpu().float()
    same = frequencies[0].shape == frequencies[1].shape and torch.allclose(*frequencies, rtol=1e-5, atol=0)
    return same and abs(described.scale - rotary.scale) <= 1e-6


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the width of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _require_writable_rope(config: Mapping[str, Any], rotary: Rotary) -> None:
    """Raise UserError where the fields describe another rope than the one that the draft was trained with."""
    try:
        reason = "" if same_rotary(config, rotary) else f"written as {config['rope_parameters']} it is another one"
    except UserError as error:
        reason = str(error)
    if reason:
        raise UserError(
            f"formats have no fields for the rope that the draft takes from its target ({reason}); train one with "
            "model.draft.rope_base set to a number"
        )


def _eagle3(target: HFTarget, source: FusedFeature, draft: Eagle3, dtype: torch.dtype | None) -> HeadDescription:
    spec, width = target.spec, source.fc.out_features
    config = _llama_config(target, draft.layers, width, draft.body.rope_base, draft.norm.eps)
    _require_writable_rope(config, draft.rotary)
    config |= {
        "draft_vocab_size": len(draft.vocab),
        "fc_norm": source.normed,
        "norm_output": draft.feedback == "post_norm",
        "norm_before_residual": False,
    }
    if width != spec.hidden:
        config["target_hidden_size"] = spec.hidden
    if source.normed and draft.norm.eps != spec.rms_eps:
        raise UserError(
            f"model.draft.rms_eps is {draft.norm.eps} and the features' norms have the target's {spec.rms_eps}: "
            "formats have one number for both; train a head with model.draft.rms_eps: null"
        )
    tensors = {
        name: value for name, value in draft.state_dict().items() if not name.startswith(("draft_vocab.", "embed."))
    }
    if (table := draft.embed.table()) is not None:
        tensors[EMBEDDING] = table
    tensors |= source.state_dict() | _maps(draft)
    layers = source.layers(spec.layers)
    return HeadDescription("the head", "EAGLE-3", config, _copied(tensors, dtype), layers)


def _eagle(target: HFTarget, draft: Eagle1, dtype: torch.dtype | None) -> HeadDescription:
    ids = torch.arange(min(8, target.spec.vocab), device=target.device)
    table = cast("torch.nn.Embedding", target.model.get_input_embeddings())
    if not torch.equal(target.embed(ids), table.weight[ids]):
        raise UserError(
            f"{target.spec.name} scales its embedding, which an engine that lends it to an EAGLE head does not; no "
            "format has a field for that"
        )
    config = _llama_config(target, draft.layers, target.spec.hidden, draft.body.rope_base, target.spec.rms_eps)
    _require_writable_rope(config, draft.rotary)
    config["bias"] = draft.bias
    tensors = {name: value for name, value in draft.state_dict().items() if not name.startswith("draft_vocab.")}
    return HeadDescription("the head", "EAGLE", config, _copied(tensors, dtype))


def _medusa(target: HFTarget, draft: Medusa, dtype: torch.dtype | None) -> HeadDescription:
    config = {
        "hidden_size": target.spec.hidden,
        "vocab_size": target.spec.vocab,
        "draft_vocab_size": len(draft.vocab),
        "num_heads": draft.steps,
        "num_hidden_layers": draft.blocks_each,
        "base_model_name_or_path": target.source,
    }
    tensors = {name: value for name, value in draft.state_dict().items() if name.startswith("blocks.")}
    for step in range(draft.steps):
        tensors[f"lm_heads.{step}.weight"] = draft.lm_heads[min(step, len(draft.lm_heads) - 1)].weight
    return HeadDescription("the head", "Medusa", config, _copied(tensors | _maps(draft), dtype))


def _llama_config(
    target: HFTarget, layers: nn.ModuleList, width: int, rope_base: float | None, eps: float
) -> dict[str, Any]:
    """Return the flat fields of a Llama configuration for a head of these layers."""
    spec, first = target.spec, layers[0]
    assert isinstance(first, DecoderLayer)
    attention = first.self_attn
    if rope_base is None:
        rope = fields_of(target.model.config.get_text_config(decoder=True))
    else:
        rope = written_fields({"rope_type": "default", "rope_theta": rope_base})
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": first.mlp.gate_proj.out_features,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "num_hidden_layers": len(layers),
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": list(spec.end_tokens),
        **rope,
    }


def _maps(draft: Eagle3 | Medusa) -> dict[str, Tensor]:
    """Return the maps of a reduced vocabulary; a full one has none, since vLLM has no place for it."""
    full = len(draft.vocab) == draft.draft_vocab.t2d.shape[0]
    return {} if full else dict(draft.draft_vocab.state_dict())


def _copied(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors on the CPU, each with memory of its own, the floating point ones in ``dtype``."""
    convert: Callable[[Tensor], torch.dtype] = lambda value: (
        value.dtype if dtype is None or not value.is_floating_point() else dtype
    )
    return {name: value.detach().to("cpu", convert(value), copy=True).contiguous() for name, value in tensors.items()}
