"""Fresh answers on disk: keyed by what decides them, made once, and resumed to the byte after any kill."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from random_targets import random_target
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import read_conversations
from eagle3_lab.data.generation.answers import Answers, _finished
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.data.repetition import is_looping
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget

# The second question holds characters of several bytes, and two that str.splitlines takes for line ends.
QUESTIONS = ["why?", "größer\u2028als\x85das?", "how many?", "when, and where, and for how long?", "who?"]


@cache
def model(vocab: int) -> HFTarget:
    return random_target(vocab_size=vocab, max_position_embeddings=128)


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> Chat:
    return Chat(chatml)


@pytest.fixture
def target(chatml: PreTrainedTokenizerFast, chat: Chat) -> HFTarget:
    """A random target in float64 that writes bytes."""
    plain = model(len(chatml))
    return HFTarget(plain.model, chatml, dataclasses.replace(plain.spec, end_tokens=(chat.end_of_turn,)))


@pytest.fixture
def asked(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    turns = [[text, "and then?"] if i == 0 else [text] for i, text in enumerate(QUESTIONS)]
    lines = [json.dumps({"id": f"q{i}", "turns": t}, ensure_ascii=False) + "\n" for i, t in enumerate(turns)]
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def choice(prompts: str, **more: object) -> Answers:
    return Answers(prompts, **({"temperature": 1.0, "max_new_tokens": 6, "rows": 2} | more))


def forbid(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the target may not be asked anything."""

    def refuse(*_: object) -> None:
        raise AssertionError("the target was asked")

    monkeypatch.setattr(target, "open", refuse)


# --------------------------------------------------------------------------------------------------------- the file


def test_every_first_turn_is_answered_once_in_the_order_of_the_prompts(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    counted: list[int] = []
    place = choice(asked, temperature=0.0).make(target, chat, tmp_path / "made", on_answer=counted.append)
    found = [json.loads(line) for line in place.read_bytes().splitlines()]
    assert [record["id"] for record in found] == [f"q{i}" for i in range(len(QUESTIONS))]
    ids = [chat.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]
    expected = {a.index: a for a in answers(target, ids, temperature=0.0, max_new_tokens=6, rows=2)}
    for i, record in enumerate(found):
        tokens, cut = expected[i].tokens, expected[i].cut
        said = target.tokenizer.decode(tokens if cut else tokens[:-1])
        taught = chat.taught([{"role": "user", "content": QUESTIONS[i]}], said, cut=cut)
        assert record.pop("exact", True) == (taught == list(tokens))
        assert record == {
            "id": f"q{i}",
            "source": "fresh",
            "split": "train",
            "temperature": 0.0,
            "cut": cut,
            "looping": is_looping(tokens),
            "messages": [{"role": "user", "content": QUESTIONS[i]}, {"role": "assistant", "content": said}],
        }
    assert sorted(counted) == sorted(len(answer.tokens) for answer in expected.values())
    assert [file.name for file in place.parent.iterdir()] == [place.name], "nothing unfinished is left behind"


def test_the_file_reads_as_conversations(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    place = choice(asked).make(target, chat, tmp_path)
    found, report = read_conversations(str(place))
    assert report.kept == len(QUESTIONS) and not report.dropped
    assert [one.temperature for one in found] == [1.0] * len(QUESTIONS)
    assert found[1].messages[0]["content"] == QUESTIONS[1]


def test_what_is_there_is_found_and_not_made_again(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = choice(asked).make(target, chat, tmp_path)
    before = place.read_bytes()
    forbid(target, monkeypatch)
    assert choice(asked).place(target, chat, tmp_path) == place
    assert choice(asked).make(target, chat, tmp_path) == place
    assert place.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------- the key


def test_the_key_tells_whatever_decides_the_answers(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    base = choice(asked)
    other_questions = tmp_path / "other.jsonl"
    other_questions.write_text(json.dumps({"turns": ["what?"]}))
    changed = dataclasses.replace
    keys = [
        base.key(target, chat),
        *(changed(base, **one).key(target, chat) for one in (
            {"temperature": 0.9}, {"max_new_tokens": 7}, {"limit": 3}, {"seed": 1}, {"prompts": str(other_questions)},
        )),
        base.key(HFTarget(target.model, target.tokenizer, changed(target.spec, weights_hash="other")), chat),
        base.key(HFTarget(target.model, target.tokenizer, changed(target.spec, tokenizer_hash="other")), chat),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_the_key_tells_the_template_and_the_dtype(
    target: HFTarget, chat: Chat, asked: str, tokenizer_with: Callable[[str | None], PreTrainedTokenizerFast]
) -> None:
    brief = Chat(tokenizer_with(str(target.tokenizer.chat_template).replace("Be brief.", "Be long.")))
    single = random_target(vocab_size=target.spec.vocab, max_position_embeddings=128, dtype=torch.float32)
    single = HFTarget(single.model, target.tokenizer, target.spec)
    keys = {choice(asked).key(*pair) for pair in ((target, chat), (target, brief), (single, chat))}
    assert len(keys) == 3


def test_the_same_prompts_under_another_name_have_the_same_answers(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    copy = shutil.copy(asked, tmp_path / "renamed.jsonl")
    assert choice(str(copy)).key(target, chat) == choice(asked).key(target, chat)


# ----------------------------------------------------------------------------------------------------------- kills


class Killed(Exception):
    pass


def kill_after(count: int) -> Callable[[int], None]:
    """Raises once that many answers are written."""
    seen: list[int] = []

    def on_answer(tokens: int) -> None:
        seen.append(tokens)
        if len(seen) == count:
            raise Killed

    return on_answer


def test_a_killed_run_goes_on_to_the_same_bytes(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    """At answers' ends, within a line, within a character, and with nothing written at all. Float64: in lower
    precision other neighbours round otherwise."""
    whole = choice(asked).make(target, chat, tmp_path / "whole").read_bytes()
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        choice(asked).make(target, chat, folder, kill_after(4))
    (unfinished,) = folder.glob("*.unfinished")
    written = unfinished.read_bytes()
    assert written.count(b"\n") == 4 and "ö".encode() in written
    ends = [i + 1 for i, byte in enumerate(written) if byte == ord("\n")]
    inside = written.index("ö".encode()) + 1
    for size in {0, 1, inside, ends[0] - 1, ends[0], ends[0] + 1, ends[2], ends[3]}:
        unfinished.write_bytes(written[:size])
        answered: list[int] = []
        place = choice(asked).make(target, chat, folder, answered.append)
        assert place.read_bytes() == whole, size
        assert len(answered) == len(QUESTIONS) - sum(end <= size for end in ends), "whole lines are not made again"
        place.unlink()


def test_a_kill_at_any_byte_leaves_the_whole_lines(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        choice(asked).make(target, chat, tmp_path / "killed", kill_after(3))
    (unfinished,) = (tmp_path / "killed").glob("*.unfinished")
    written = unfinished.read_bytes()
    for size in range(len(written) + 1):
        unfinished.write_bytes(written[:size])
        count = written[:size].count(b"\n")
        assert len(_finished(unfinished)) == count
        assert unfinished.read_bytes() == b"".join(line + b"\n" for line in written.split(b"\n")[:count])


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "answers.unfinished"
    file.write_bytes(b'{"id": "a"}\n' + b"\0" * 50 + b"\n" + b'{"id": "b"}\n')
    assert _finished(file) == {"a": {"id": "a"}}
    assert file.read_bytes() == b'{"id": "a"}\n'


def test_no_finished_file_stands_before_the_last_answer(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        choice(asked).make(target, chat, tmp_path / "made", kill_after(5))
    assert not choice(asked).place(target, chat, tmp_path / "made").exists()
    answered: list[int] = []
    assert choice(asked).make(target, chat, tmp_path / "made", answered.append).is_file()
    assert answered == []


# ---------------------------------------------------------------------------------------------------------- errors


def test_answers_that_another_process_is_writing_are_left_alone(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    straight = choice(asked).make(target, chat, tmp_path / "straight")
    tried: list[int] = []

    def another(tokens: int) -> None:
        with pytest.raises(UserError, match=r"\.jsonl: is being written by another process; wait for its end"):
            choice(asked).make(target, chat, tmp_path / "made")
        tried.append(tokens)

    made = choice(asked).make(target, chat, tmp_path / "made", another)
    assert len(tried) == len(QUESTIONS)
    assert made.read_bytes() == straight.read_bytes()
    assert choice(asked).make(target, chat, tmp_path / "made", another) == made, "what is finished needs no lock"


def test_a_folder_that_cannot_be_written_is_one_line(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below: answers cannot be written \(Not a directory\)") as caught:
        choice(asked).make(target, chat, tmp_path / "file" / "below")
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_too_long_is_named_before_any_is_answered(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(target, monkeypatch)
    long = chat.prompt_ids([{"role": "user", "content": QUESTIONS[3]}])
    room = 128 - len(long)
    with pytest.raises(UserError, match=rf"prompt q3 has {len(long)} tokens; with answers.max_new_tokens {room + 1}"):
        choice(asked, max_new_tokens=room + 1).make(target, chat, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_prompts_file_that_is_missing_is_one_line(target: HFTarget, chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*none\.jsonl"):
        choice(str(tmp_path / "none.jsonl")).make(target, chat, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -0.1}, r"answers\.temperature must be >= 0, got -0\.1"),
        ({"max_new_tokens": 0}, r"answers\.max_new_tokens must be >= 1, got 0"),
        ({"rows": 0}, r"answers\.rows must be >= 1, got 0"),
        ({"limit": 0}, r"answers\.limit must be >= 1 or null, got 0"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Answers(**wrong)
