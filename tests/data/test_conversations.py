from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eagle3_lab.data.conversations import read_conversations, usable_beginning
from eagle3_lab.data.records import locate, records
from eagle3_lab.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def write(folder: Path, *lines: object, name: str = "c.jsonl", encoding: str = "utf-8") -> str:
    """A file of lines: text as it is, anything else as JSON."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    data = text.encode(encoding)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def gpt(*pairs: tuple[str, object], **more: object) -> dict[str, object]:
    """A ShareGPT record."""
    return {"conversations": [{"from": role, "value": value} for role, value in pairs], **more}


def test_the_marks_of_a_conversation_are_read(tmp_path: Path) -> None:
    marks = {
        "id": "x",
        "source": "s",
        "temperature": 0.0,
        "cut": True,
        "looping": False,
        "exact": False,
        "split": "held_out",
    }
    (one,), report = read_conversations(write(tmp_path, {**GOOD, **marks, "anything": [1]}))
    assert (one.id, one.source, one.temperature, one.cut, one.looping, one.exact, one.split) == tuple(marks.values())
    assert one.messages == tuple(GOOD["messages"])
    assert str(report) == "read: 1 conversations"


def test_a_conversation_without_an_id_is_called_by_its_line(tmp_path: Path) -> None:
    (one, two), _ = read_conversations(write(tmp_path, GOOD, "", "   ", {**GOOD, "id": 7}))
    assert (one.id, two.id) == ("c.jsonl:1", "7")
    assert (one.temperature, one.cut, one.split) == (None, False, "")


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_plain_packed_and_marked_files_read_alike(tmp_path: Path, name: str, encoding: str) -> None:
    found, _ = read_conversations(write(tmp_path, GOOD, {**GOOD, "id": "é\u2028"}, name=name, encoding=encoding))
    assert [one.id for one in found] == [f"{name}:1", "é\u2028"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"c.jsonl:3: broken JSON .*valid JSON is needed"),
        ("[1, 2]", r"c.jsonl:3: a list of 2; a JSON object is needed"),
        ("null", r"c.jsonl:3: null; a JSON object is needed"),
        ({"text": "q"}, r"c.jsonl:3: neither 'messages' nor 'conversations' among the keys \(text\)"),
        ({"messages": None}, r"c.jsonl:3: messages is null; a list"),
        ({"messages": []}, r"c.jsonl:3: messages is a list of 0; a list"),
        ({"messages": ["q"]}, r'c.jsonl:3: messages\[0\] is "q"; an object'),
        ({"messages": [{"content": "q"}]}, r"c.jsonl:3: messages\[0\]: no role; a string is needed"),
        ({"messages": [{"role": "user"}]}, r"c.jsonl:3: messages\[0\]: no content; a string is needed"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]: content is null; a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content is a list of 1; a string"),
        ({"messages": [{"role": "asistant", "content": "q"}]}, r"unknown role 'asistant'; did you mean 'assistant'"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half a surrogate pair"),
        ({**GOOD, "temperature": "0"}, r'c.jsonl:3: temperature is "0"; int or float is needed'),
        ({**GOOD, "temperature": True}, r"c.jsonl:3: temperature is true; int or float is needed"),
        ({**GOOD, "temperature": -0.5}, r"c.jsonl:3: temperature is -0.5; a number from 0 is needed"),
        ({**GOOD, "temperature": float("nan")}, r"c.jsonl:3: temperature is nan; a number from 0 is needed"),
        ({**GOOD, "id": "\ud83d"}, r"c.jsonl:3: id holds half a surrogate pair"),
        ({**GOOD, "source": "\ud83d"}, r"c.jsonl:3: source holds half a surrogate pair"),
        ({**GOOD, "looping": 1}, r"c.jsonl:3: looping is 1; bool is needed"),
        ({**GOOD, "split": "heldout"}, r"c.jsonl:3: split is 'heldout'; did you mean 'held_out'"),
        ({"conversations": "x"}, r'c.jsonl:3: conversations is "x"; a list'),
    ],
)
def test_a_broken_line_is_named_with_its_number_and_what_would_be_right(
    tmp_path: Path, line: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_conversations(write(tmp_path, GOOD, "", line, GOOD))


def test_files_that_cannot_be_read_at_all_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_conversations(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        read_conversations(str(tmp_path))
    for lines in ((), ("", " ")):
        with pytest.raises(UserError, match=r"c.jsonl: empty; one JSON object a line"):
            read_conversations(write(tmp_path, *lines))
    (tmp_path / "x.jsonl.gz").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"x.jsonl.gz: cannot be unpacked"):
        read_conversations(str(tmp_path / "x.jsonl.gz"))
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-12])
    with pytest.raises(UserError, match=r"half.jsonl.gz: "):
        read_conversations(str(tmp_path / "half.jsonl.gz"))
    with pytest.raises(UserError, match=r"c.jsonl:1: not UTF-8"):
        read_conversations(write(tmp_path, GOOD, encoding="utf-16"))
    with pytest.raises(UserError, match="the package has no 'nothing-of-this-name'"):
        locate("package:nothing-of-this-name")


def test_a_fault_names_the_path_as_it_was_given_and_an_id_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", GOOD, "{")
    with pytest.raises(UserError, match=r"^below/c\.jsonl:2: broken JSON"):
        read_conversations("below/c.jsonl")
    write(tmp_path / "below", GOOD)
    for path in ("below/c.jsonl", str(tmp_path / "below" / "c.jsonl")):
        (one,), _ = read_conversations(path)
        assert one.id == "c.jsonl:1", "else what is held out would depend on where the file lies"
    with pytest.raises(UserError, match=r"^' ' names no file; a \.jsonl"):
        read_conversations(" ")


def test_a_json_array_is_read_too_and_its_faults_have_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "[", json.dumps(GOOD) + ",", json.dumps(GOOD), "]", name="c.json")
    assert [place for place, _ in records(path)] == [f"{path}[0]", f"{path}[1]"]
    with pytest.raises(UserError, match=r"c.json:3: broken JSON"):
        read_conversations(write(tmp_path, "[", json.dumps(GOOD) + ",", "{'x'", "]", name="c.json"))


SHAREGPT = [
    (gpt(), 0, "no turns"),
    (gpt(("gpt", "a"), ("human", "q"), ("gpt", "a")), 0, "begins with an answer"),
    (gpt(("human", "q"), ("gpt", "a"), ("human", "q"), ("human", "q"), ("gpt", "a")), 2, "two questions in a row"),
    (gpt(("system", "s"), ("human", "q"), ("gpt", "a")), 3, ""),
    (gpt(("human", "q"), ("gpt", "a"), system="s"), 3, ""),
    (gpt(*[("human", "q"), ("gpt", "a")] * 3), 6, ""),
    (gpt(("human", "q"), ("gpt", "a"), ("human", "q")), 2, "last turn not answered"),
    (gpt(("human", "q"), ("gpt", "a"), ("human", "q"), ("gpt", " ")), 2, "empty answer"),
    (gpt(("human", "q"), ("gpt", "a"), ("tool", "t"), ("gpt", "a")), 4, ""),
    (gpt(("human", "q"), ("function_call", "f"), ("observation", "t"), ("observation", "t"), ("gpt", "a")), 5, ""),
    (gpt(("human", "q"), ("gpt", "a"), ("tool", "t"), ("human", "q"), ("gpt", "a")), 2, "tool turn not answered"),
    (gpt(("human", "q"), ("tool", "t"), ("gpt", "a")), 0, "tool turn without a call"),
    (gpt(("user", "q"), ("assistant", "a")), 2, ""),
    (gpt(("human", "q"), ("gpt", "a"), ("gpt", "b")), 2, "two answers in a row"),
    (gpt(("human", "q"), ("gpt", "a"), ("system", "s")), 2, "system turn inside"),
    (gpt(("human", "q"), ("gpt", None)), 0, "turn without a known role or without text"),
    (gpt(("human", "q"), ("martian", "a")), 0, "turn without a known role or without text"),
    (gpt(("human", " "), ("gpt", "a")), 0, "empty question"),
    (gpt(("human", "q")), 0, "last turn not answered"),
    (gpt(("human", "q"), ("gpt", ""), system="s"), 0, "empty answer"),
]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_sharegpt_oddities_keep_their_usable_beginning_and_are_counted(tmp_path: Path, suffix: str) -> None:
    listed = [record for record, _, _ in SHAREGPT]
    lines = listed if suffix == "jsonl" else [json.dumps(listed, indent=1)]
    found, report = read_conversations(write(tmp_path, *lines, name=f"s.{suffix}"))
    assert [len(one.messages) for one in found] == [turns for _, turns, _ in SHAREGPT if turns]
    for one in found:
        roles = [turn["role"] for turn in one.messages if turn["role"] != "system"]
        if "tool" in roles:
            assert roles[-1] == "assistant" and roles[roles.index("tool") - 1] == "assistant"
            continue
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert report.kept == len(found)
    for counts, kept in ((report.dropped, False), (report.shortened, True)):
        expected = [why for _, turns, why in SHAREGPT if why and bool(turns) == kept]
        assert sorted(counts.elements()) == sorted(expected)


def test_six_turns_of_sharegpt_give_three_answers(tmp_path: Path) -> None:
    (one,), _ = read_conversations(write(tmp_path, gpt(*[("human", "q"), ("gpt", "a")] * 3)))
    assert [turn["role"] for turn in one.messages].count("assistant") == 3


def test_an_empty_answer_in_our_own_form_is_dropped_and_counted(tmp_path: Path) -> None:
    empty = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    found, report = read_conversations(write(tmp_path, GOOD, empty))
    assert len(found) == 1
    assert str(report) == "read: 1 of 2 conversations; dropped 1 (empty answer)"
    with pytest.raises(UserError, match=r"no usable conversation .*1 \(empty answer\)"):
        read_conversations(write(tmp_path, empty))


def test_a_cut_mark_belongs_to_the_last_answer_alone(tmp_path: Path) -> None:
    longer = {**GOOD, "messages": [*GOOD["messages"], {"role": "user", "content": "q2"}], "cut": True}
    (one,), report = read_conversations(write(tmp_path, longer))
    assert not one.cut, "the answer that was cut is not among those kept"
    assert report.shortened == {"last turn not answered": 1}


@pytest.mark.parametrize("odd", [None, True, False, "", "  ", [1], {"a": 1}, float("nan"), float("inf")])
def test_what_is_no_name_names_no_conversation(tmp_path: Path, odd: object) -> None:
    found, _ = read_conversations(write(tmp_path, {**GOOD, "id": odd}, {**GOOD, "id": odd}))
    assert [one.id for one in found] == ["c.jsonl:1", "c.jsonl:2"]


def test_conversations_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    lines = [{**GOOD, "id": name} for name in ("x", "x", 7, "7", 7.5, "x~2", "x", "c.jsonl:9")]
    found, _ = read_conversations(write(tmp_path, *lines, GOOD))
    assert [one.id for one in found] == ["x", "x~2", "7", "7~2", "7.5", "x~2~2", "x~3", "c.jsonl:9", "c.jsonl:9~2"]


def test_a_system_turn_alone_is_nothing_usable() -> None:
    assert usable_beginning([{"role": "system", "content": "s"}]) == ((), "last turn not answered")
