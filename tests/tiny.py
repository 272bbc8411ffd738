"""A tiny random target as a Hugging Face folder, and conversations that it answered itself: the whole lab in seconds.

The model writes printable ASCII only, one byte a token, so its answers read back as the tokens it wrote: dimension 0
of the residual stream is a constant that no block changes, and the head reads it as a bias.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB, HIDDEN, LAYERS, CONTEXT = 300, 32, 4, 256
TRAIN, HELD_OUT = 32, 8
ANSWER = 12  # tokens at most: too few for an answer that loops


@dataclass(frozen=True)
class TinyLab:
    """The target's folder and the conversations' file."""

    target: Path
    data: Path


def make(folder: Path) -> TinyLab:
    """Write both below ``folder``."""
    lab = TinyLab(write_target(folder / "target"), folder / "conversations.jsonl")
    write_conversations(TargetChoice(str(lab.target)).load(), lab.data)
    return lab


def write_target(
    folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, template: str | None = CHATML, special: str = "<|extra|>"
) -> Path:
    """A target of these sizes; ``special`` is one more special token, so that tokenizers can differ."""
    tokenizer = make_tokenizer(template, special)
    model = make_model(hidden, vocab, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(template: str | None, special: str) -> PreTrainedTokenizerFast:
    """256 bytes without merges, three special tokens; ``<|im_end|>`` ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>", special)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def make_model(hidden: int, vocab: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A random Llama that prefers a few printable letters and ends now and then."""
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        bias = torch.full((vocab,), -40.0)
        bias[tokenizer("abcdefghijklmnopqrstuvwxyz ,.", add_special_tokens=False)["input_ids"]] = 0.0
        bias[end] = 1.5
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=0.3 if "embed" in name else 0.8 * parameter.shape[1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter[0] = 0.0
            model.get_input_embeddings().weight[:, 0] = 1.0
            model.get_output_embeddings().weight[:, 1:] *= 2.0
            model.get_output_embeddings().weight[:, 0] = bias
    model.generation_config = GenerationConfig(eos_token_id=end)
    return model


def write_conversations(target: HFTarget, path: Path) -> None:
    """TRAIN sampled conversations, and HELD_OUT greedy ones that are marked."""
    draw = random.Random(0)
    questions = ["".join(draw.choices("abcdefgh ", k=6)).strip() or "a" for _ in range(TRAIN + HELD_OUT)]
    questions = [f"{i} {question}" for i, question in enumerate(questions)]
    with path.open("w") as file:
        for split, temperature, asked in (("train", 1.0, questions[:TRAIN]), ("held_out", 0.0, questions[TRAIN:])):
            for record in answered(target, asked, temperature):
                if record["messages"][1]["content"].strip():
                    file.write(json.dumps(record | {"split": split}) + "\n")


def answered(target: HFTarget, questions: list[str], temperature: float) -> list[dict]:
    """One record a question, in their order."""
    chat = Chat(target.tokenizer)
    prompts = [chat.prompt_ids([{"role": "user", "content": question}]) for question in questions]
    made = answers(target, prompts, temperature=temperature, max_new_tokens=ANSWER, rows=8)
    return [
        {
            "id": questions[one.index],
            "temperature": temperature,
            "cut": one.cut,
            "messages": [
                {"role": "user", "content": questions[one.index]},
                {"role": "assistant", "content": target.tokenizer.decode(one.tokens, skip_special_tokens=True)},
            ],
        }
        for one in sorted(made, key=lambda one: one.index)
    ]
