"""What stands beside the texts of a conversation: rendered by the template, or a counted reason to leave it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from test_chat_thinking import OPENED, SWITCH, SWITCHED_OFF
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat, Refused
from eagle3_lab.data.conversations import Report, read_conversations
from eagle3_lab.data.documents import Document, documents
from eagle3_lab.data.fields import Fields
from eagle3_lab.data.prompts import questions
from eagle3_lab.data.tasks import Task
from eagle3_lab.data.turns import carried, definitions
from eagle3_lab.errors import UserError

Build = Callable[[str | None], PreTrainedTokenizerFast]

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + PROMPT
)
# As Qwen2.5's: definitions in a system turn, calls behind the text, results in a user turn.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}"
    "{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
    "{% if m['content'] %}{{ '\n' + m['content'] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
) + PROMPT
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
WRITTEN_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "u"}


def assistant(content: object = "a", **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def talk(*turns: object, **more: object) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def trained(
    tokenizer: PreTrainedTokenizerFast, folder: Path, *records: object
) -> tuple[list[Document], Report, Report]:
    """What becomes of a file's records; a usable one is always among them."""
    file = folder / "c.jsonl"
    good = {"id": "good", "messages": [USER, assistant("<think>\nt\n</think>\n\na")]}
    if Chat(tokenizer).misfit(good["messages"]):
        good["messages"][1] = assistant("a")
    file.write_text("".join(json.dumps(one) + "\n" for one in (*records, good)))
    found, read = read_conversations(str(file))
    report = Report("train")
    return list(documents(found, Chat(tokenizer), report, max_length=900)), read, report


def supervised(tokenizer: PreTrainedTokenizerFast, one: Document) -> list[str]:
    pairs = zip(one.ids.tolist(), one.supervised.tolist(), strict=True)
    return [str(tokenizer.decode([i for i, _ in run])) for mine, run in groupby(pairs, key=lambda p: p[1]) if mine]


# --------------------------------------------------------------------------------------------------- calls of tools


@pytest.mark.parametrize("content", ["", None, "Let me look."])
def test_a_call_that_the_template_renders_is_what_the_target_wrote(
    tokenizer_with: Build, tmp_path: Path, content: str | None
) -> None:
    tokenizer = tokenizer_with(TOOLS)
    record = talk(USER, assistant(content, tool_calls=[CALL]), {"role": "tool", "content": "r"}, assistant("b"))
    (one, _), read, _ = trained(tokenizer, tmp_path, record)
    text = f"{content}\n{WRITTEN_CALL}" if content else WRITTEN_CALL
    assert supervised(tokenizer, one) == [text + "<|im_end|>", "b<|im_end|>"]
    assert read.kept == 2


def test_no_end_is_taught_where_a_call_is_not_rendered(tokenizer_with: Build, tmp_path: Path) -> None:
    records = [talk(USER, assistant(content, tool_calls=[CALL]), id=f"n{content}") for content in ("", "Let me look.")]
    (one,), _, report = trained(tokenizer_with(PLAIN), tmp_path, *records)
    assert one.conversation.id == "good"
    assert report.named == {"the chat template does not render tool_calls": ["n", "nLet me look."]}


def test_a_template_that_renders_only_one_of_two_calls_or_no_arguments_renders_none(
    tokenizer_with: Build, tmp_path: Path
) -> None:
    first = TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    bare = TOOLS.replace("{{ c.function.arguments | tojson }}", "{}")
    two = talk(USER, assistant("", tool_calls=[CALL, CALL | {"id": "c2"}]))
    for template, record in ((first, two), (bare, talk(USER, assistant("", tool_calls=[CALL])))):
        found, _, report = trained(tokenizer_with(template), tmp_path, record)
        assert len(found) == 1 and report.dropped == {"the chat template does not render tool_calls": 1}


def test_a_call_is_refused_by_the_encoder_too(tokenizer_with: Build) -> None:
    with pytest.raises(Refused, match=r"does not render tool_calls of turn 1"):
        Chat(tokenizer_with(PLAIN)).encode([USER, assistant("", tool_calls=[carried_call()])])


def carried_call() -> dict[str, Any]:
    fields, fault = carried({"tool_calls": [CALL]}, "assistant")
    assert not fault
    return fields["tool_calls"][0]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("tool_calls", "look", "tool_calls that cannot be read"),
        ("tool_calls", [{"function": {}}], "tool_calls that cannot be read"),
        ("tool_calls", [{"function": {"name": "f", "arguments": "{"}}], "tool_calls that cannot be read"),
        ("tool_calls", [{"function": {"name": "f", "arguments": [1]}}], "tool_calls that cannot be read"),
        ("reasoning_content", ["x"], "reasoning_content that cannot be read"),
        ("reasoning_content", "\ud83d", "reasoning_content that cannot be read"),
        ("function_call", {"name": "f"}, "function_call, which is not read"),
        ("images", ["x.png"], "images, which is not read"),
        ("audio", {"id": "x"}, "audio, which is not read"),
        ("weight", 0, "a turn marked as not to be trained on"),
        ("train", False, "a turn marked as not to be trained on"),
    ],
)
@pytest.mark.parametrize("theirs", [False, True], ids=["messages", "sharegpt"])
def test_what_cannot_be_given_to_the_template_is_a_counted_reason(
    tokenizer_with: Build, tmp_path: Path, field: str, value: object, why: str, theirs: bool
) -> None:
    record = talk(USER, assistant(**{field: value}))
    if theirs:
        turns = [{"from": turn["role"], "value": turn["content"], **turn} for turn in record["messages"]]
        record = {"conversations": turns}
    _, read, _ = trained(tokenizer_with(TOOLS), tmp_path, record, talk(USER, assistant(), USER, record_turn(record)))
    assert read.dropped == {why: 1} and read.shortened == {why: 1}


def record_turn(record: dict[str, Any]) -> dict[str, Any]:
    """The last turn of a record in our own form."""
    turn = (record.get("messages") or record["conversations"])[-1]
    return {key: value for key, value in turn.items() if key not in ("from", "value")}


@pytest.mark.parametrize("empty", [None, [], "", {}, False])
def test_fields_that_say_nothing_change_nothing(tokenizer_with: Build, tmp_path: Path, empty: object) -> None:
    fields = dict.fromkeys(("tool_calls", "reasoning_content", "function_call", "images", "name"), empty)
    record = talk(USER | fields, assistant(**fields, weight=1), tools=empty, system=empty, documents=empty)
    found, read, report = trained(tokenizer_with(PLAIN), tmp_path, record)
    assert (
        len(found) == 2
        and found[0].ids.tolist()
        == trained(tokenizer_with(PLAIN), tmp_path, talk(USER, assistant()))[0][0].ids.tolist()
    )
    assert not (read.dropped or report.dropped)


def test_other_fields_of_a_turn_are_named_and_change_nothing(tokenizer_with: Build, tmp_path: Path) -> None:
    record = talk(USER | {"lang": "en", "score": 0}, assistant(refusal="no", lang="en"))
    _, read, _ = trained(tokenizer_with(PLAIN), tmp_path, record)
    assert read.noted == {"turns with lang, which is not read": 1, "turns with refusal, which is not read": 1}


# --------------------------------------------------------------------------------------------------------- reasoning


RENDERS = SWITCH.replace(
    "{% if loop.index0 > ns.query %}",
    "{% if m.reasoning_content %}{% set ns.thought = m.reasoning_content %}{% endif %}{% if loop.index0 > ns.query %}",
)


def test_reasoning_that_the_template_renders_is_taught_as_if_it_stood_in_the_text(
    tokenizer_with: Build, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(RENDERS)
    beside = talk(USER, assistant("a", reasoning_content="t"), USER, assistant("b", reasoning_content="s"))
    within = talk(USER, assistant("<think>\nt\n</think>\n\na"), USER, assistant("<think>\ns\n</think>\n\nb"))
    found, _, report = trained(tokenizer, tmp_path, beside, within)
    assert not report.dropped
    assert [one.ids.tolist() for one in found[:2]] == [one.ids.tolist() for one in found[2:4]]
    assert [one.supervised.tolist() for one in found[:2]] == [one.supervised.tolist() for one in found[2:4]]
    assert supervised(tokenizer, found[0]) == ["<think>\nt\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("template", [PLAIN, SWITCH, OPENED], ids=["plain", "asked", "opened"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_the_template_leaves_out_is_a_counted_reason(
    tokenizer_with: Build, tmp_path: Path, template: str, field: str
) -> None:
    found, _, report = trained(tokenizer_with(template), tmp_path, talk(USER, assistant("a", **{field: "t"}), id="n"))
    assert [one.conversation.id for one in found] == ["good"]
    assert report.named == {f"the chat template does not render {field}": ["n"]}


def test_reasoning_where_the_template_allows_none_is_a_counted_reason(tokenizer_with: Build, tmp_path: Path) -> None:
    _, _, report = trained(tokenizer_with(SWITCHED_OFF), tmp_path, talk(USER, assistant("a", reasoning_content="t")))
    assert report.dropped == {"reasoning where the template allows none": 1}


# ------------------------------------------------------------------------------------------- beside the conversation


@pytest.mark.parametrize("form", ["messages", "conversations", "turns"])
@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_text_beside_the_turns_is_the_system_turn(form: str, key: str) -> None:
    turns: list[Any] = {
        "messages": [USER, assistant()],
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        "turns": ["u"],
    }[form]
    assert Fields().turns({form: turns, key: "S"}, "f:1")[0] == {"role": "system", "content": "S"}


def test_two_system_texts_are_one_if_they_are_equal_and_else_a_counted_reason(
    tokenizer_with: Build, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "S"}
    same, other = (talk(system, USER, assistant(), system=text) for text in ("S", "T"))
    found, read, _ = trained(tokenizer_with(PLAIN), tmp_path, same, other, talk(USER, assistant(), system=[3]))
    assert [len(one.conversation.messages) for one in found] == [3, 2]
    assert read.dropped == {
        "a system text beside another system turn": 1,
        "a system text that cannot be read (list)": 1,
    }


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_are_rendered_or_a_counted_reason(tokenizer_with: Build, tmp_path: Path, tools: object) -> None:
    record = talk(USER, assistant("", tool_calls=[CALL]), tools=tools, id="n")
    rendering = tokenizer_with(TOOLS)
    (one, _), _, _ = trained(rendering, tmp_path, record)
    assert '"name": "look", "parameters"' in rendering.decode(one.ids.tolist())
    plain = tokenizer_with("".join(TOOLS.partition("{% for m")[1:]))
    _, _, report = trained(plain, tmp_path, record)
    assert report.named == {"the chat template does not render tools": ["n"]}


@pytest.mark.parametrize("tools", ["not json", {"name": "look"}, [1], [{}], 3])
def test_tools_that_are_no_list_of_objects_are_a_counted_reason(
    tokenizer_with: Build, tmp_path: Path, tools: object
) -> None:
    _, read, _ = trained(tokenizer_with(TOOLS), tmp_path, talk(USER, assistant(), tools=tools))
    assert read.dropped == {"tools that cannot be read": 1}
    assert definitions({"tools": tools})[0] == ()


@pytest.mark.parametrize("key", ["images", "image", "documents", "functions", "videos", "chat_template_kwargs"])
def test_a_record_with_what_cannot_be_given_to_the_target_is_a_counted_reason(
    tokenizer_with: Build, tmp_path: Path, key: str
) -> None:
    _, read, _ = trained(tokenizer_with(PLAIN), tmp_path, talk(USER, assistant(), **{key: {"x": 1}}))
    assert read.dropped == {f"{key}, which is not read": 1}


def test_where_the_target_answers_anew_the_sources_answers_need_not_be_usable() -> None:
    turns = Fields().turns(talk(USER, assistant("", function_call={"name": "f"}), USER | {"images": ["x"]}), "f:1")
    assert questions(turns) == ((USER,), "images, which is not read")


def test_a_tasks_system_text_and_tools_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"turns": ["u"], "system": "S", "tools": [TOOL], "id": None}) + "\n")
    (prompt,) = Task("mine", str(tmp_path / "t.jsonl")).prompts()
    assert (prompt.id, prompt.system, prompt.tools) == ("0", "S", (TOOL,))
    (tmp_path / "t.jsonl").write_text(json.dumps({"turns": ["u"], "system": [1]}) + "\n")
    with pytest.raises(UserError, match=r"t\.jsonl:1: a system text that cannot be read"):
        Task("mine", str(tmp_path / "t.jsonl")).prompts()


def test_results_of_tools_keep_the_fields_that_strict_templates_need(tokenizer_with: Build, tmp_path: Path) -> None:
    """As Mistral's, which refuses a result without the id of its call."""
    strict = TOOLS.replace(
        "{% for m in messages %}",
        "{% for m in messages %}"
        "{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}",
        1,
    )
    result = {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "look"}
    whole = talk(USER, assistant("", tool_calls=[CALL]), result, assistant("b"))
    bare = talk(USER, assistant("", tool_calls=[CALL]), {"role": "tool", "content": "r"}, assistant("b"), id="n")
    found, _, report = trained(tokenizer_with(strict), tmp_path, whole, bare)
    assert len(found) == 2
    assert report.named == {"the chat template refuses it (TemplateError: no id)": ["n"]}
