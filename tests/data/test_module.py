from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.types import PADDING, TargetSpec

Lines = list[dict[str, Any]]


def line(name: str, *contents: str, **more: object) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"id": name, "messages": messages, "temperature": 0.0, **more}


def some_lines(count: int) -> Lines:
    """Short greedy conversations, two of them marked."""
    lines = [line(f"t{i}", f"question {i}", f"answer {'wxyz'[: i % 5]} {i}") for i in range(count)]
    return [*lines, line("h0", "held", "out", split="held_out"), line("h1", "held 1", "out 1", split="held_out")]


def build(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    spec: TargetSpec,
    lines: Lines,
    **more: Any,
) -> ConversationData:
    path = folder / "c.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    data = ConversationData(str(path), **{"max_length": 128, "row_length": 256, **more})
    data.build(Chat(tokenizer), spec)
    return data


def test_built_data_gives_packed_training_rows_and_greedy_held_out_rows(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    data = build(tmp_path, chatml, spec, some_lines(12), rows_per_batch=2)
    assert {one.conversation.id for one in data.held_out} == {"h0", "h1"}
    assert {one.conversation.id for one in data.train} == {f"t{i}" for i in range(12)}
    for loader, found in ((data.train_dataloader(), data.train), (data.val_dataloader()[0], data.held_out)):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(batch.ids.shape == (2, 256) for batch in batches)
        assert sum(int((batch.document != PADDING).sum()) for batch in batches) == sum(map(len, found))
    assert {prompt.turns for prompt in data.prompts()} == {("held",), ("held 1",)}


def test_rows_that_are_not_packed_hold_one_document_each(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    data = build(tmp_path, chatml, spec, some_lines(5), packed=False, rows_per_batch=3)
    batches = list(data.train_dataloader())
    assert len(batches) == 2  # five documents, and a row of padding
    assert all(batch.document.max() <= 0 for batch in batches)
    assert sum(int((batch.document != PADDING).sum()) for batch in batches) == sum(map(len, data.train))


def test_token_counts_are_of_supervised_training_tokens_alone(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    lines = [line("a", "qqq", "aab"), line("h", "q", "zzz", split="held_out")]
    counts = build(tmp_path, chatml, spec, lines).token_counts()
    expected = Counter(chatml.get_vocab()[token] for token in ("a", "a", "b", "<|im_end|>"))
    assert counts.shape == (spec.vocab,)
    assert {i: int(counts[i]) for i in counts.nonzero()[:, 0].tolist()} == expected


def test_a_sample_without_a_supervised_token_is_dropped_beside_a_normal_one_with_a_warning(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec, caplog: pytest.LogCaptureFixture
) -> None:
    long = line("long", "word " * 3000, "ok")
    with caplog.at_level(logging.WARNING):
        data = build(tmp_path, chatml, spec, [long, line("a", "q", "a"), line("e", "q", "")], held_out=0)
    assert [one.conversation.id for one in data.train] == ["a"]
    assert data.summary() in caplog.text
    assert "read: 2 of 3 conversations; dropped 1 (empty answer)" in data.summary()
    assert "train: 1 of 2 conversations; dropped 1 (no answer within max_length)" in data.summary()
    assert data.val_dataloader() == []


def test_more_held_out_than_there_are_is_told(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        build(tmp_path, chatml, spec, some_lines(4), held_out=2)
        assert caplog.text == ""
        build(tmp_path, chatml, spec, some_lines(4), held_out=100)
    assert "held out: 2 conversations; noted 98 (asked for, but not there)" in caplog.text


def test_a_whole_set_without_supervised_tokens_stops_and_names_max_length(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    with pytest.raises(UserError, match=r"nothing to train on within max_length 128 .*no answer within max_length"):
        build(tmp_path, chatml, spec, [line("long", "word " * 3000, "ok")], held_out=0)


def test_the_oddities_of_sharegpt_in_one_file_train_what_is_usable_of_them(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    def talk(*roles: str, **more: object) -> dict[str, Any]:
        turns = [{"from": role, "value": f"{role} {i}"} for i, role in enumerate(roles)]
        return {"conversations": turns, **more}

    whole, silent = talk(*["human", "gpt"] * 3, id="six"), talk("human", "gpt", "human", "gpt", id="silent")
    silent["conversations"][3]["value"] = ""
    lines = [
        {"conversations": []}, talk("gpt", "human", "gpt"), talk("human", "human", "gpt"),
        talk("system", "human", "gpt", id="system"), talk("human", "gpt", system="said apart", id="apart"), whole,
        talk("human", "gpt", "human", id="asks"), silent, talk("human", "gpt", "tool", "gpt", id="tool"),
        talk("user", "assistant", id="user"),
    ]  # fmt: skip
    data = build(tmp_path, chatml, spec, lines, held_out=0, max_length=256)
    taught = {one.conversation.id: str(chatml.decode(one.ids[one.supervised].tolist())) for one in data.train}
    end = "<|im_end|>"
    assert taught == {
        "system": f"gpt 2{end}", "apart": f"gpt 1{end}", "six": f"gpt 1{end}gpt 3{end}gpt 5{end}",
        "asks": f"gpt 1{end}", "silent": f"gpt 1{end}", "tool": f"gpt 1{end}gpt 3{end}", "user": f"assistant 1{end}",
    }  # fmt: skip
    read, train = data.reports[0], data.reports[1]
    assert (read.kept, read.dropped.total(), read.shortened.total(), train.dropped) == (7, 3, 2, Counter())
    assert "said apart" in str(chatml.decode(next(o for o in data.train if o.conversation.id == "apart").ids.tolist()))


def test_a_limit_takes_a_part_that_a_larger_limit_holds_too(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    kept = []
    for limit in (3, 6, None):
        data = build(tmp_path, chatml, spec, some_lines(12), limit=limit, seed=limit or 9)
        kept.append([one.conversation.id for one in data.train])
        assert {one.conversation.id for one in data.held_out} == {"h0", "h1"}
    assert [len(one) for one in kept] == [3, 6, 12]
    assert kept[1][:3] == kept[0] and kept[2][:6] == kept[1]


def test_the_hash_tells_other_tokens_and_not_another_seed_or_row(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    base = build(tmp_path, chatml, spec, some_lines(6))
    assert base.hash == build(tmp_path, chatml, spec, some_lines(6), seed=5, row_length=512).hash
    assert base.hash != build(tmp_path, chatml, spec, some_lines(6), max_length=60).hash
    assert base.hash != build(tmp_path, chatml, spec, some_lines(7)).hash
    manifest = base.manifest()
    assert manifest["hash"] == base.hash
    assert manifest["train"]["conversations"] == 6
    assert manifest["train"]["supervised"] == int(base.token_counts().sum())


def test_a_state_of_another_seed_or_batch_size_is_refused(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    state = build(tmp_path, chatml, spec, some_lines(6)).train_dataloader().state_dict()
    build(tmp_path, chatml, spec, some_lines(6)).train_dataloader().load_state_dict(state)
    for change in ({"seed": 1}, {"rows_per_batch": 2}, {"row_length": 512}, {"limit": 5}):
        with pytest.raises(UserError, match="trained on other data"):
            build(tmp_path, chatml, spec, some_lines(6), **change).train_dataloader().load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_positions": 100}, "data.max_length: 128, but tiny reads at most 100"),
        ({"vocab": 200}, "tokenizer: gives token .*, but tiny has 200"),
        ({"end_tokens": (0,)}, r"at which tiny does not stop \(end tokens \[0\]\)"),
    ],
)
def test_a_target_that_does_not_fit_the_data_is_an_error(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(tmp_path, chatml, replace(spec, **change), some_lines(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"max_length": 512, "row_length": 511}, "row_length must be at least max_length, 512, got 511"),
        ({"rows_per_batch": 0}, "rows_per_batch must be at least 1, got 0"),
        ({"held_out": 1.0}, "held_out must be"),
        ({"path": " "}, "path must name a .jsonl, .jsonl.gz or .json file, got ' '"),
        ({"seed": -1}, r"seed must be within 0 \.\. 2\*\*63 - 1, got -1"),
        ({"held_out": -1}, "held_out must be"),
        ({"limit": 0}, "limit must be at least 1"),
    ],
)
def test_a_wrong_option_is_named_with_its_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConversationData(**change)


def test_a_system_turn_is_part_of_a_held_out_prompt(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    held = line("h", "q", "a", "r", "b", split="held_out")
    held["messages"].insert(0, {"role": "system", "content": "s"})
    (prompt,) = build(tmp_path, chatml, spec, [line("t", "x", "y"), held]).prompts()
    assert (prompt.id, prompt.turns, prompt.system) == ("h", ("q", "r"), "s")
    assert Chat(chatml).prompt_ids(prompt.messages(["a"])) == Chat(chatml).prompt_ids(held["messages"][:4])


def test_files_beside_are_trained_on_whole_but_for_held_out_questions(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    data = build(tmp_path, chatml, spec, some_lines(12), limit=3)
    fresh = tmp_path / "fresh.jsonl"
    lines = [line("f0", "new", "one"), line("f1", "held", "again"), line("f2", "other", "two")]
    fresh.write_text("".join(json.dumps(one) + "\n" for one in lines))
    alone = data.hash
    data.build(Chat(chatml), spec, beside=[fresh])
    assert [one.conversation.id for one in data.train[3:]] == ["f0", "f2"]
    assert len(data.held_out) == 2 and data.hash != alone
    assert [report.stage for report in data.reports] == ["read", "read", "train", "held out"]
    assert data.reports[-2].dropped == {"asks a held-out question": 1}


def test_two_builds_of_one_seed_give_the_same_batches(
    tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    one, two = (build(tmp_path, chatml, spec, some_lines(12), seed=3).train_dataloader() for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.supervised, b.supervised)


def test_the_handed_conversations_load_whole(
    data_dir: Path, tmp_path: Path, chatml: PreTrainedTokenizerFast, spec: TargetSpec
) -> None:
    head = (data_dir / "conversations" / "smollm2.jsonl").read_text(encoding="utf-8").split("\n")[:100]
    data = build(tmp_path, chatml, replace(spec, max_positions=4096), [json.loads(one) for one in head], max_length=256)
    marked = sum(json.loads(one)["looping"] for one in head)
    _, train, held = data.reports
    assert train.dropped["looping answer"] + held.dropped["looping answer"] >= marked > 0
    assert train.seen + held.seen == data.reports[0].kept == 100, "each is counted once"
