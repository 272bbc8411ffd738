"""Readers fed with anything: what comes out is right, or one line says why not; never a traceback."""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eagle3_lab.data.chat import Message
from eagle3_lab.data.conversations import ROLES, read_conversations
from eagle3_lab.data.sources.fields import Fields
from eagle3_lab.data.sources.prompt_files import PromptFiles
from eagle3_lab.data.sources.prompts import Desk, questions
from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import AppendLog
from eagle3_lab.target_model.hf_target import HFTarget

NO_DESK = Desk(object.__new__(HFTarget), object.__new__(AppendLog))
QUICK, FULL = 200, 2000

texts = st.text(st.characters(), max_size=6) | st.sampled_from(["", " ", "q", "<|im_end|>", "\ud83d", "\u2028"])
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=True) | texts
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
roles = st.sampled_from([*ROLES, "human", "gpt", "function_call", "observation", "martian", "USER"]) | anything
our_turns = st.fixed_dictionaries({}, optional={"role": roles, "content": texts | anything})
their_turns = st.fixed_dictionaries({}, optional={"from": roles, "value": texts | anything, "weight": scalars})
good_turns = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), texts)
marks = {"id": anything, "temperature": anything, "split": anything, "cut": anything, "exact": anything}
objects = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(our_turns | good_turns, max_size=5) | anything}, optional=marks),
    st.fixed_dictionaries({"messages": st.lists(good_turns, max_size=6)}, optional={"cut": st.booleans()}),
    st.fixed_dictionaries(
        {"conversations": st.lists(their_turns | anything, max_size=5) | anything}, optional={"system": anything}
    ),
    st.fixed_dictionaries({"turns": st.lists(texts, max_size=3) | anything}, optional=marks),
    anything,
)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode()


odd_lines = st.binary(max_size=12) | st.sampled_from([b"", b"  ", b"{", b"[1,", b"\xef\xbb\xbf"])
jsonl = st.lists(objects.map(_line) | odd_lines, max_size=4).map(b"\n".join)
arrays = st.lists(objects, max_size=4).map(_line)
damaged = st.builds(
    lambda data, at, byte: data[:at] + byte + data[at + 1 :], jsonl, st.integers(0, 60), st.binary(max_size=2)
)
endings = st.sampled_from(["f.jsonl", "f.json", "f.jsonl.gz", "raw.jsonl.gz"])
files = st.tuples(jsonl | arrays | damaged, endings)
maps = (Fields(), Fields(messages="messages"), Fields(question=("turns",)), Fields(question=("q",), id="id"))


def one_line(error: UserError) -> None:
    assert str(error).strip() and "\n" not in str(error), repr(str(error))


def whole_characters(name: str, messages: Sequence[Message]) -> None:
    """They can be written down and hashed."""
    (name + "".join(turn["content"] for turn in messages)).encode()


def read_all(path: str) -> None:
    """Every reader of conversations and prompts, and what it promises of what it returns."""
    try:
        found, report = read_conversations(path)
    except UserError as error:
        one_line(error)
    else:
        assert report.kept == len(found) > 0
        for one in found:
            turns = [turn["role"] for turn in one.messages]
            spoken = turns[1:] if turns[0] == "system" else turns
            assert spoken[0] == "user" and spoken[-1] == "assistant"
            assert all(a != b for a, b in pairwise(spoken) if a != "tool")
            assert all(turn["content"].strip() for turn in one.messages if turn["role"] in ("user", "assistant"))
            whole_characters(one.id + one.source, one.messages)
    for fields in (
        Fields(),
        Fields(messages="messages"),
        Fields(question=("turns",)),
        Fields(question=("q",), id="id"),
    ):
        try:
            talks = list(PromptFiles(path, fields).talks(NO_DESK))
        except UserError as error:
            one_line(error)
            continue
        for talk in talks:
            whole_characters(talk.id, talk.messages)
            before = copy.deepcopy(talk.messages)
            asked, reason = questions(talk.messages)
            assert talk.messages == before
            assert bool(asked) or reason
            assert all(turn["role"] in ("system", "user") for turn in asked)
            assert all(turn["content"].strip() for turn in asked if turn["role"] == "user")


def check(file: tuple[bytes, str]) -> None:
    data, name = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(gzip.compress(data) if name == "f.jsonl.gz" else data)
        read_all(str(path))


calm = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=QUICK, deadline=None, derandomize=True, database=None, suppress_health_check=calm)
@given(files)
@example((b'{"messages": ' + b"[" * 100_000, "f.jsonl"))
@example((b'{"turns": [' + b"1" * 5000 + b"]}", "f.jsonl"))
@example((b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "f.jsonl"))
@example((b"\xef\xbb\xbf\n\n", "f.jsonl"))
@example((b'{"id": {"a": 1}, "turns": ["q"], "temperature": NaN}', "f.json"))
def test_two_hundred_files_are_read_right_or_refused_in_one_line(file: tuple[bytes, str]) -> None:
    check(file)


@pytest.mark.slow
@settings(max_examples=FULL, deadline=None, database=None, suppress_health_check=calm)
@given(files)
def test_two_thousand_files_are_read_right_or_refused_in_one_line(file: tuple[bytes, str]) -> None:
    check(file)
