"""`prepare` with a target that cannot generate, whatever the reason: one line, exit code 2, nothing answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_prepare import RUNS, asked, experiment, files, run, write
from tiny import CHATML, HIDDEN, VOCAB, TinyLab, make_model, make_tokenizer, write_target
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaForSequenceClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

BERT = BertConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    make_tokenizer(CHATML, "<|extra|>").save_pretrained(folder)
    return folder


def llama() -> PreTrainedModel:
    return make_model(HIDDEN, VOCAB, make_tokenizer(CHATML, "<|extra|>"))


def without_an_end(folder: Path) -> Path:
    """Neither the model nor the tokenizer names an end token."""
    model = llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    saved(folder, model)
    place = folder / "tokenizer_config.json"
    place.write_text(
        json.dumps({key: said for key, said in json.loads(place.read_text()).items() if key != "eos_token"})
    )
    return folder


def without_room(folder: Path) -> Path:
    """A hundred positions: less than a prompt and the answer asked for."""
    write_target(folder)
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"max_position_embeddings": 100}))
    return folder


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no head": (lambda f: saved(f, LlamaModel(llama().config)), "lacks 1 of its weights, the first is lm_head.weight"),
    "a classifier": (
        lambda f: saved(f, LlamaForSequenceClassification(llama().config)),
        "lacks 1 of its weights, the first is lm_head.weight",
    ),
    "an encoder": (lambda f: saved(f, BertModel(BERT)), "of its weights, the first is cls.predictions.bias"),
    "a masked language model": (
        lambda f: saved(f, BertForMaskedLM(BERT)),
        "target: attention to later tokens; a decoder with full attention would be right",
    ),
    "encoder and decoder": (
        lambda f: saved(
            f, T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2))
        ),
        "cannot load ",
    ),
    "recurrent": (
        lambda f: saved(f, MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2))),
        "target.attention: sdpa, which transformers has not for MambaForCausalLM",
    ),
    "no end token": (without_an_end, "does not stop (end tokens [])"),
    "no room": (
        without_room,
        "longer than the target reads)); other prompts, or a smaller prepare.sampling.max_new_tok",
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_that_cannot_generate_is_told_in_one_line(kind: str, tiny: TinyLab, tmp_path: Path) -> None:
    make, said = TARGETS[kind]
    RUNS[:] = [tmp_path]
    prompts = files(write(tmp_path / "m.jsonl", [asked(f"why {i}") for i in range(6)]))
    file = experiment(tiny, tmp_path, prompts, sampling={"max_new_tokens": 95})
    ran = run("prepare", str(file), "--target.model", str(make(tmp_path / "target")))
    assert (ran.code, said in ran.err.splitlines()[-1], ran.out) == (2, True, ""), ran.err
    assert "Traceback" not in ran.err
    assert not list((tmp_path / "cache").glob("prepared/*.jsonl"))
