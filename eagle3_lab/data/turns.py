"""What turns and records carry beside their texts: calls of tools, reasoning, definitions of tools, other media.

A field that changes what the target read or wrote is passed to the chat template, or it is a reason to leave the
conversation out; none is dropped in silence.

Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle3_lab.data.records import whole_characters

Message = dict[str, Any]
"""One turn: its ``role`` (system, user, assistant or tool) and its ``content``, both texts; and the fields of WRITTEN
and PASSED where a record has them."""

Tools = tuple[dict[str, Any], ...]
"""Definitions of tools, in the form that chat templates read (JSON schemas)."""

REASONING = ("reasoning_content", "reasoning", "thinking")
WRITTEN = ("tool_calls", *REASONING)
"""Of an assistant turn: what the target wrote beside its text. A template must render it."""
PASSED = ("name", "tool_call_id")
"""What a template may read of any turn, and need not."""
UNREAD = (
    *("audio", "audios", "chat_template_kwargs", "documents", "function_call", "functions", "image", "images"),
    *("video", "videos"),
)
"""What the target may have read or written, and what cannot be given to it here."""
_READ = frozenset(("role", "content", "from", "value", "weight", "train", "loss", *WRITTEN, *PASSED, *UNREAD))
UNREADABLE, UNUSABLE = "unreadable", "unusable"
"""The role of what is no turn, and the key of a turn's fault: why a conversation cannot go on with it."""


def carried(turn: Mapping[str, Any], role: str) -> tuple[Message, str]:
    """Return a turn's fields that are passed on, and why the turn cannot be used, or ""."""
    fields: Message = {}
    for key in (*WRITTEN, *PASSED):
        value = turn.get(key)
        if _is_absent(value):
            continue
        if key == "tool_calls":
            value = _calls(value)
        if value is None or (key != "tool_calls" and not isinstance(value, str)) or not _is_whole(value):
            return {}, f"{key} that cannot be read"
        if key in WRITTEN and role != "assistant":
            return {}, f"{key} of a turn that is not the assistant's"
        fields[key] = value
    for key in UNREAD:
        if not _is_absent(turn.get(key)):
            return {}, f"{key}, which is not read"
    untaught = turn.get("weight", 1) == 0 or any(turn.get(key) is False for key in ("train", "loss"))
    return fields, "a turn marked as not to be trained on" if untaught and role == "assistant" else ""


def other_fields(record: Mapping[str, Any]) -> set[str]:
    """Return the keys of a record's turns that say something and are neither passed on nor a fault."""
    listed = record.get("messages", record.get("conversations"))
    turns = [turn for turn in listed if isinstance(turn, dict)] if isinstance(listed, list) else []
    return {key for turn in turns for key, value in turn.items() if key not in _READ and not _is_absent(value)}


def definitions(record: Mapping[str, Any]) -> tuple[Tools, str]:
    """Return a record's ``tools`` (a list of objects, or such a list as JSON text), and why they cannot be read, or
    ""."""
    listed = record.get("tools")
    if isinstance(listed, str) and listed.strip():
        try:
            listed = json.loads(listed)
        except (ValueError, RecursionError):
            return (), "tools that cannot be read"
    if _is_absent(listed):
        return (), ""
    objects = isinstance(listed, list) and all(isinstance(one, dict) and one for one in listed)
    if not isinstance(listed, list) or not objects or not _is_whole(listed):
        return (), "tools that cannot be read"
    return tuple(listed), ""


def with_record(record: Mapping[str, Any], turns: list[Message], system: object = None) -> list[Message]:
    """Return ``turns`` with what a record says beside them: a system text becomes the first turn, and a field that
    cannot be given to the target becomes a turn that ends the usable beginning.

    Args:
        system: the text of the system turn; None: the record's ``system`` or ``system_prompt``.
    """
    if system is None:
        system = next((record[key] for key in ("system", "system_prompt") if not _is_absent(record.get(key))), None)
    fault = definitions(record)[1]
    fault = fault or next((f"{key}, which is not read" for key in UNREAD if not _is_absent(record.get(key))), "")
    if fault:
        return [unusable(fault), *turns]
    if _is_absent(system):
        return turns
    if not isinstance(system, str) or not whole_characters(system):
        return [unusable(f"a system text that cannot be read ({type(system).__name__})"), *turns]
    if turns and turns[0]["role"] == "system":
        same = turns[0]["content"].strip() == system.strip()
        return turns if same else [unusable("a system text beside another system turn"), *turns]
    return [{"role": "system", "content": system}, *turns]


def unusable(why: str) -> Message:
    """Return a turn that nothing can follow."""
    return {"role": UNREADABLE, "content": "", UNUSABLE: why}


def _is_absent(value: object) -> bool:
    """Whether a field says nothing: null, false, 0, or empty."""
    return not value or (isinstance(value, str) and not value.strip())


def _is_whole(value: object) -> bool:
    return whole_characters(json.dumps(value, ensure_ascii=False))


def _calls(listed: object) -> list[dict[str, Any]] | None:
    """Return calls in the form that templates read: ``{"type", "function": {"name", "arguments"}}``, arguments as an
    object; None where one is not a call. OpenAI's own form writes arguments as JSON text, which templates would quote
    again."""
    if not isinstance(listed, list):
        return None
    calls: list[dict[str, Any]] = []
    for one in listed:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(arguments, dict):
            return None
        rest = {key: one[key] for key in ("id", "type") if isinstance(one.get(key), str)}
        named = {key: value for key, value in function.items() if key not in ("id", "type", "function")}
        calls.append({"type": "function"} | rest | {"function": named | {"arguments": arguments}})
    return calls


def _object(text: str) -> object:
    """Return the JSON value of ``text``; an empty text is no arguments."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
