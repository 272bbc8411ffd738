"""A byte-level tokenizer of 260-odd tokens that any chat template can be put on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_lab.types import TargetSpec

# Both without generation markers, as nearly every published template.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def _tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("Ċ", "Ċ"), ("h", "e")]  # a double newline is one token, and "he"
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    found = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|im_end|>")
    found.chat_template = template
    return found


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Builds the tokenizer for a chat template (None: without one)."""
    return _tokenizer


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    """ChatML with a default system prompt, as the embedded target's."""
    return _tokenizer(CHATML)


@pytest.fixture(scope="session")
def llama3() -> PreTrainedTokenizerFast:
    """Headers, a BOS and stripped contents, as Llama 3's."""
    return _tokenizer(LLAMA3)


@pytest.fixture(scope="session")
def spec(chatml: PreTrainedTokenizerFast) -> TargetSpec:
    """The sizes of a target that could use the ChatML tokenizer."""
    return TargetSpec(
        name="tiny",
        hidden=8,
        intermediate=16,
        layers=4,
        heads=2,
        kv_heads=1,
        head_dim=4,
        vocab=len(chatml),
        rms_eps=1e-5,
        max_positions=512,
        end_tokens=(chatml.get_vocab()["<|im_end|>"],),
    )
