"""Every causal LM family that transformers can build: sizes that make it tiny, and whether it is served or refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONTEXT, LAYERS, WINDOW = 64, 3, 8
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "pad_token_id": 1,
}
HEADS: dict[str, Any] = {"head_dim": 8}
EXPERTS: dict[str, Any] = HEADS | {
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 16),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    "ffn_hidden_size": 48,
}
LATENT: dict[str, Any] = EXPERTS | {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "head_dim", "num_key_value_heads"), 4),
    "v_head_dim": 8,
}
BOTH_SIDES: dict[str, Any] = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": LAYERS,
}
LINEAR: dict[str, Any] = HEADS | {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
MAMBA: dict[str, Any] = EXPERTS | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA: dict[str, Any] = HEADS | MIXED | {"query_pre_attn_scalar": 8}
PER_LAYER: dict[str, Any] = HEADS | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "global_head_dim": 8,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 2,
}
VISION: dict[str, Any] = {
    **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": LAYERS,  # as deep as the text tower
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
}


@dataclass(frozen=True)
class Family:
    """Sizes beside the common ones. ``refusal``: what the one line says; None: served exactly."""

    sizes: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    attention: str = "sdpa"


def _alike(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


SOFT_CAP = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LATER, STATE, DIFFERS = (
    "attention to later tokens",
    "recurrent state|layer types|cache layers",
    "differ from a plain run",
)
NO_SDPA = "set target.attention: eager"

FAMILIES: dict[str, Family] = {
    # ---- served
    **_alike(
        "apertus apertus1p5_text arcee biogpt bitnet cohere ctrl diffllama ernie4_5 exaone falcon fuyu glm glm4 "
        "gpt-sw3 gpt2 gpt_bigcode gpt_neox granite hyperclovax internlm3 iquestcoder jais2 lfm2 llama ministral3 "
        "nanochat nemotron olmo olmo2 opt persimmon phi qwen3 seed_oss smollm3 stablelm",
        Family(),
    ),
    **_alike("codegen gptj", Family({"rotary_dim": 4})),
    **_alike("gpt_neox_japanese xglm", Family(attention="eager")),
    **_alike("gemma helium hunyuan_v1_dense", Family(HEADS)),
    **_alike("mistral mixtral phi3 starcoder2", Family(WINDOWED)),
    **_alike("beam cohere2 cwm exaone4 olmo3", Family(MIXED)),
    **_alike("gemma3_text ministral", Family(GEMMA)),
    **_alike("cohere2_moe exaone_moe laguna", Family(EXPERTS | MIXED)),
    **_alike("granite_swa", Family(MIXED, attention="eager")),
    **_alike("granitemoe_swa gpt_oss", Family(EXPERTS | MIXED, attention="eager")),
    **_alike("gemma2 vaultgemma", Family(GEMMA | SOFT_CAP, attention="eager")),
    **_alike(
        "aria_text afmoe dots1 ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe hy_v3 jetmoe "
        "kolibri1 mellum minimax_m2 minimax_m3_vl_text olmoe phimoe qwen2_moe qwen3_moe sarvam_moe solar_open",
        Family(EXPERTS),
    ),
    **_alike("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite sarvam_mla youtu", Family(LATENT)),
    "qwen2": Family(WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma3": Family({"text_config": SIZES | GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4}),
    "gemma4_text": Family(PER_LAYER),
    "gemma4": Family(
        {
            "text_config": SIZES | PER_LAYER | {"model_type": "gemma4_text"},
            "vision_config": VISION,
            "audio_config": None,
        }
    ),
    "gemma4_unified_text": Family({"sliding_window": WINDOW}),
    "llama4": Family(
        {
            "text_config": SIZES
            | EXPERTS
            | {
                "intermediate_size_mlp": 48,
                "layer_types": ["full_attention"] * LAYERS,
                "no_rope_layers": [1] * LAYERS,
                "attention_chunk_size": None,
            },
            "vision_config": VISION
            | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
        }
    ),
    # ---- refused by what the model says
    **_alike(
        "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm xlm-roberta "
        "xlm-roberta-xl xmod",
        Family(refusal=LATER),
    ),
    **_alike("bart blenderbot marian mbart pegasus plbart whisper", Family(BOTH_SIDES, "no cache; no position_ids")),
    **_alike("blenderbot-small trocr", Family(BOTH_SIDES, "no position_ids", "eager")),
    **_alike("bloom mpt roformer", Family(refusal="no position_ids", attention="eager")),
    "openai-gpt": Family(refusal="no cache", attention="eager"),
    **_alike("dory falcon_h1 jamba lfm3 minimax olmo_hybrid recurrent_gemma", Family(refusal=STATE)),
    **_alike("falcon_mamba mamba rwkv xlstm", Family(refusal=STATE, attention="eager")),
    "mamba2": Family({"num_heads": 4, "head_dim": 16}, STATE, "eager"),
    **_alike("bamba granitemoehybrid", Family(MAMBA, STATE)),
    **_alike("inkling_text lara_mini nemotron_h", Family(EXPERTS, STATE)),
    **_alike("qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text", Family(EXPERTS | LINEAR, STATE)),
    **_alike("axk2 bailing_hybrid deepseek_v32 glm_moe_dsa", Family(LATENT, STATE)),
    "zamba": Family({"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2}, STATE),
    "zamba2": Family({"layer_types": ["linear_attention", "hybrid", "linear_attention"]}, STATE),
    "qwen3_5": Family(
        {
            "text_config": SIZES | LINEAR,
            "vision_config": {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
            | {"out_hidden_size": 32},
        },
        STATE,
    ),
    "llama4_text": Family(EXPERTS, "layer types .*chunked_attention"),
    "gemma3n_text": Family(
        PER_LAYER
        | {
            "layer_types": ["full_attention"] * LAYERS,
            "intermediate_size": [48] * LAYERS,
            "activation_sparsity_pattern": [0.0] * LAYERS,
            "laurel_rank": 4,
        },
        "lists of 3 blocks where one is needed",
    ),
    "hrm_text": Family(refusal="0 lists of 24 blocks"),
    "longcat_flash": Family(LATENT, "lists of 2 blocks where one is needed"),
    "rembert": Family({}, "embedding of width 256 beside hidden states of width 32", "eager"),
    "xlm": Family({}, "lists of 3 blocks where one is needed", "eager"),
    # ---- refused by the probe's numbers
    "big_bird": Family({}, DIFFERS, "eager"),
    "doge": Family({"keep_window_size": 4}, DIFFERS),  # keys are chosen by rank among all that are there
    "megatron-bert": Family({}, DIFFERS, "eager"),
    "minicpm3": Family(LATENT, DIFFERS),  # the head's states are scaled
    "modernbert-decoder": Family(refusal=DIFFERS),  # the head has a layer of its own
    # ---- refused under sdpa, which transformers has not for them (most are refused under eager for another reason)
    **_alike("bigbird_pegasus mvp", Family(BOTH_SIDES, NO_SDPA)),
    "deepseek_v4": Family(LATENT, NO_SDPA),
    **_alike("flint mimo_v2_flash", Family(EXPERTS, NO_SDPA)),
    "cpmant": Family({"dim_head": 8, "prompt_length": 2, "prompt_types": 2, "segment_types": 2, "dim_ff": 48}, NO_SDPA),
    "gpt_neo": Family({"attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW}, NO_SDPA),
    "git": Family({"vision_config": VISION}, NO_SDPA),
    # ---- refused by transformers
    "emu3": Family(
        {
            "text_config": SIZES,
            "vq_config": {"base_channels": 32, "num_res_blocks": 1, "embed_dim": 8, "latent_channels": 8}
            | {"codebook_size": 64, "channel_multiplier": [1, 1]},
        },
        "cannot load",
    ),
}

NOT_BUILT = {
    "no sizes make it tiny": "blt dots3_note dots3_note_text gemma4_unified gemma4_unified_assistant hy_v4 "
    "inkling2_loop_text inkling2_text kimi_linear moshi moss_transcribe_diarize phi4_multimodal qwen3_5_moe roc_bert",
    "its configuration does not build the model": "cohere_compass_text dbrx gemma4_assistant got_ocr2 lfm2_moe mllama "
    "musicgen musicgen_melody prophetnet qwen4_exp reformer xlnet zaya",
    "needs the package timm": "gemma3n",
}
"""Families that no test builds, by the reason."""


def write_family(folder: Path, kind: str, family: Family) -> Path:
    """Write a tiny random model of a family, as a folder that a user could name, with a tokenizer of 259 bytes."""
    config = AutoConfig.for_model(kind, **(SIZES | family.sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(3)  # logits far enough apart for differences to show
    model.save_pretrained(folder)
    tiny.make_tokenizer(tiny.CHATML, "<|extra|>").save_pretrained(folder)
    return folder
