"""Targets by name: a local folder, a hub id, and what tells one target from another."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import tiny
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.attention import GROUPED, stock_attention
from eagle3_lab.target_model.loading import TargetChoice, weights_hash
from eagle3_lab.target_model.probe import probe
from eagle3_lab.types import Batch, Needs

Edit = Callable[[dict], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama saved in bfloat16, with a tokenizer that has a chat template."""
    place = tiny.write_target(tmp_path_factory.mktemp("target"))
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    model.save_pretrained(place)
    return place


def copy_of(folder: Path, to: Path, file: str = "", edit: Edit | None = None) -> Path:
    """The same folder elsewhere, one of its JSON files edited."""
    shutil.copytree(folder, to)
    if edit is not None:
        said = json.loads((to / file).read_text())
        edit(said)
        (to / file).write_text(json.dumps(said))
    return to


def one_line(choice: TargetChoice) -> str:
    """What loading says, which must be one line."""
    with pytest.raises(UserError) as caught:
        choice.load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- folders


def test_a_local_folder_is_loaded_in_the_dtype_asked_for_and_described(folder: Path) -> None:
    target = TargetChoice(str(folder), dtype=torch.float64).load()
    assert target.dtype == torch.float64 and target.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    spec = target.spec
    assert (spec.name, spec.layers, spec.hidden, spec.vocab) == (str(folder), tiny.LAYERS, tiny.HIDDEN, tiny.VOCAB)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, tiny.HIDDEN // 4)
    assert (spec.intermediate, spec.max_positions) == (2 * tiny.HIDDEN, tiny.CONTEXT)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    assert TargetChoice(str(folder), dtype=torch.float64).load(torch.bfloat16).dtype == torch.bfloat16


def test_the_attention_asked_for_is_used(folder: Path) -> None:
    for attention, runs in (("sdpa", GROUPED), ("eager", "eager")):
        target = TargetChoice(str(folder), attention=attention).load()
        assert target.model.config._attn_implementation == runs
        with stock_attention(target.model):
            assert target.model.config._attn_implementation == attention
        assert target.model.config._attn_implementation == runs


# ---------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=["auto", "by hand"])
def test_a_target_spread_by_a_device_map_is_the_same_target(folder: Path, device_map: Any) -> None:
    plain, spread = (TargetChoice(str(folder), device_map=where).load() for where in (None, device_map))
    batch = Batch(torch.arange(12).view(1, 12), torch.ones(1, 12, dtype=torch.bool), *rows_of(12))
    needs = Needs(layers=(0, 2, 4), top=True, logits=True)
    mine, theirs = (target.features(batch.to(target.device), needs) for target in (spread, plain))
    torch.testing.assert_close(mine.logits, theirs.logits)
    assert spread.spec == plain.spec


def rows_of(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long)


@pytest.mark.gpu
def test_a_target_whose_layers_lie_on_two_devices_is_the_same_target(folder: Path) -> None:
    """The second half of the layers, norm and head on the accelerator, embedding and cache's book-keeping not."""
    plain = TargetChoice(str(folder), device="cpu").load()
    there = TargetChoice(str(folder), device="cpu").load()
    inner = there.model.model
    for part in (*inner.layers[2:], inner.norm, there.model.lm_head):
        add_hook_to_module(part.to("cuda"), AlignDevicesHook(execution_device="cuda"))
    batch = Batch(torch.arange(12).view(1, 12), torch.ones(1, 12, dtype=torch.bool), *rows_of(12))
    needs = Needs(layers=(1, 3), top=True, logits=True)
    for mine, theirs in zip(there.features(batch, needs).taps, plain.features(batch, needs).taps, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert probe(there) < 1e-3
    assert torch.equal(there.head_rows(torch.tensor([3, 5])), plain.head_rows(torch.tensor([3, 5])))


def test_a_device_beside_a_device_map_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="target.device is 'cpu' and target.device_map is given: leave one out"):
        TargetChoice(str(folder), device="cpu", device_map="auto")


# ------------------------------------------------------------------------------------------------------- identities


def test_one_checkpoint_has_one_hash_in_float32_and_bfloat16(folder: Path) -> None:
    choice = TargetChoice(str(folder), probe=False)
    hashes = {choice.load(dtype).spec.weights_hash for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    assert len(hashes) == 1


def test_a_float32_checkpoint_has_the_hash_of_its_bfloat16_loads(tmp_path: Path) -> None:
    choice = TargetChoice(str(tiny.write_target(tmp_path / "single")), probe=False)
    assert choice.load(torch.float32).spec.weights_hash == choice.load(torch.bfloat16).spec.weights_hash


def test_one_sampled_weight_in_any_parameter_changes_the_hash(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    seen = {weights_hash(model)}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():  # the first weight is sampled whatever the size
            parameter.view(-1)[0] += 0.5
            seen.add(weights_hash(model))
            parameter.view(-1)[0] -= 0.5
        small = parameters["model.norm.weight"]  # 32 weights: all of them are sampled
        small[31] *= 2
        seen.add(weights_hash(model))
    assert len(seen) == len(parameters) + 2


def test_the_tokenizer_hash_tells_tokenizers_and_the_template_hash_templates(folder: Path, tmp_path: Path) -> None:
    spec = TargetChoice(str(folder), probe=False).load().spec
    template = tiny.CHATML.replace("assistant", "helper")
    other_template = TargetChoice(str(tiny.write_target(tmp_path / "a", template=template)), probe=False).load().spec
    other_tokens = TargetChoice(str(tiny.write_target(tmp_path / "b", special="<|more|>")), probe=False).load().spec
    assert other_template.tokenizer_hash == spec.tokenizer_hash
    assert other_template.template_hash != spec.template_hash
    assert other_tokens.tokenizer_hash != spec.tokenizer_hash
    assert other_tokens.template_hash == spec.template_hash


def test_target_and_chat_call_a_template_by_the_same_hash(folder: Path) -> None:
    target = TargetChoice(str(folder), probe=False).load()
    assert isinstance(target.tokenizer, PreTrainedTokenizerFast)
    assert Chat(target.tokenizer).template_hash == target.spec.template_hash


def test_every_end_token_of_model_and_tokenizer_ends(folder: Path, tmp_path: Path) -> None:
    tokenizer_end = AutoTokenizer.from_pretrained(folder).eos_token_id
    for number, (said, expected) in enumerate(
        ((5, {5, tokenizer_end}), ([7, 5, tokenizer_end], {5, 7, tokenizer_end}), (None, {tokenizer_end}))
    ):
        place = copy_of(
            folder, tmp_path / str(number), "generation_config.json", lambda c, said=said: c.update(eos_token_id=said)
        )
        if said is None:  # transformers takes it from the model's own configuration otherwise
            config = json.loads((place / "config.json").read_text())
            (place / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
        assert TargetChoice(str(place), probe=False).load().spec.end_tokens == tuple(sorted(expected))


# ----------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_hub_id_offline_is_one_line_and_asks_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def refuse(*where: object, **_: object) -> None:
        asked.append(where)
        raise OSError("no network in this test")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read once, at import, into the constant
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    said = one_line(TargetChoice("nobody/has-this-model"))
    assert said.startswith("target.model: cannot load 'nobody/has-this-model' (")
    assert said.endswith("a folder, a hub id, or 'embedded'")
    assert not asked


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all"])
def test_a_path_that_is_no_folder_is_never_taken_for_a_hub_id(name: str) -> None:
    assert one_line(TargetChoice(name)).startswith(f"target.model: no folder {name}; a folder with config.json")


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    assert one_line(TargetChoice(str(tmp_path))).startswith(f"target.model: cannot load {str(tmp_path)!r} (")


def test_a_folder_without_weights_or_with_half_of_them_is_one_line(folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path / "none")
    (place / "model.safetensors").unlink()
    assert "cannot load" in one_line(TargetChoice(str(place)))
    half = copy_of(folder, tmp_path / "half")
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "cannot load" in one_line(TargetChoice(str(half)))


def test_a_broken_configuration_is_one_line(folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path / "broken")
    (place / "config.json").write_text('{"model_type": "llama", ')
    assert "cannot load" in one_line(TargetChoice(str(place)))


def test_a_model_that_is_no_causal_lm_is_one_line(folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path / "t5", "config.json", lambda c: c.update(model_type="t5", architectures=None))
    assert "cannot load" in one_line(TargetChoice(str(place)))


def test_a_device_that_is_not_there_is_one_line(folder: Path) -> None:
    said = one_line(TargetChoice(str(folder), device="cuda:99"))
    assert said.startswith("target.device: 'cuda:99' cannot be used (")
    assert one_line(TargetChoice(str(folder), device="gpu")).startswith("target.device: 'gpu' cannot be used (")


def test_capturing_on_a_cpu_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^target\.capture: needs CUDA, the target is on cpu; false$"):
        TargetChoice(str(folder), device="cpu", capture=True).load()
