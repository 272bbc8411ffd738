"""Public EAGLE-3 heads: read with golden results, written back bit for bit, refused where they differ."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from random_targets import random_target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, TopFeature
from eagle3_lab.errors import UserError
from eagle3_lab.formats import files, loading
from eagle3_lab.formats.description import describe as described
from eagle3_lab.formats.writing import write as write_head
from eagle3_lab.interfaces import FeatureSource
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe
from eagle3_lab.types import Rows

HIDDEN, VOCAB, KEPT = 32, 97, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "draft_vocab_size": KEPT,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return random_target(num_hidden_layers=8, dtype=torch.float32)


def stand_in(dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """A random head by the public names and shapes, written down here and nowhere else."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (KEPT, HIDDEN),
    }
    tensors = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    ids = torch.randperm(VOCAB, generator=draw)[:KEPT].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return tensors | {"d2t": ids - torch.arange(KEPT), "t2d": t2d}


def put(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG, binary: bool = False) -> str:
    """Write a head as the public repositories hold it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
        return f"{folder}/pytorch_model.bin"
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write(folder: Path, target: HFTarget, source: FeatureSource, draft: Any, dtype: torch.dtype | None = None) -> None:
    write_head(folder, described(target, source, draft, dtype), target, "official")


def loaded(place: str, target: HFTarget, source: FeatureSource | None = None, draft: Eagle3 | None = None) -> Any:
    source, draft = source or FusedFeature(), draft or Eagle3(head="random")
    loading.load(loading.read(place), target, source, draft)
    return source, draft


# ---- golden


@pytest.mark.parametrize("made_by", ["official", "specforge"])
def test_a_public_head_read_by_its_format_gives_the_golden_states_and_logits(oracles: Path, made_by: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(oracles / "target", dtype=torch.float32)
    target = HFTarget(model, None, describe(model, None, "oracle"))
    source, draft = loaded(str(oracles / "heads" / made_by), target)
    told = load_file(oracles / f"{made_by}_infer.safetensors")
    inputs = load_file(oracles / "inputs.safetensors")
    taps = inputs["hidden_states"][:1].split(target.spec.hidden, dim=-1)
    rows = Rows(torch.arange(24)[None], torch.zeros(1, 24, dtype=torch.long))
    out = draft.step(draft.start(source(taps)), told["shifted_ids"], rows, 0, DenseUnrolled())
    hidden, logits = ("prefill_hidden", "prefill_logits") if made_by == "official" else ("hidden", "logits")
    torch.testing.assert_close(out.carry, told[hidden], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(draft.logits(out.head_in[0], 0)[None], told[logits], rtol=1e-5, atol=1e-5)
    assert torch.equal(draft.draft_vocab.d2t, inputs["d2t"])


# ---- there and back


@pytest.mark.parametrize("binary", [True, False], ids=["pytorch_model.bin", "model.safetensors"])
def test_a_head_in_half_precision_comes_back_bit_for_bit(tmp_path: Path, target: HFTarget, binary: bool) -> None:
    tensors = stand_in()
    place = put(tmp_path / "head", tensors, binary=binary)
    source, draft = loaded(place, target)
    assert torch.equal(draft.lm_head.weight, tensors["lm_head.weight"].float())
    write(tmp_path / "back", target, source, draft, dtype=torch.float16)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in tensors.items())
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in set(CONFIG) - {"architectures", "max_position_embeddings"}:
        assert said[key] == CONFIG[key], key
    assert (said["rope_theta"], said["rope_scaling"]) == (10000.0, None)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    assert loading.content_hash(str(tmp_path / "back")) != loading.content_hash(place)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
BY_TYPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA3 = {"head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"rope_parameters": BY_TYPE} | GEMMA3),
        ("gemma3_text", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}} | GEMMA3),
    ],
    ids=["llama", "llama older", "gemma3", "gemma3 older"],
)
def test_a_scaled_rope_is_written_in_both_layouts_and_read_from_either(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    target = random_target(kind, num_hidden_layers=8, dtype=torch.float32, **options)
    source, draft = FusedFeature(), Eagle3(head="random")
    draft.build(target, source.build(target), torch.arange(KEPT))
    write(tmp_path / "head", target, source, draft)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["rope_parameters"] == LINEAR
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for number, layout in enumerate((("rope_parameters",), ("rope_theta", "rope_scaling"))):
        one = {name: value for name, value in config.items() if name not in layout}
        again = loaded(put(tmp_path / f"one{number}", tensors, one), target)[1]
        torch.testing.assert_close(again.rotary.inv_freq, draft.rotary.inv_freq)


def test_a_rope_without_fields_in_this_layout_is_refused_before_anything_is_written(
    tmp_path: Path, target: HFTarget
) -> None:
    source, draft = FusedFeature(), Eagle3(head="random")
    draft.build(target, source.build(target), torch.arange(KEPT))
    draft.rotary.inv_freq.mul_(2)  # as of a family whose rule is not Llama's
    with pytest.raises(UserError, match=r"no fields for the rope .*; train one with model\.draft\.rope_base set"):
        write(tmp_path / "head", target, source, draft)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("target_options", "source_options", "draft_options"),
    [
        ({}, {"layers": [1, 4, 7]}, {}),
        ({}, {"layers": [0, 2, 4, 8]}, {"heads": 6, "kv_heads": 3, "head_dim": 12, "intermediate": 20}),
        ({}, {"width": 16}, {"embedding": "own", "rms_eps": 1e-5}),
        ({"rope_parameters": LLAMA3}, {}, {}),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {}, {"rope_base": 500.0}),
        ({"tie_word_embeddings": True}, {}, {}),
        ({"num_hidden_layers": 4}, {}, {}),
    ],
    ids=["layers", "sizes", "width", "llama3", "base", "tied", "small"],
)
def test_a_head_of_ours_is_written_and_read_back_equal(
    tmp_path: Path, target_options: dict, source_options: dict, draft_options: dict
) -> None:
    target = random_target(**({"num_hidden_layers": 8, "dtype": torch.float32} | target_options))

    def parts() -> tuple[FusedFeature, Eagle3]:
        return FusedFeature(**source_options), Eagle3(head="random", **draft_options)

    source, draft = parts()
    draft.build(target, source.build(target), torch.arange(3, 60, 2))
    write(tmp_path / "head", target, source, draft)
    again = loaded(str(tmp_path / "head"), target, *parts())
    torch.testing.assert_close(again[0].state_dict(), source.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again[1].state_dict(), draft.state_dict(), rtol=0, atol=0)


def test_a_projected_embedding_is_written_as_the_table_that_it_is(tmp_path: Path, target: HFTarget) -> None:
    source, draft = FusedFeature(width=16), Eagle3(head="random", embedding="projected")
    draft.build(target, source.build(target), torch.arange(KEPT))
    write(tmp_path / "head", target, source, draft)
    own = loaded(str(tmp_path / "head"), target, FusedFeature(width=16), Eagle3(head="random", embedding="own"))[1]
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(own.embed(ids), draft.embed(ids))


def test_layer_lists_are_written_for_both_ways_of_counting_and_read_from_either(
    tmp_path: Path, target: HFTarget
) -> None:
    source, draft = FusedFeature([1, 4, 7]), Eagle3(head="random")
    draft.build(target, source.build(target), torch.arange(KEPT))
    write(tmp_path / "head", target, source, draft)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for number, key in enumerate(("eagle_aux_hidden_state_layer_ids", "eagle_config")):
        one = {name: value for name, value in config.items() if name != key}
        loaded(put(tmp_path / f"one{number}", tensors, one), target, FusedFeature([1, 4, 7]))


def test_a_head_without_a_map_says_every_target_id(tmp_path: Path, target: HFTarget) -> None:
    tensors = stand_in()
    del tensors["d2t"], tensors["t2d"]
    with pytest.raises(UserError, match="no d2t, though its lm_head has 40 rows and the target 97 ids"):
        loaded(put(tmp_path / "short", tensors), target)
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    whole = put(tmp_path / "whole", tensors, CONFIG | {"draft_vocab_size": VOCAB})
    source, draft = loaded(whole, target)
    assert torch.equal(draft.vocab, torch.arange(VOCAB))
    write(tmp_path / "back", target, source, draft)
    assert set(load_file(tmp_path / "back" / "model.safetensors")) == set(tensors), "vLLM has no place for a map"
    loaded(str(tmp_path / "back"), target)
    with pytest.raises(UserError, match="a t2d that does not mark each"):
        tensors["t2d"] = torch.arange(VOCAB) > 0
        loaded(put(tmp_path / "marked", tensors, CONFIG | {"draft_vocab_size": VOCAB}), target)


def test_a_map_goes_out_and_comes_back_as_offsets_of_the_kept_ids(tmp_path: Path) -> None:
    target = random_target(num_hidden_layers=8, dtype=torch.float32, vocab_size=16)
    source, draft = FusedFeature(), Eagle3(head="random")
    draft.build(target, source.build(target), torch.tensor([5, 9, 13]))
    write(tmp_path / "head", target, source, draft)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(tensors["d2t"], torch.tensor([5, 8, 11]))
    assert torch.equal(tensors["t2d"].nonzero().flatten(), torch.tensor([5, 9, 13]))
    assert torch.equal(loaded(str(tmp_path / "head"), target)[1].vocab, torch.tensor([5, 9, 13]))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    absolute = tensors | {"d2t": torch.tensor([5, 9, 13])}
    with pytest.raises(UserError, match="d2t holds absolute target ids; it must hold offsets"):
        loaded(put(tmp_path / "absolute", absolute, config), target)
    del absolute["t2d"]
    with pytest.raises(UserError, match="may be target ids or offsets; add t2d"):
        loaded(put(tmp_path / "either", absolute, config), target)


def test_a_head_is_written_to_the_same_bytes_and_says_whose_its_embedding_is(tmp_path: Path, target: HFTarget) -> None:
    source, draft = FusedFeature(), Eagle3(head="random")
    draft.build(target, source.build(target), torch.arange(3, 60, 2))
    for folder in ("one", "two"):
        write(tmp_path / folder, target, source, draft)
    files = [tmp_path / folder / "model.safetensors" for folder in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "embed_tokens.weight" not in load_file(files[0])
    assert json.loads((tmp_path / "one" / "config.json").read_text())["embed_tokens"] == "the target's"


def test_later_names_the_targets_own_embedding_and_derived_buffers_are_understood(
    tmp_path: Path, target: HFTarget
) -> None:
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in stand_in().items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().to(torch.bfloat16)
    assert "embed.tokens.weight" not in loaded(put(tmp_path / "head", tensors), target)[1].state_dict()
    trained = target.model.get_input_embeddings().weight.detach().clone()
    trained[5, 0] += 1e-5
    tensors["embed_tokens.weight"] = trained
    other = put(tmp_path / "other", tensors)
    with pytest.raises(UserError, match="an embedding of its own; set model.draft.embedding: own"):
        loaded(other, target)
    own = loaded(other, target, draft=Eagle3(head="random", embedding="own"))[1]
    assert torch.equal(own.embed(torch.arange(VOCAB)), tensors["embed_tokens.weight"])


# ---- refusals, one line each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 96}, "vocab_size is 96, the experiment has 97; another target is needed"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, the experiment has 32; another target"),
        ({"hidden_size": 64}, "hidden_size is 64, the experiment has 32; set model.features.width: 64"),
        ({"intermediate_size": 50}, "set model.draft.intermediate: 50"),
        ({"num_attention_heads": 8, "head_dim": 8}, "set model.draft.heads: 8"),
        ({"num_attention_heads": None}, "config.json: no num_attention_heads"),
        ({"num_key_value_heads": 4}, "set model.draft.kv_heads: 4"),
        ({"head_dim": 16, "num_key_value_heads": 2}, "set model.draft.head_dim: 16"),
        ({"num_hidden_layers": 2}, "set model.draft.num_layers: 2"),
        ({"rms_norm_eps": 1e-5}, "set model.draft.rms_eps: 1e-05"),
        ({"rms_norm_eps": None}, "config.json: no rms_norm_eps"),
        (
            {"rope_theta": 5e5},
            "turns by rope default of base 500000.0, .* set model.draft.rope_base: 500000.0",
        ),
        ({"rope_scaling": LLAMA3}, r"turns by rope llama3 .*rope_base: null \(the target's own"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic': one of default, linear, llama3",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
            r"vLLM reads .*\[0, 3, 6\].*\[1, 4, 7\]; set",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, r"set model.features.layers: \[1, 4, 7\]"),
        ({"draft_vocab_size": 41}, "says draft_vocab_size 41, and lm_head.weight has 40 rows"),
        ({"norm_before_residual": True}, "norm_before_residual: a variant that no part of ours is"),
        ({"norm_output": True}, "norm_output is True, .* set model.draft.feedback: post_norm"),
        ({"fc_norm": True}, "fc_norm is True, .* set model.features.normed: true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; 'silu' is needed"),
    ],
)
def test_what_disagrees_with_the_experiment_is_told_with_the_key_to_change(
    tmp_path: Path, target: HFTarget, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as told:
        loaded(put(tmp_path / "head", stand_in(), CONFIG | change), target)
    assert "\n" not in str(told.value)


def change_of(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_of("midlayer.hidden_norm.weight", None), "no tensor layers.0.hidden_norm.weight"),
        (change_of("fc.weight", torch.ones(HIDDEN, 64)), r"another shape .* fc.weight is \[32, 64\], \[32, 96\] fits"),
        (change_of("extra.weight", torch.ones(1)), "tensors that no such head has: extra.weight"),
        (change_of("d2t", torch.arange(KEPT) * 9), "draft vocabulary ids must be within|t2d|disagree"),
        (change_of("t2d", torch.ones(VOCAB, dtype=torch.bool)), "d2t and t2d disagree"),
        (change_of("t2d", torch.ones(VOCAB)), "t2d is of torch.float32; torch.bool is needed"),
        (change_of("d2t", torch.zeros(KEPT)), r"d2t is \[40\] of torch.float32; \[40\] whole numbers"),
        (change_of("d2t", torch.zeros(39, dtype=torch.int64)), r"d2t is \[39\] of torch.int64; \[40\] whole numbers"),
        (change_of("d2t", None), "no d2t, though its lm_head has 40 rows and the target 97 ids"),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named(
    tmp_path: Path, target: HFTarget, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = stand_in()
    change(tensors)
    with pytest.raises(UserError, match=message):
        loaded(put(tmp_path / "head", tensors), target)


def test_other_parts_than_a_public_heads_are_refused(tmp_path: Path, target: HFTarget) -> None:
    head = loading.read(put(tmp_path / "head", stand_in()))
    with pytest.raises(UserError, match="is Eagle3 on FusedFeature, the experiment has Eagle1 on TopFeature"):
        loading.load(head, target, TopFeature(), Eagle1())


def test_files_that_are_missing_broken_or_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = put(tmp_path / "head", stand_in(), binary=True)
    place = Path(binary).parent
    with pytest.raises(UserError, match=r"pytorch_model\.bin is read on request only: .*/head/pytorch_model\.bin"):
        loading.read(str(place))
    assert loading.read(binary).kind == "EAGLE-3"
    monkeypatch.setattr(files, "LARGEST", 1000)
    with pytest.raises(UserError, match=r"at most 0 GiB of a pickled file are read"):
        loading.read(binary)
    monkeypatch.undo()
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": print}))
    with pytest.raises(UserError, match="cannot be read as a file of tensors alone"):
        loading.read(binary)
    torch.save([torch.ones(1)], place / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds a list; a mapping from names to tensors"):
        loading.read(binary)
    (place / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        loading.read(str(place))
    for file in ("model.safetensors", "pytorch_model.bin"):
        (place / file).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors or medusa_lm_head\.safetensors is needed"):
        loading.read(str(place))
    save_file({"tok.weight": torch.ones(1)}, place / "model.safetensors")
    with pytest.raises(UserError, match=r"no draft head by its tensors \(tok\.weight\); EAGLE-3, EAGLE, HASS or"):
        loading.read(str(place))
    (place / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        loading.read(str(place))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no folder nobody/nothing, and the hub gives no config.json of that id"):
        loading.read("nobody/nothing")


def test_a_head_of_two_layers_cannot_be_written_in_this_layout(tmp_path: Path, target: HFTarget) -> None:
    source, draft = FusedFeature(), Eagle3(num_layers=2)
    draft.build(target, source.build(target), torch.arange(KEPT))
    with pytest.raises(UserError, match=r"official cannot hold .*: it has one layer \(midlayer\), the draft has 2"):
        write(tmp_path / "head", target, source, draft)
