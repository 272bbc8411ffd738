"""The package's chat templates: what they render, letter by letter, and that answers are masked with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.target_model.template import read_template

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]
ANSWER = {"role": "assistant", "content": "So."}
EAGLES = read_template("package:llama3_eagle").partition('set system = "')[2].partition('"')[0].replace("\\n", "\n")


def tokenizer(template: str, bos: str, eos: str, *more: str) -> PreTrainedTokenizerFast:
    """Bytes and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in (bos, eos, *more)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)
    made.chat_template = read_template(template)
    return made


VICUNA = tokenizer("package:vicuna", "<s>", "</s>")
LLAMA = tokenizer("package:llama3_eagle", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
DEEPSEEK = tokenizer(
    "package:deepseek_r1", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
)


def header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (
            VICUNA,
            (
                "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives "
                "helpful, detailed, and polite answers to the user's questions. "
                "USER: Hi ASSISTANT: Hello.</s>USER: Why? ASSISTANT:"
            ),
        ),
        (
            LLAMA,
            (
                f"<|begin_of_text|>{header('system')}{DATES}{EAGLES}<|eot_id|>{header('user')}Hi<|eot_id|>"
                f"{header('assistant')}Hello.<|eot_id|>{header('user')}Why?<|eot_id|>{header('assistant')}"
            ),
        ),
        (
            DEEPSEEK,
            (
                "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\nHello.<｜end▁of▁sentence｜><｜User｜>Why?"
                "<｜Assistant｜><think>\n"
            ),
        ),
    ],
    ids=["vicuna", "llama3_eagle", "deepseek_r1"],
)
def test_a_prompt_is_rendered_letter_by_letter_and_its_answers_are_masked(
    of: PreTrainedTokenizerFast, expected: str
) -> None:
    chat = Chat(of)
    assert of.decode(chat.prompt_ids(TALK)) == expected
    encoded = chat.encode([*TALK, ANSWER])
    written = [token for token, mine in zip(encoded.ids, encoded.supervised, strict=True) if mine]
    assert of.decode(written).replace(" ", "") == f"Hello.{of.eos_token}So.{of.eos_token}"
    assert chat.end_of_turn == of.eos_token_id


@pytest.mark.parametrize("of", [VICUNA, LLAMA], ids=["vicuna", "llama3_eagle"])
def test_a_conversations_own_system_prompt_takes_the_place_of_the_templates(of: PreTrainedTokenizerFast) -> None:
    text = of.decode(Chat(of).prompt_ids([{"role": "system", "content": "Be brief."}, *TALK]))
    assert "Be brief." in text
    assert "curious" not in text and "respectful" not in text


def test_the_llama_prompt_is_eagles() -> None:
    assert EAGLES.startswith("You are a helpful, respectful and honest assistant.")
    assert EAGLES.endswith("please don't share false information.")
    assert len(EAGLES) == 508


def test_a_target_takes_a_template_in_place_of_its_tokenizers(tmp_path: Path) -> None:
    folder = tiny.write_target(tmp_path / "bare", template=None)
    (tmp_path / "mine.jinja").write_text(tiny.CHATML)
    choice = TargetChoice(str(folder), chat_template=str(tmp_path / "mine.jinja"))
    like = TargetChoice(str(tiny.write_target(tmp_path / "like")))
    assert choice.load().spec.template_hash == like.load().spec.template_hash


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown name 'package:vicunna'; did you mean 'package:vicuna'"):
        read_template("package:vicunna")
    with pytest.raises(UserError, match=r"target\.chat_template: no file .*none\.jinja"):
        read_template(str(tmp_path / "none.jinja"))


def test_a_template_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(UserError, match=r"target\.chat_template: .*latin\.jinja cannot be read \(not UTF-8\)"):
        read_template(str(tmp_path / "latin.jinja"))
    with pytest.raises(UserError, match=r"^~nobody-of-this-name/x\.jinja: is no path here"):
        read_template("~nobody-of-this-name/x.jinja")
