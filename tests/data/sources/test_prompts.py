"""Prompt sources: what is read out of files and sets, what is refused with its line, what a mixture takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle3_lab.data.sources.fields import Fields
from eagle3_lab.data.sources.hub import HubPrompts
from eagle3_lab.data.sources.prompt_files import PromptFiles
from eagle3_lab.data.sources.prompts import Desk, Mixture, Prompts, Share, Talk, questions
from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import AppendLog
from eagle3_lab.target_model.hf_target import HFTarget

# Files and sets ask no target: these two cannot be used.
NO_DESK = Desk(object.__new__(HFTarget), object.__new__(AppendLog))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, *lines: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return str(path)


def read(source: Prompts) -> list[Talk]:
    return list(source.talks(NO_DESK))


def contents(talk: Talk) -> list[str]:
    return [f"{turn['role']}: {turn['content']}" for turn in talk.messages]


USER = {"messages": [{"role": "user", "content": "u"}]}


# ---------------------------------------------------------------------------------------------------------- files


def test_all_forms_are_told_apart_record_by_record(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        USER,
        {"id": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "y"},
        {"question_id": 7, "turns": ["one", "two"]},
    )
    first, second, third = read(PromptFiles(path))
    assert (first.id, second.id, third.id) == ("p.jsonl:1", "s", "7")
    assert contents(second) == ["system: y", "user: q", "assistant: a"]
    assert contents(third) == ["user: one", "user: two"]
    assert {talk.source for talk in (first, second, third)} == {"p"}


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "c/d.jsonl"):
        record = {**USER, "id": name}
        write(tmp_path / "f" / name, [record] if name.endswith(".json") else record)
    (tmp_path / "f" / "notes.txt").write_text("not read")
    assert [talk.id for talk in read(PromptFiles(str(tmp_path / "f")))] == ["a.json", "b.jsonl", "c/d.jsonl"]
    assert len(read(PromptFiles(str(tmp_path / "f"), limit=2))) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.jsonl, \.jsonl\.gz, \.json in this folder"):
        read(PromptFiles(str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl:3: broken JSON"),
        ("null", r"p\.jsonl:3: null; a JSON object"),
        ({"text": "x"}, r"p\.jsonl:3: none of messages, conversations, turns among the keys \(text\)"),
        ({"messages": None}, r"p\.jsonl:3: messages is null"),
        ({"messages": [{"content": "x"}]}, r"p\.jsonl:3: messages\[0\]: no role"),
        ({"messages": [{"role": "user", "content": None}]}, r"p\.jsonl:3: messages\[0\]: content is null"),
        ({"messages": [{"role": "usr", "content": "x"}]}, r"p\.jsonl:3: .*unknown role 'usr'; did you mean 'user'"),
        ({"turns": []}, r"p\.jsonl:3: turns is a list of 0"),
        ({"turns": [1]}, r"p\.jsonl:3: turns\[0\] is 1; a text is needed"),
        ('{"turns": ["\\ud83d"]}', r"p\.jsonl:3: turns\[0\] .*a text is needed"),
        ({"conversations": 3}, r"p\.jsonl:3: conversations is 3; a list"),
    ],
)
def test_a_fault_is_told_with_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        read(PromptFiles(write(tmp_path / "p.jsonl", USER, "", line)))
    assert "\n" not in str(told.value)


def test_a_path_that_can_be_none_here_is_told_in_one_line() -> None:
    for source in (PromptFiles("~nobody-of-this-name/p.jsonl"), HubPrompts("~nobody-of-this-name/set", Fields())):
        for ask in (source.identity, lambda source=source: read(source)):
            with pytest.raises(UserError, match=r"^~nobody-of-this-name/\S+: is no path here"):
                ask()


def test_a_fault_in_a_folder_is_told_with_the_path_below_it(tmp_path: Path) -> None:
    (tmp_path / "all" / "b").mkdir(parents=True)
    write(tmp_path / "all" / "a.jsonl", USER)
    write(tmp_path / "all" / "b" / "a.jsonl", "{")
    with pytest.raises(UserError) as told:
        read(PromptFiles(str(tmp_path / "all")))
    assert str(told.value).startswith(f"{tmp_path / 'all' / 'b' / 'a.jsonl'}:1: broken JSON")


def test_a_byte_order_mark_and_blank_lines_are_no_fault_and_nothing_at_all_is(tmp_path: Path) -> None:
    assert len(read(PromptFiles(write(tmp_path / "p.jsonl", "\ufeff" + json.dumps(USER), "", "  ", USER)))) == 2
    with pytest.raises(UserError, match=r"e\.jsonl: empty"):
        read(PromptFiles(write(tmp_path / "e.jsonl")))


# --------------------------------------------------------------------------------------------------------- fields


def test_a_field_map_makes_a_question_of_columns(tmp_path: Path) -> None:
    full = {"task": "add", "input": "1 2", "out": "3", "who": "s"}
    path = write(tmp_path / "p.jsonl", full, {"task": "b", "input": "", "out": "", "who": ""})
    fields = Fields(question=("task", "input"), answer="out", system="who", before="Do: ")
    one, other = read(PromptFiles(path, fields))
    assert contents(one) == ["system: s", "user: Do: add\n1 2", "assistant: 3"]
    assert contents(other) == ["user: Do: b", "assistant: "]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "q"}]},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"turns": ["q"]},
    ],
)
def test_a_column_of_the_system_turn_counts_for_records_that_say_the_rest_themselves(
    record: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", record | {"who": "s"})
    (one,) = read(PromptFiles(path, Fields(system="who")))
    assert contents(one) == ["system: s", "user: q"]
    with pytest.raises(UserError, match=r"p\.jsonl:1: fields\.system: no column 'whom'"):
        read(PromptFiles(path, Fields(system="whom")))


def test_a_column_that_holds_a_list_is_several_questions(tmp_path: Path) -> None:
    (one,) = read(PromptFiles(write(tmp_path / "p.jsonl", {"prompt": ["a", "b"]}), Fields(question=("prompt",))))
    assert contents(one) == ["user: a", "user: b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            Fields(question=("questoin",)),
            r"jsonl:1: fields\.question: no column 'questoin'; did you mean 'question'",
        ),
        (Fields(messages="talk"), r"p\.jsonl:1: fields\.messages: no column 'talk'"),
        (Fields(messages="question"), r'p\.jsonl:1: question is "q"; a list'),
        (Fields(question=("number",)), r"p\.jsonl:1: number is 3; a text is needed"),
        (Fields(question=("question",), id="name"), r"p\.jsonl:1: fields\.id: no column 'name'"),
        (Fields(question=("question",), answer="number"), r"p\.jsonl:1: number is 3; a text"),
    ],
)
def test_a_field_map_that_fits_nothing_is_one_line(tmp_path: Path, fields: Fields, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(PromptFiles(write(tmp_path / "p.jsonl", {"question": "q", "number": 3}), fields))


def test_a_field_map_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fields\.messages is 'm'"):
        Fields(messages="m", question=("q",))
    with pytest.raises(ValueError, match=r"fields\.question must name a column"):
        Fields(answer="a")


# ---------------------------------------------------------------------------------------------------------- sets


def rows(count: int = 3) -> datasets.Dataset:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    return datasets.Dataset.from_list([{"name": f"r{i}", "talk": talk} for i in range(count)])


def test_a_saved_set_is_read_without_a_hub(tmp_path: Path) -> None:
    rows().save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows(1), "test": rows(2)}).save_to_disk(str(tmp_path / "two"))
    fields = Fields(messages="talk", id="name")
    assert [t.id for t in read(HubPrompts(str(tmp_path / "one"), fields))] == ["r0", "r1", "r2"]
    assert contents(read(HubPrompts(str(tmp_path / "one"), fields, limit=1))[0]) == ["user: q", "assistant: a"]
    assert len(read(HubPrompts(str(tmp_path / "two"), fields, split="test"))) == 2
    with pytest.raises(UserError, match=r"HubPrompts\.split: .* has no split 'tset'; did you mean 'test'"):
        read(HubPrompts(str(tmp_path / "two"), fields, split="tset"))


def test_a_folder_of_data_files_is_a_set(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows().to_parquet(str(tmp_path / "set" / "train-00000.parquet"))
    assert len(read(HubPrompts(str(tmp_path / "set"), Fields(messages="talk")))) == 3


def test_a_local_set_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    places = [tmp_path / "here", tmp_path / "there" / "deeper"]
    for place in places:
        (place / "set").mkdir(parents=True)
        rows().to_parquet(str(place / "set" / "train-0.parquet"))
    first, second = (HubPrompts(str(place / "set"), Fields(messages="talk")) for place in places)
    assert read(first) == read(second)
    assert [talk.id for talk in read(first)] == ["set[0]", "set[1]", "set[2]"], "which decide what is held out"
    assert first.identity() == second.identity()
    assert first.licences() == {"set": "not stated"}
    assert HubPrompts(str(tmp_path / "none"), Fields()).source == str(tmp_path / "none"), "a hub's name has a slash too"


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"HubPrompts\.name: .* cannot be loaded"):
        read(HubPrompts(str(tmp_path / "set"), Fields(messages="talk")))
    assert not (tmp_path / "ran").exists()


def test_a_set_whose_columns_are_others_is_one_line(tmp_path: Path) -> None:
    rows().save_to_disk(str(tmp_path / "one"))
    with pytest.raises(UserError, match=r"one\[0\]: fields\.messages: no column 'messages'"):
        read(HubPrompts(str(tmp_path / "one"), Fields(messages="messages")))


def test_a_sets_identity_is_its_content(tmp_path: Path) -> None:
    fields = Fields(messages="talk")
    rows().save_to_disk(str(tmp_path / "one"))
    before = HubPrompts(str(tmp_path / "one"), fields).identity()
    rows(4).save_to_disk(str(tmp_path / "more" / "one"))
    assert HubPrompts(str(tmp_path / "more" / "one"), fields).identity() != before
    assert HubPrompts(str(tmp_path / "one"), fields).identity() == before


# ------------------------------------------------------------------------------------------------------- mixtures


class Listed(Prompts):
    """``count`` conversations in memory."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def talks(self, desk: Desk) -> Iterator[Talk]:
        return (Talk(f"{self.name}{i}", ({"role": "user", "content": "u"},), self.name) for i in range(self.count))

    def identity(self) -> dict[str, Any]:
        return {"listed": self.name, "count": self.count}

    def licences(self) -> dict[str, str]:
        return {self.name: f"of {self.name}"}


def mixed(total: int | None, seed: int = 0, sizes: tuple[int, int] = (100, 100)) -> list[Talk]:
    parts = [Share(Listed("a", sizes[0]), 3.0), Share(Listed("b", sizes[1]), 1.0)]
    return read(Mixture(parts, total, seed))


def test_weights_are_kept_and_nothing_is_taken_twice() -> None:
    for total, expected in ((40, (30, 10)), (41, (31, 10)), (42, (32, 10)), (43, (32, 11))):
        found = mixed(total)
        sources = [talk.source for talk in found]
        assert (sources.count("a"), sources.count("b")) == expected
        assert len({talk.id for talk in found}) == total


def test_without_a_total_the_source_that_runs_out_first_decides() -> None:
    assert len(mixed(None)) == 133
    assert len(mixed(None, sizes=(30, 100))) == 40
    assert len(mixed(None, sizes=(100, 5))) == 20


def test_a_mixture_is_decided_by_its_seed_and_a_smaller_one_is_part_of_a_larger() -> None:
    assert mixed(40) == mixed(40)
    assert mixed(40) != mixed(40, seed=1)
    assert {talk.id for talk in mixed(20)} < {talk.id for talk in mixed(80)}
    firsts = [talk.source for talk in mixed(80)][:20]
    assert {"a", "b"} == set(firsts), "shuffled together"


def test_a_share_that_a_source_does_not_have_is_one_line() -> None:
    with pytest.raises(UserError, match=r"Mixture\.parts\[1\]: has 5 conversations, its share of total 40 is 10"):
        mixed(40, sizes=(100, 5))
    with pytest.raises(ValueError, match=r"weight must be > 0"):
        Share(Listed("a", 1), 0.0)
    with pytest.raises(ValueError, match=r"parts must name at least one source"):
        Mixture([])


def test_licences_of_all_parts_come_along() -> None:
    assert Mixture([Share(Listed("a", 1)), Share(Listed("b", 1))]).licences() == {"a": "of a", "b": "of b"}
    one, other = Listed("a", 1), Listed("a", 1)
    other.licences = lambda: {"a": "other terms"}  # type: ignore[method-assign]
    mixed = Mixture([Share(one), Share(other), Share(one)])
    assert mixed.licences() == {"a": "of a; other terms"}, "sources of one name keep all their terms"


# ------------------------------------------------------------------------------------------- what can be asked anew


def said(text: str) -> list[dict[str, str]]:
    """``u1 a u2``: roles by first letter."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "x": "unreadable"}
    return [{"role": roles[word[0]], "content": "" if word.endswith("-") else word} for word in text.split()]


@pytest.mark.parametrize(
    ("turns", "asked", "reason"),
    [
        ("u1 a u2 a", "u1 u2", ""),
        ("s u1 a u2", "s u1 u2", ""),
        ("u1 u2 u3", "u1 u2 u3", ""),
        ("u1 a- u2 a", "u1 u2", ""),
        ("u1 a u2 u3 a", "u1 u2", "two questions in a row"),
        ("u1 a t a u2", "u1", "tool turn"),
        ("u1 a u- a", "u1", "empty question"),
        ("a u1", "", "begins with an answer"),
        ("s", "", "no question"),
        ("", "", "no turns"),
        ("u1 a s u2", "u1", "system turn inside"),
        ("u1 x", "u1", "turn without a known role or without text"),
        ("s a u1", "", "begins with an answer"),
    ],
)
def test_the_questions_of_a_talk_and_why_they_are_not_all(turns: str, asked: str, reason: str) -> None:
    found, why = questions(said(turns))
    assert (" ".join(turn["content"] for turn in found), why) == (asked, reason)
