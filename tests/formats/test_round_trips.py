"""Heads of ours written in each format and read back equal bit for bit, or refused where a format cannot hold them; and
what SGLang's loader would make of the folder for both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_targets import random_target
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.errors import UserError
from eagle3_lab.formats import loading
from eagle3_lab.formats.description import describe
from eagle3_lab.formats.writing import WRITERS, write
from eagle3_lab.interfaces import DraftModel, FeatureSource
from eagle3_lab.target_model.hf_target import HFTarget

Parts = Callable[[], tuple[FeatureSource, DraftModel]]

PRUNED, FULL = torch.arange(3, 60, 2), torch.arange(97)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def eagle3(ids: Tensor = PRUNED, source: dict | None = None, **draft: Any) -> tuple[Parts, Tensor]:
    return lambda: (FusedFeature(**(source or {})), Eagle3(head="random", **draft)), ids


HEADS: dict[str, tuple[tuple[Parts, Tensor], dict, set[str]]] = {
    # name: (parts and vocabulary, the target's options, the formats that cannot hold it)
    "eagle3": (eagle3(), {}, set()),
    "custom layers": (eagle3(source={"layers": [1, 4, 7]}), {}, set()),
    "four layers": (eagle3(source={"layers": [0, 2, 4, 8]}), {}, set()),
    "full vocabulary": (eagle3(FULL), {}, set()),
    "tied": (eagle3(), {"tie_word_embeddings": True}, set()),
    "sizes": (eagle3(heads=6, kv_heads=3, head_dim=12, intermediate=20, rms_eps=1e-5), {}, set()),
    "width": (eagle3(source={"width": 16}, embedding="own"), {}, set()),
    "llama3 rope": (eagle3(), {"rope_parameters": LLAMA3}, set()),
    "linear rope": (eagle3(), {"rope_parameters": LINEAR}, set()),
    "rope base": (eagle3(rope_base=500.0), {"rope_parameters": LINEAR}, set()),
    "eagle3.1": (eagle3(source={"normed": True}, feedback="post_norm"), {}, {"official"}),
    "two layers": (eagle3(num_layers=2), {}, {"official"}),
    "own embedding": (eagle3(embedding="own"), {}, {"engines", "sglang"}),
    "eagle": ((lambda: (TopFeature(), Eagle1(bias=False)), FULL), {}, {"speculators"}),
    "eagle bias": ((lambda: (TopFeature(), Eagle1()), FULL), {}, {"vllm", "engines", "speculators"}),
    "eagle tied": (
        (lambda: (TopFeature(), Eagle1(num_layers=2, bias=False)), FULL),
        {"tie_word_embeddings": True},
        {"speculators"},
    ),
    "medusa": ((lambda: (TopFeature(), Medusa(3, head="random")), FULL), {}, {"sglang", "engines", "speculators"}),
    "medusa shared": (
        (lambda: (TopFeature(), Medusa(2, head="frozen")), FULL),
        {},
        {"sglang", "engines", "speculators"},
    ),
    "medusa blocks": (
        (lambda: (TopFeature(), Medusa(2, 2, head="random")), FULL),
        {},
        {"official", "sglang", "engines", "speculators"},
    ),
    "medusa pruned": ((lambda: (TopFeature(), Medusa(2, head="random")), PRUNED), {}, set(WRITERS)),
}


def a_target(**options: Any) -> HFTarget:
    return random_target(**({"num_hidden_layers": 8, "dtype": torch.float32} | options))


def built(name: str) -> tuple[HFTarget, Parts, FeatureSource, DraftModel]:
    (parts, ids), options, _ = HEADS[name]
    target = a_target(**options)
    source, draft = parts()
    draft.build(target, source.build(target), ids)
    with torch.no_grad():
        for parameter in (*source.parameters(), *draft.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return target, parts, source, draft


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back_from_a_format_bit_for_bit_or_is_refused(tmp_path: Path, name: str, to: str) -> None:
    target, parts, source, draft = built(name)
    folder = tmp_path / "head"
    if to in HEADS[name][2]:
        with pytest.raises(UserError, match=f"the format {to} cannot hold this"):
            write(folder, describe(target, source, draft), target, to)
        assert list(tmp_path.iterdir()) == [], "nothing is left half-written"
        return
    write(folder, describe(target, source, draft), target, to)
    head = loading.read(str(folder))
    for into in (parts(), loading.parts_for(head, target)):
        loading.load(head, target, *into)
        for part, again in zip((source, draft), into, strict=True):
            state, other = part.state_dict(), again.state_dict()
            assert all(torch.equal(other[key], value) for key, value in state.items())
            if name != "medusa shared":  # whose one head is written for each step
                assert set(other) == set(state)


def test_a_folder_that_is_there_and_parts_without_one_are_refused(tmp_path: Path) -> None:
    target, _, source, draft = built("eagle3")
    head = describe(target, source, draft)
    (tmp_path / "head").mkdir()
    with pytest.raises(UserError, match="head: is there already; remove it, or name another folder"):
        write(tmp_path / "head", head, target)
    with pytest.raises(UserError, match="Hydra on TopFeature: no format holds such a head"):
        describe(target, TopFeature(), Hydra())


def test_every_missing_unexpected_and_misshapen_tensor_is_listed_in_one_line(tmp_path: Path) -> None:
    target, parts, source, draft = built("eagle3")
    head = describe(target, source, draft)
    head.tensors["extra.one"] = torch.ones(1)
    head.tensors["fc.weight"] = torch.ones(2, 2)
    del head.tensors["norm.weight"], head.tensors["layers.0.hidden_norm.weight"]
    with pytest.raises(UserError) as message:
        loading.load(head, target, *parts())
    assert "no tensor layers.0.hidden_norm.weight, norm.weight;" in str(message.value)
    assert "tensors that no such head has: extra.one;" in str(message.value)
    assert "fc.weight is [2, 2], [32, 96] fits" in str(message.value)


def test_a_speculators_folder_without_its_norms_place_is_refused(tmp_path: Path) -> None:
    target, _, source, draft = built("eagle3")
    write(tmp_path / "head", describe(target, source, draft), target, "speculators")
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    del config["norm_before_residual"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="no norm_before_residual, which speculators then takes for false and vLLM for"):
        loading.read(str(tmp_path / "head"))


def test_a_bias_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    target, parts, source, draft = built("eagle")
    write(tmp_path / "head", describe(target, source, draft), target, "sglang")
    head = loading.read(str(tmp_path / "head"))
    assert not head.tensors["fc.bias"].any(), "SGLang would leave it unset"
    head.tensors["fc.bias"] += 1
    with pytest.raises(UserError, match=r"bias is false, and fc\.bias is not 0"):
        loading.load(head, target, *parts())


def test_the_golden_head_of_speculators_is_read_as_it_is(oracles: Path) -> None:
    head = loading.read(str(oracles / "heads" / "speculators"))
    assert head.kind == "EAGLE-3"
    assert (head.config["hidden_size"], head.config["draft_vocab_size"], head.config["norm_output"]) == (48, 96, False)


# ---- SGLang's loader, by its rules; not run


def as_sglang_loads(folder: Path, target: HFTarget) -> tuple[dict[str, Tensor], tuple[int, ...], Tensor | None]:
    """Return what SGLang 0.5.23 has after loading an EAGLE-3 head: parameters by its names, the states that it
    captures, and the ids of the draft's rows. A parameter that no tensor reached stays NaN, as it would stay random.

    Source: models/llama_eagle3.py (parameters, load_weights), models/llama.py:929-941 (states),
    model_runner_components/spec_aux_hidden_state.py:190-196 (the nested list).
    """
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0] == "LlamaForCausalLMEagle3" and not config["tie_word_embeddings"]
    width, heads, kv, dim = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    states = config.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    blocks = target.spec.layers
    captured = tuple(one + 1 for one in nested) if nested else (2, blocks // 2, blocks - 3)
    reads = config.get("target_hidden_size", width)
    shapes = {"model.fc.weight": (width, reads * states), "model.norm.weight": (width,)}
    shapes |= {"lm_head.weight": (config["draft_vocab_size"], width)}
    if config.get("fc_norm"):
        shapes |= {f"model.fc_norm.{state}.weight": (reads,) for state in range(states)}
    if "target_hidden_size" in config and reads != width:  # else the target's
        shapes |= {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        wide, begin = (2 * width if layer == 0 else width), f"model.layers.{layer}"
        shapes |= {
            f"{begin}.self_attn.qkv_proj.weight": ((heads + 2 * kv) * dim, wide),
            f"{begin}.self_attn.o_proj.weight": (width, heads * dim),
            f"{begin}.mlp.gate_up_proj.weight": (2 * config["intermediate_size"], width),
            f"{begin}.mlp.down_proj.weight": (width, config["intermediate_size"]),
            f"{begin}.hidden_norm.weight": (width,),
            f"{begin}.post_attention_layernorm.weight": (width,),
        }
        if layer == 0:  # later layers have one that they never read
            shapes |= {f"{begin}.input_layernorm.weight": (width,)}
    held = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    stacked = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", heads * dim),
        "v_proj": ("qkv_proj", (heads + kv) * dim),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", config["intermediate_size"]),
    }
    rows = None
    for file_name, value in load_file(folder / "model.safetensors").items():
        name = file_name.replace("midlayer", "layers.0")
        if "d2t" in name:
            rows = value + torch.arange(len(value))
            continue
        begin = 0
        for part, (whole, place) in stacked.items():
            if part in name:
                name, begin = name.replace(part, whole), place
                break
        name = name if name in held else f"model.{name}"
        if name in held:  # what it does not know it drops
            held[name][begin : begin + len(value)] = value
    return held, captured, rows


FOR_SGLANG = [
    name for name, (_, _, refused) in HEADS.items() if "engines" not in refused and "eagle" != name.split()[0]
]


@pytest.mark.parametrize("name", FOR_SGLANG)
def test_the_folder_for_both_engines_is_whole_by_sglangs_rules(tmp_path: Path, name: str) -> None:
    target, _, source, draft = built(name)
    assert isinstance(source, FusedFeature) and isinstance(draft, Eagle3)
    write(tmp_path / "head", describe(target, source, draft), target)
    held, captured, rows = as_sglang_loads(tmp_path / "head", target)
    unset = [key for key, value in held.items() if value.isnan().any()]
    assert unset == [], "random weights"
    assert captured == source.layers(target.spec.layers)
    assert torch.equal(torch.arange(target.spec.vocab) if rows is None else rows, draft.vocab)
    first = draft.layers[0]
    assert isinstance(first.self_attn.q_proj, nn.Linear)
    joined = torch.cat([first.self_attn.q_proj.weight, first.self_attn.k_proj.weight, first.self_attn.v_proj.weight])
    assert torch.equal(held["model.layers.0.self_attn.qkv_proj.weight"], joined)
    for layer in range(1, draft.num_layers):
        assert torch.equal(held[f"model.layers.{layer}.hidden_norm.weight"], draft.layers[layer].input_layernorm.weight)
