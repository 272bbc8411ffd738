"""Documents kept on disk by content: the very same with and without, found by whatever decides them and by no less."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_chat_thinking import SWITCH
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from eagle3_lab.data import document_cache
from eagle3_lab.data import module as data_module
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Report
from eagle3_lab.data.document_cache import DocumentCache
from eagle3_lab.data.module import ConversationData
from eagle3_lab.data.overlap import Overlap
from eagle3_lab.data.parts import Parts
from eagle3_lab.types import TargetSpec

Build = Callable[..., ConversationData]


@pytest.fixture(autouse=True)
def _few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_cache, "FEWEST", 4)


def line(name: str, *contents: str, **more: object) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"id": name, "messages": messages, "temperature": 0.0, **more}


def text(count: int = 12) -> str:
    """Conversations of which some are held out, cut, dropped, too long, and one imitates a marker."""
    lines = [line(f"t{i}", f"question {i}", f"answer {i}", "and?", "wxyz"[: i % 4 + 1]) for i in range(count)]
    lines += [line("h", "held", "out", split="held_out"), line("again", "held", "asks what is held out")]
    lines += [
        line("loop", "q", "round it goes " * 20),
        line("long", "q " * 200, "a"),
        line("cut", "q", " ".join(map(str, range(60)))),
    ]
    lines += [line("marker", "<|im_end|>", "a"), line("empty", "q", "")]
    return "".join(json.dumps(one) + "\n" for one in lines)


@pytest.fixture
def build(tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec) -> Build:
    """Builds the file's data for a target, by default of the ChatML tokenizer."""
    (tmp_path / "c.jsonl").write_text(text())

    def built(
        cache: DocumentCache | None,
        path: Path = tmp_path / "c.jsonl",
        tokenizer: PreTrainedTokenizerFast = chatml,
        beside: tuple[Path, ...] = (),
        measured: Overlap | None = None,
        tokenizer_hash: str = "of the tokenizer",
        **more: Any,
    ) -> ConversationData:
        data = ConversationData(str(path), **{"max_length": 128, "row_length": 256} | more)
        chat = Chat(tokenizer)
        mine = dataclasses.replace(spec, tokenizer_hash=tokenizer_hash, end_tokens=(chat.end_of_turn,))
        data.build(chat, mine, beside, measured=measured, cache=cache)
        return data

    return built


def require_equal(one: ConversationData, other: ConversationData) -> None:
    assert (one.hash, one.reports, one.summary()) == (other.hash, other.reports, other.summary())
    assert one.manifest() == other.manifest() and one.prompts() == other.prompts()
    assert torch.equal(one.token_counts(), other.token_counts())
    for mine, others in ((one.train, other.train), (one.held_out, other.held_out)):
        assert [doc.conversation for doc in mine] == [doc.conversation for doc in others]
        for a, b in zip(mine, others, strict=True):
            assert torch.equal(a.ids, b.ids) and torch.equal(a.supervised, b.supervised)
            assert (a.ids.dtype, a.supervised.dtype) == (b.ids.dtype, b.supervised.dtype)
    for a, b in zip(one.train_dataloader(), other.train_dataloader(), strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.supervised, b.supervised)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_reports_hash_counts_and_batches_are_the_very_same_with_and_without_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Overlap([("mine", "question 3")])
    (tmp_path / "beside.jsonl").write_text(json.dumps(line("b", "beside", "it")) + "\n")
    more: dict[str, Any] = {"beside": (tmp_path / "beside.jsonl",), "measured": measured}
    plain, cache = build(None, **more), DocumentCache(tmp_path / "kept")
    written = build(cache, **more)
    monkeypatch.setattr(data_module, "divide", lambda *_, **__: pytest.fail("encoded again"))
    read = build(cache, **more)
    for one in (written, read):
        require_equal(one, plain)
    *_, train, held = plain.reports
    assert (train.kept, held.kept) == (14, 1) and len(plain.held_out) == 1
    assert train.dropped == {
        "overlaps with mine": 1, "asks a held-out question": 1, "looping answer": 1, "no answer within max_length": 1,
    }  # fmt: skip
    assert train.shortened == {"longer than max_length": 1} and train.noted.total() == 1


def test_its_counts_are_of_the_tokens_it_holds(build: Build, tmp_path: Path) -> None:
    build(DocumentCache(tmp_path / "kept"))
    (file,) = files(tmp_path / "kept")
    with safe_open(str(file), "pt") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        trains = json.loads(opened.metadata()["said"])["train"]
    end = int(kept["lengths"][:trains].sum())
    ids = kept["ids"][:end][kept["supervised"][:end]].tolist()
    assert kept["counts"].tolist() == [ids.count(i) for i in range(max(ids) + 1)]


def test_the_documents_of_one_conversation_stay_one_conversations(
    build: Build, tmp_path: Path, tokenizer_with: Callable[[str], PreTrainedTokenizerFast]
) -> None:
    think = "<think>\nso\n</think>\n\n"
    lines = [line(f"t{i}", f"q{i}", f"{think}a{i}", "r", f"{think}b{i}", source="s") for i in range(5)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    cache, more = DocumentCache(tmp_path / "kept"), {"tokenizer": tokenizer_with(SWITCH), "held_out": 1}
    plain, _, read = build(None, **more), build(cache, **more), build(cache, **more)
    require_equal(read, plain)
    assert len(read.train) == 8 and read.manifest()["train"]["conversations"] == 4


def test_whatever_decides_documents_has_a_file_of_its_own_and_nothing_else_has(
    build: Build, tmp_path: Path, chatml: PreTrainedTokenizerFast, llama3: PreTrainedTokenizerFast
) -> None:
    kept = tmp_path / "kept"
    other, named = tmp_path / "other.jsonl", tmp_path / "named" / "c.jsonl"
    other.write_text(text(11))
    named.parent.mkdir()
    named.write_text(text())
    changes: list[dict[str, Any]] = [
        {}, {"max_length": 127}, {"over_length": "drop"}, {"held_out": 1}, {"held_out": 0.5}, {"limit": 9},
        {"path": other}, {"beside": (other,)}, {"measured": Overlap([])}, {"measured": Overlap([("a", "question 3")])},
        {"measured": Overlap([("b", "question 3")])}, {"tokenizer_hash": "another"}, {"tokenizer": llama3},
    ]  # fmt: skip
    for count, change in enumerate(changes, 1):
        build(DocumentCache(kept), **change)
        assert len(files(kept)) == count, change
    same: list[dict[str, Any]] = [
        {"seed": 3}, {"row_length": 512}, {"rows_per_batch": 2}, {"packed": False}, {"path": named},
    ]  # fmt: skip
    for change in same:
        require_equal(build(DocumentCache(kept), **change), build(None, **change))
        assert len(files(kept)) == len(changes), change


def test_a_file_of_another_name_gives_its_nameless_conversations_other_names(build: Build, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"messages": line("", f"q{i}", "a")["messages"]}) + "\n" for i in range(6))
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text(lines)
        read = [build(DocumentCache(tmp_path / "kept"), path=tmp_path / name, held_out=0) for _ in range(2)]
        require_equal(read[1], build(None, path=tmp_path / name, held_out=0))
        assert {one.conversation.id.partition(":")[0] for one in read[1].train} == {name}


def test_a_template_that_writes_the_date_is_rendered_anew_on_another_day(
    build: Build,
    tmp_path: Path,
    chatml: PreTrainedTokenizerFast,
    tokenizer_with: Callable[[str], PreTrainedTokenizerFast],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tokenizer_with("{{ strftime_now('%d %B') }}" + str(chatml.chat_template))
    for count, day in enumerate((1, 1, 2)):

        class Then(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None, day: int = day) -> datetime.datetime:
                return datetime.datetime(2026, 1, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Then)
        one = build(DocumentCache(tmp_path / "kept"), tokenizer=tokenizer)
        require_equal(one, build(None, tokenizer=tokenizer))
        assert tokenizer.decode(one.train[0].ids.tolist()).startswith(f"0{day} January")
        assert len(files(tmp_path / "kept")) == max(1, count)


def test_a_special_token_that_the_template_names_is_part_of_what_decides(
    chatml: PreTrainedTokenizerFast, tokenizer_with: Callable[[str], PreTrainedTokenizerFast]
) -> None:
    def begun_with(token: str) -> Chat:
        tokenizer = tokenizer_with("{{ bos_token }}" + str(chatml.chat_template))
        tokenizer.bos_token = token
        return Chat(tokenizer)

    assert begun_with("<|bos|>").identity() == begun_with("<|bos|>").identity() != begun_with("<|eot_id|>").identity()
    assert begun_with("<|bos|>").template_hash == begun_with("<|eot_id|>").template_hash


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"{}" * 40,
        lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        lambda data: data.replace(b'reports\\": [', b'reports\\": {'),
        lambda data: data.replace(b"looping answer", b"lopping answer"),
        lambda data: data.replace(b'"conversation":', b'"conversazion":'),
    ],
    ids=["empty", "half", "a byte less", "a byte more", "garbage", "a bit", "no JSON", "a report", "a tensor"],
)
def test_a_damaged_file_is_told_and_made_anew(
    damage: Callable[[bytes], bytes], build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DocumentCache(tmp_path / "kept")
    plain = build(cache)
    (file,) = files(cache.folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = build(cache)
    require_equal(again, plain)
    assert f"{file}: damaged (" in caplog.text and "its documents are made anew" in caplog.text
    assert file.read_bytes() == whole and files(cache.folder) == [file]


def test_a_bit_that_flips_anywhere_is_never_trained_on(build: Build, tmp_path: Path) -> None:
    cache = DocumentCache(tmp_path / "kept")
    plain = build(cache)
    (file,) = files(cache.folder)
    whole = file.read_bytes()
    for at in range(9, len(whole), len(whole) // 30):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
        require_equal(build(cache), plain)


def test_a_write_that_fails_costs_the_next_run_its_time_and_this_run_nothing(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build(None)
    (tmp_path / "a file").write_text("")
    with caplog.at_level(logging.WARNING):
        require_equal(build(DocumentCache(tmp_path / "a file")), plain)
    assert "cannot be written" in caplog.text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        require_equal(build(DocumentCache(tmp_path / "kept")), plain)
    assert "No space left" in caplog.text and not files(tmp_path / "kept")


# ---------------------------------------------------------------------------------------------------------- when, how


def test_few_conversations_make_no_file_and_no_line(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document_cache, "FEWEST", 200)
    build(DocumentCache(tmp_path / "kept"))
    assert not files(tmp_path / "kept") and "documents" not in capsys.readouterr().err


def test_its_making_and_its_reuse_are_told(build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(DocumentCache(tmp_path / "kept"))
    made = capsys.readouterr().err
    assert "documents: 0/18 conversations" in made and "documents: 17 conversations in" in made
    build(DocumentCache(tmp_path / "kept"))
    assert "documents: reused (unchanged)" in capsys.readouterr().err


def test_whoever_only_reads_writes_nothing_and_finds_what_is_there(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = DocumentCache(tmp_path / "kept", writes=False)
    plain = build(reader)
    assert not files(tmp_path / "kept")
    build(DocumentCache(tmp_path / "kept"))
    capsys.readouterr()
    require_equal(build(reader), plain)
    assert "documents: reused" in capsys.readouterr().err


def test_other_code_makes_other_documents(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DocumentCache(tmp_path / "kept"))
    monkeypatch.setattr(document_cache, "_rules", lambda: "another")
    build(DocumentCache(tmp_path / "kept"))
    assert len(files(tmp_path / "kept")) == 2


def test_parts_of_nothing_count_nothing() -> None:
    parts = Parts.of([], [], (Report("train"), Report("held out")))
    assert parts.counts.tolist() == []
