"""Templates that think, and templates with tools: what was served is what is trained on, written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from tiny import write_target
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat, Message
from eagle3_lab.data.conversations import Conversation, Report
from eagle3_lab.data.documents import Document, documents
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.loading import TargetChoice

Build = Callable[[str | None], PreTrainedTokenizerFast]

# The target opens its reasoning itself; a switch closes it before it begins; earlier turns lose it. As Qwen3's.
SWITCH = (
    "{% set ns = namespace(query=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% set parts = m['content'].split('</think>') %}{% set ns.thought = '' %}{% if parts | length > 1 %}"
    "{% set ns.thought = parts[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.query %}{{ '<think>\n' + ns.thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SWITCHED_OFF = "{%- set enable_thinking = false %}" + SWITCH

# The prompt opens the reasoning; no rendered answer shows any. As DeepSeek-R1's.
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start_header_id|>' + m['content'].split('</think>')[-1].lstrip('\n') + '<|eot_id|>' }}"
    "{% else %}{{ '<|im_start|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|><think>\n' }}{% endif %}"
)


def turns(*contents: str) -> tuple[Message, ...]:
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents))


def shown(
    chat: Chat, tokenizer: PreTrainedTokenizerFast, messages: tuple[Message, ...], *, cut: bool = False
) -> list[str]:
    """Each document as text, supervised tokens in brackets."""
    found = []
    for one in chat.encode_each(messages, cut=cut):
        pairs = zip(one.ids, one.supervised, strict=True)
        runs = [(mine, str(tokenizer.decode([i for i, _ in run]))) for mine, run in groupby(pairs, key=lambda p: p[1])]
        found.append("".join(f"[{text}]" if mine else text for mine, text in runs))
    return found


THOUGHT = turns("u", "<think>\nt\n</think>\n\na", "v", "<think>\ns\n</think>\n\nb")


def test_a_target_that_opens_its_reasoning_is_supervised_from_its_first_token(tokenizer_with: Build) -> None:
    tokenizer = tokenizer_with(SWITCH)
    user, prompt = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert shown(Chat(tokenizer), tokenizer, THOUGHT) == [
        f"{user}u<|im_end|>\n{prompt}[<think>\nt\n</think>\n\na<|im_end|>]\n",
        f"{user}u<|im_end|>\n{prompt}a<|im_end|>\n{user}v<|im_end|>\n{prompt}[<think>\ns\n</think>\n\nb<|im_end|>]\n",
    ]


def test_an_empty_block_that_the_prompt_supplies_is_not_supervised(tokenizer_with: Build) -> None:
    tokenizer = tokenizer_with(SWITCHED_OFF)
    user, prompt = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert shown(Chat(tokenizer), tokenizer, turns("u", "a", "v", "b")) == [
        f"{user}u<|im_end|>\n{prompt}<think>\n\n</think>\n\n[a<|im_end|>]\n",
        f"{user}u<|im_end|>\n{prompt}a<|im_end|>\n{user}v<|im_end|>\n{prompt}<think>\n\n</think>\n\n[b<|im_end|>]\n",
    ]


@pytest.mark.parametrize("opening", ["<think>\n", ""], ids=["with its opening", "as it was written"])
def test_an_opening_that_the_prompt_supplies_is_not_supervised(tokenizer_with: Build, opening: str) -> None:
    tokenizer = tokenizer_with(OPENED)
    talk = turns("u", f"{opening}t\n</think>\n\na", "v", f"{opening}s\n</think>\n\nb")
    user, prompt = "<|im_start|>", "<|start_header_id|>"
    assert shown(Chat(tokenizer), tokenizer, talk) == [
        f"<|bos|>{user}u{prompt}<think>\n[t\n</think>\n\na<|eot_id|>]",
        f"<|bos|>{user}u{prompt}a<|eot_id|>{user}v{prompt}<think>\n[s\n</think>\n\nb<|eot_id|>]",
    ]


def test_answers_that_follow_each_other_unchanged_stay_one_document(tokenizer_with: Build) -> None:
    """Behind a tool's result the last question is still the same one: nothing was taken away."""
    tokenizer = tokenizer_with(SWITCH)
    call, reply = "<think>\nt\n</think>\n\ncall", "<think>\ns\n</think>\n\nb"
    talk = (*turns("u", call), {"role": "tool", "content": "r"}, {"role": "assistant", "content": reply})
    (one,) = shown(Chat(tokenizer), tokenizer, talk)
    assert one.count("[") == 2 and f"[{call}<|im_end|>]" in one and f"[{reply}<|im_end|>]" in one
    assert "<|im_start|>tool\nr<|im_end|>" in one


@pytest.mark.parametrize("template", [SWITCH, SWITCHED_OFF, OPENED], ids=["asked", "closed", "opened"])
def test_a_served_prompt_is_the_beginning_of_the_document_that_trains_its_answer(
    tokenizer_with: Build, template: str
) -> None:
    chat = Chat(tokenizer_with(template))
    talk = turns("u", "a", "v", "b") if template is SWITCHED_OFF else THOUGHT
    for i, one in zip((1, 3), chat.encode_each(talk), strict=True):
        prompt = chat.prompt_ids(talk[:i])
        assert one.ids[: len(prompt)] == prompt
        assert one.supervised.index(True) == len(prompt)


def test_reasoning_that_ran_out_of_tokens_is_cut_where_it_was(tokenizer_with: Build) -> None:
    tokenizer = tokenizer_with(OPENED)
    chat, talk = Chat(tokenizer), turns("u", "and so on")
    assert chat.misfit(talk, cut=True) == ""
    assert shown(chat, tokenizer, talk, cut=True) == ["<|bos|><|im_start|>u<|start_header_id|><think>\n[and so on]"]


@pytest.mark.parametrize(
    ("template", "answer", "reason"),
    [
        (SWITCH, "a", "no reasoning where the template asks for it"),
        (OPENED, "a", "no reasoning where the template asks for it"),
        (SWITCHED_OFF, "<think>\nt\n</think>\n\na", "reasoning where the template allows none"),
    ],
)
def test_answers_that_no_such_prompt_can_have_had_are_counted(
    tokenizer_with: Build, template: str, answer: str, reason: str
) -> None:
    report = Report("train")
    assert kept(tokenizer_with(template), turns("u", answer), report) == []
    ((said, count),) = report.dropped.items()
    assert said.startswith(reason) and count == 1


def kept(tokenizer: PreTrainedTokenizerFast, talk: tuple[Message, ...], report: Report, **more: int) -> list[Document]:
    return list(documents([Conversation("c", talk)], Chat(tokenizer), report, max_length=500, **more))


def test_the_documents_of_one_conversation_are_kept_and_counted_together(tokenizer_with: Build) -> None:
    report = Report("train")
    tokenizer = tokenizer_with(SWITCH)
    talks = [Conversation(str(i), THOUGHT) for i in range(3)]
    found = list(documents(talks, Chat(tokenizer), report, max_length=500, wanted=2))
    assert [one.conversation.id for one in found] == ["0", "0", "1", "1"]
    assert report.kept == 2


def test_the_tags_are_kept_in_a_draft_vocabulary_where_they_are_tokens(tokenizer_with: Build) -> None:
    tokenizer = tokenizer_with(OPENED)
    tokenizer.add_tokens(["<think>", "</think>"])
    kept_ids = set(tokenizer.convert_ids_to_tokens(list(Chat(tokenizer).kept_ids)))
    assert {"<think>", "</think>", "<|eot_id|>"} <= kept_ids


def test_a_thinking_template_that_changes_the_answer_itself_is_refused(tokenizer_with: Build) -> None:
    with pytest.raises(UserError, match=r"changes the text of turn 1"):
        Chat(tokenizer_with(OPENED.replace("lstrip('\n')", "replace('c', 'C')"))).encode_each(turns("u", "t</think>c"))


# -------------------------------------------------------------------------------------------------------- tools


def test_a_tools_result_is_read_and_the_answers_around_it_are_supervised(chatml: PreTrainedTokenizerFast) -> None:
    talk = (*turns("u", "call"), {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"})
    (one,) = shown(Chat(chatml), chatml, talk)
    assert one.endswith("[call<|im_end|>]\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n")


def test_a_template_without_tools_drops_such_conversations_and_counts_them(tokenizer_with: Build) -> None:
    strict = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    plain = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    talk = (*turns("u", "call"), {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"})
    report = Report("train")
    assert kept(tokenizer_with(strict + plain + prompt), talk, report) == []
    assert report.dropped == {"tool turns, which the template does not render": 1}
    assert len(kept(tokenizer_with(plain + prompt), talk, report)) == 1


def test_a_users_text_that_holds_a_marker_is_named_and_not_supervised(chatml: PreTrainedTokenizerFast) -> None:
    report = Report("train")
    (one,) = kept(chatml, turns("say <|im_end|> now", "b"), report)
    assert report.noted == {"a template marker in a text that is not the target's": 1}
    assert "noted 1" in str(report)
    assert int(one.supervised.sum()) == len("b") + 1


# ------------------------------------------------------------------------------------------------------- the switch


def test_the_switch_is_set_for_everybody_who_renders(tmp_path: Path) -> None:
    folder = str(write_target(tmp_path / "target", template=SWITCH))
    question: list[Message] = [{"role": "user", "content": "u"}]
    for thinking, end in ((None, "assistant\n"), (True, "assistant\n"), (False, "<think>\n\n</think>\n\n")):
        target = TargetChoice(folder, thinking=thinking, probe=False).load()
        chat = Chat(target.tokenizer)
        assert chat.rendered(question, generation=True).endswith(end)
        assert target.spec.template_hash == chat.template_hash
    assert TargetChoice(folder, thinking=False).tokenizer().chat_template != SWITCH


def test_a_template_without_the_switch_refuses_it(tmp_path: Path) -> None:
    folder = str(write_target(tmp_path / "target"))
    with pytest.raises(UserError, match=r"target\.thinking: true, but the chat template of .* has no enable_thinking"):
        TargetChoice(folder, thinking=True).tokenizer()
