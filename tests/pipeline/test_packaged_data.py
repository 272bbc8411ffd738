"""The package's own conversations: what the manifest says of them is so, and they can be remade as it says."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
from random_targets import random_target
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import read_conversations
from eagle3_lab.data.tasks import Task
from eagle3_lab.pipeline import packaged_data
from eagle3_lab.target_model.hf_target import HFTarget

Record = dict


@pytest.fixture(scope="module")
def manifest() -> Record:
    return json.loads(packaged_data.MANIFEST.read_text("utf-8"))


@pytest.fixture(scope="module")
def text() -> bytes:
    return gzip.decompress(packaged_data.CONVERSATIONS.read_bytes())


@pytest.fixture(scope="module")
def rows(text: bytes) -> list[Record]:
    return [json.loads(line) for line in text.splitlines()]


# ----------------------------------------------------------------------------------------------------- the manifest


def test_the_manifest_is_of_this_very_file(manifest: Record, text: bytes, rows: list[Record]) -> None:
    assert manifest["sha256"] == hashlib.sha256(text).hexdigest()
    assert manifest["conversations"] == len(rows) == 800
    assert manifest["by_source"] == Counter(row["source"] for row in rows)
    assert manifest["by_split"] == Counter(row["split"] for row in rows)
    assert manifest["answer_tokens"] == sum(row["answer_tokens"] for row in rows)
    for flag in ("looping", "cut"):
        assert manifest[flag] == sum(row[flag] for row in rows)
    assert manifest["not_exact"] == sum(not row["exact"] for row in rows)


def test_the_manifest_says_how_the_module_samples(manifest: Record, rows: list[Record]) -> None:
    assert manifest["max_new_tokens"] == packaged_data.MAX_NEW_TOKENS
    assert manifest["sampling"]["train"]["temperature"] == packaged_data.TEMPERATURE
    assert manifest["licence"] == packaged_data.LICENCE
    longest = max(row["answer_tokens"] / (len(row["messages"]) // 2) for row in rows)
    assert longest <= packaged_data.MAX_NEW_TOKENS


def test_the_manifests_command_is_the_modules(manifest: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both it and the one of the module's own text run `make` with the seed and the rows that made the file."""
    assert packaged_data.__doc__ is not None
    (documented,) = (
        line.strip() for line in packaged_data.__doc__.splitlines() if line.strip().startswith("python -m")
    )
    called: list[tuple[int, int]] = []
    monkeypatch.setattr(packaged_data, "make", lambda seed, rows: called.append((seed, rows)) or {})
    for command in (manifest["command"], documented):
        python, m, module, *options = shlex.split(command)
        assert (python, m) == ("python", "-m")
        assert importlib.import_module(module) is packaged_data
        monkeypatch.setattr(sys, "argv", [module, *options])
        packaged_data.main()
    assert called == [(0, 48), (0, 48)]


def test_the_package_stays_small() -> None:
    assert packaged_data.CONVERSATIONS.stat().st_size < 2_000_000
    assert sum(file.stat().st_size for file in packaged_data.RESOURCES.iterdir() if file.is_file()) < 2_500_000


# ------------------------------------------------------------------------------------------------------ what is in it


def test_every_conversation_passes_the_reader(rows: list[Record]) -> None:
    found, report = read_conversations("package:conversations")
    assert (report.kept, report.dropped, report.shortened) == (len(rows), {}, {})
    assert [one.id for one in found] == [row["id"] for row in rows]
    assert len({one.id for one in found}) == len(found)


def test_held_out_ones_are_greedy_and_the_others_sampled(rows: list[Record]) -> None:
    assert {(row["split"], row["temperature"]) for row in rows} == {
        ("held_out", 0.0),
        ("train", packaged_data.TEMPERATURE),
    }


def test_every_eighth_prompt_of_each_source_is_held_out(rows: list[Record]) -> None:
    for written in (True, False):
        ids = sorted(row["id"] for row in rows if row["source"].startswith("written/") is written)
        held = {row["id"] for row in rows if row["split"] == "held_out"}.intersection(ids)
        assert len(held) == len(ids) / packaged_data.HELD_OUT_EVERY


def test_no_held_out_question_is_asked_in_training(rows: list[Record]) -> None:
    asked = {
        split: {r["messages"][0]["content"].strip() for r in rows if r["split"] == split}
        for split in ("train", "held_out")
    }
    assert not asked["train"] & asked["held_out"]


def test_written_conversations_answer_the_written_prompts(rows: list[Record]) -> None:
    prompts = {p.id: p for p in Task("written", "package:prompts").prompts()}
    for row in rows:
        if row["source"].startswith("written/"):
            asked = [m["content"] for m in row["messages"] if m["role"] == "user"]
            assert tuple(asked) == prompts.pop(row["id"]).turns[: len(asked)]
    assert not prompts


def test_two_hundred_prompts_were_written_over_five_kinds() -> None:
    prompts = Task("written", "package:prompts").prompts()
    assert len(prompts) == 200
    records = [json.loads(line) for line in packaged_data.PROMPTS.read_text("utf-8").splitlines()]
    assert Counter(record["kind"] for record in records) == dict.fromkeys(
        ("conversation", "mathematics", "instruction", "code", "summary"), 40
    )
    assert len({prompt.turns[0] for prompt in prompts}) == 200
    assert all(record.keys() == {"id", "kind", "turns"} for record in records)


def test_fresh_prompts_are_asked_nowhere_else(rows: list[Record]) -> None:
    fresh = Task("fresh", "package:fresh_prompts").prompts()
    assert len(fresh) == packaged_data.FRESH_PROMPTS
    asked = {message["content"] for row in rows for message in row["messages"]}
    assert not any(turn in asked for prompt in fresh for turn in prompt.turns)
    assert all(packaged_data.usable(turn) for prompt in fresh for turn in prompt.turns)


# ---------------------------------------------------------------------------------------------------------- making


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    some = [{"id": "a", "text": "größer\u2028als"}, {"id": "b"}]
    assert packaged_data.write_rows(tmp_path / "one.gz", some) == packaged_data.write_rows(tmp_path / "two.gz", some)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert [json.loads(line) for line in gzip.decompress((tmp_path / "one.gz").read_bytes()).splitlines()] == some


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("tell me more about it", True),
        ("tell me\nmore about it", True),
        ("tell me more", False),
        ("tell me more about <|im_end|>", False),
        ("tell me more \x07 about it", False),
        ("word " * 101, False),
    ],
)
def test_a_usable_turn_is_of_sensible_length_and_of_plain_text(text: str, fine: bool) -> None:
    assert packaged_data.usable(text) is fine


@pytest.fixture
def target(chatml: PreTrainedTokenizerFast) -> HFTarget:
    plain = random_target(vocab_size=len(chatml), max_position_embeddings=2048)
    return HFTarget(plain.model, chatml, dataclasses.replace(plain.spec, end_tokens=(Chat(chatml).end_of_turn,)))


def test_the_opening_of_a_users_turn_is_what_the_template_writes_before_it(target: HFTarget) -> None:
    text = target.tokenizer.decode(packaged_data.user_opening(target))
    assert text.endswith("<|im_start|>user\n") and "\u241f" not in text


def test_turns_are_answered_one_after_the_other_until_one_is_cut_or_too_long(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends: cut at once, a second turn that does not fit, a first one that does not, and both answered."""
    monkeypatch.setattr(packaged_data, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(packaged_data, "MAX_PROMPT_TOKENS", 300)
    long = "x" * 300
    asked = [["a", "b"], ["c", long], [long, "d"], ["e", "f"], ["g"]]
    prompts = [{"id": turns[0][:1], "source": "s", "turns": turns} for turns in asked]
    free = {talk["id"]: talk for talk in packaged_data.converse(target, prompts, 0.0, seed=0, rows=2)}
    said = free["e"]["messages"][1]["content"]
    assert free["e"]["cut"] and [m["content"] for m in free["e"]["messages"]] == ["e", said]

    ends = set(range(target.spec.vocab))  # every answer is one token long
    short = HFTarget(target.model, target.tokenizer, dataclasses.replace(target.spec, end_tokens=tuple(ends)))
    talks = packaged_data.converse(short, prompts, 0.0, seed=0, rows=2)
    assert [[m["content"] for m in talk["messages"] if m["role"] == "user"] for talk in talks] == [
        ["a", "b"], ["c"], ["e", "f"], ["g"],
    ]  # fmt: skip
    assert [talk["answer_tokens"] for talk in talks] == [2, 1, 2, 1]
    assert all(talk["messages"][-1]["role"] == "assistant" and not talk["cut"] for talk in talks)
    assert all(talk["split"] == "held_out" for talk in talks)
    sampled = packaged_data.converse(short, prompts[:1], 0.5, seed=0, rows=2)
    assert [(talk["split"], talk["temperature"]) for talk in sampled] == [("train", 0.5)]
