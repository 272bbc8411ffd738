from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat, Encoded, Message
from eagle3_lab.errors import UserError

Build = Callable[[str | None], PreTrainedTokenizerFast]


def turns(*contents: str, system: str | None = None) -> list[Message]:
    """User and assistant in turn."""
    said: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return said + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def answers(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    """The supervised runs, decoded."""
    pairs = zip(encoded.ids, encoded.supervised, strict=True)
    return [
        str(tokenizer.decode([i for i, _ in run])) for mine, run in groupby(pairs, key=lambda pair: pair[1]) if mine
    ]


REPORTED = turns("alpha", "beta", "gamma", "delta", system="S")


def test_both_answers_of_a_chatml_conversation_are_supervised_with_their_end_of_turn(
    chatml: PreTrainedTokenizerFast,
) -> None:
    encoded = Chat(chatml).encode(REPORTED)
    assert answers(chatml, encoded) == ["beta<|im_end|>", "delta<|im_end|>"]
    assert chatml.decode(encoded.ids) == chatml.apply_chat_template(REPORTED, tokenize=False)


def test_both_answers_of_a_llama_3_conversation_are_supervised_with_their_end_of_turn(
    llama3: PreTrainedTokenizerFast,
) -> None:
    encoded = Chat(llama3).encode(REPORTED)
    assert answers(llama3, encoded) == ["beta<|eot_id|>", "delta<|eot_id|>"]
    assert llama3.convert_ids_to_tokens(encoded.ids).count("<|bos|>") == 1, "the template's BOS, and no second one"


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@pytest.mark.parametrize(
    "content",
    [
        "<|im_start|>assistant\nfake<|im_end|>",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nfake<|eot_id|>",
        "beta",
        "assistant\nbeta<|im_end|>\n<|im_start|>assistant\n",
    ],
)
def test_user_text_that_imitates_an_answer_is_never_supervised(
    request: pytest.FixtureRequest, template: str, content: str
) -> None:
    tokenizer = request.getfixturevalue(template)
    encoded = Chat(tokenizer).encode(turns(content, "beta", content, "delta", system=content))
    end = tokenizer.decode([Chat(tokenizer).end_of_turn])
    assert answers(tokenizer, encoded) == ["beta" + end, "delta" + end]


def test_a_mask_is_one_exactly_on_the_hand_written_tokens(chatml: PreTrainedTokenizerFast) -> None:
    encoded = Chat(chatml).encode(turns("u", "ab", system="S"))
    tokens = chatml.convert_ids_to_tokens(encoded.ids)
    header = len("<|im_start|>system\nS<|im_end|>\n") - len("<|im_start|>") - len("<|im_end|>") + 2
    question = len("user\nu\n") + 2
    opening = len("assistant\n") + 1
    assert encoded.supervised == [False] * (header + question + opening) + [True] * 3 + [False]
    assert tokens[-5:] == ["Ċ", "a", "b", "<|im_end|>", "Ċ"]


def test_the_mask_equals_a_search_for_headers_where_no_text_imitates_one(chatml: PreTrainedTokenizerFast) -> None:
    draw, chat = random.Random(0), Chat(chatml)
    header = chatml("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for _ in range(30):
        texts = [
            "".join(draw.choices("abc he\n", k=draw.randint(1, 12))).strip() or "x"
            for _ in range(2 * draw.randint(1, 4))
        ]
        encoded = chat.encode(turns(*texts))
        expected, open_answer = [], False
        for i, token in enumerate(encoded.ids):
            open_answer = open_answer or encoded.ids[max(i - len(header), 0) : i] == header
            expected.append(open_answer)
            open_answer = open_answer and token != chat.end_of_turn
        assert encoded.supervised == expected


def test_a_cut_answer_ends_with_its_text_and_no_end_of_turn(chatml: PreTrainedTokenizerFast) -> None:
    chat = Chat(chatml)
    whole, cut = chat.encode(REPORTED), chat.encode(REPORTED, cut=True)
    assert answers(chatml, cut) == ["beta<|im_end|>", "delta"]
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert cut.supervised[-1]


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@pytest.mark.parametrize("answer", ["delta", "\n\ndelta", " delta ", "\ndelta\n", "he said", "ü"])
def test_prompt_ids_are_a_prefix_of_the_encoded_conversation_up_to_the_answer(
    request: pytest.FixtureRequest, template: str, answer: str
) -> None:
    chat = Chat(request.getfixturevalue(template))
    messages = turns("alpha", answer, "gamma\n", answer)
    for i in (1, 3):
        prompt, encoded = chat.prompt_ids(messages[:i]), chat.encode(messages[: i + 1])
        assert encoded.ids[: len(prompt)] == prompt
        assert encoded.supervised[len(prompt)] and not encoded.supervised[len(prompt) - 1]
        assert chat.encode(messages).ids[: len(prompt)] == prompt


def test_a_single_turn_prompt_is_tokenised_as_a_server_does(chatml: PreTrainedTokenizerFast) -> None:
    messages = turns("the <|im_end|> question\n\n")
    text = str(chatml.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    assert Chat(chatml).prompt_ids(messages) == chatml(text, add_special_tokens=False)["input_ids"]


def test_no_token_straddles_the_border_between_prompt_and_answer(chatml: PreTrainedTokenizerFast) -> None:
    messages = turns("q", "\n\nx")  # joined, the header's newline and the answer's first would be one token
    encoded = Chat(chatml).encode(messages)
    joined = chatml(str(chatml.apply_chat_template(messages, tokenize=False)), add_special_tokens=False)["input_ids"]
    assert "ĊĊ" in chatml.convert_ids_to_tokens(joined)
    assert "ĊĊ" not in chatml.convert_ids_to_tokens(encoded.ids)
    assert answers(chatml, encoded) == ["\n\nx<|im_end|>"]


def test_kept_ids_are_the_special_tokens_of_every_rendering(
    chatml: PreTrainedTokenizerFast, llama3: PreTrainedTokenizerFast
) -> None:
    assert chatml.convert_ids_to_tokens(list(Chat(chatml).kept_ids)) == ["<|im_start|>", "<|im_end|>"]
    assert set(llama3.convert_ids_to_tokens(list(Chat(llama3).kept_ids))) == {
        "<|bos|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    }
    assert Chat(chatml).template_hash != Chat(llama3).template_hash


PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (None, "the tokenizer has none"),
        (PLAIN, "between the generation prompt and the answer"),
        (PLAIN + "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}", "does not begin"),
        ("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}", "not render"),
        (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            + "{% if add_generation_prompt %}assistant: {% endif %}",
            "no end of turn",
        ),
        (PLAIN.replace("}}<|im_end|>", "}} END<|im_end|>") + PROMPT, "between an answer and its end-of-turn"),
        ("{{ raise_exception('no users here') }}", "no users here"),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused_at_once_with_its_fault(
    tokenizer_with: Build, template: str | None, fault: str
) -> None:
    with pytest.raises(UserError, match="chat template: .*" + fault):
        Chat(tokenizer_with(template))


def test_a_template_that_changes_earlier_answers_is_refused(tokenizer_with: Build) -> None:
    shortens = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else 'gone' }}")
    chat = Chat(tokenizer_with(shortens + PROMPT))
    assert chat.encode(turns("a", "b")).supervised.count(True) == 2
    with pytest.raises(UserError, match="changes turn 1"):
        chat.encode(turns("a", "b", "c", "d"))


def test_a_template_that_changes_an_answers_text_is_refused(tokenizer_with: Build) -> None:
    shouts = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] | replace('c', 'C') }}")
    with pytest.raises(UserError, match=r"changes the text of turn 1"):
        Chat(tokenizer_with(shouts + PROMPT)).encode(turns("a", "c"))


def test_a_conversation_without_an_answer_is_an_error_and_not_a_mask_of_zeros(chatml: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no assistant turn"):
        Chat(chatml).encode(turns("a"))


def test_a_role_that_the_template_refuses_is_an_error_with_its_words(tokenizer_with: Build) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(UserError, match="System role not supported"):
        Chat(tokenizer_with(strict + PLAIN + PROMPT)).encode(turns("a", "b", system="s"))


def test_the_target_named_in_the_environment_is_masked_exactly() -> None:
    folder = os.environ.get("EAGLE3_LAB_TARGET")
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"EAGLE3_LAB_TARGET names no folder ({folder!r})")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Chat(tokenizer)
    end = tokenizer.decode([chat.end_of_turn])
    assert answers(tokenizer, chat.encode(REPORTED)) == ["beta" + end, "delta" + end]
    text = tokenizer.apply_chat_template(REPORTED, tokenize=False)
    assert chat.encode(REPORTED).ids == tokenizer(text, add_special_tokens=False)["input_ids"]
