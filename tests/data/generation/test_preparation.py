"""Turn-by-turn answering and what it keeps: batches, rooms, seeds, the key, and a resume at every step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_targets import random_target
from transformers import PreTrainedTokenizerFast

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Report
from eagle3_lab.data.generation import dialogue, preparation
from eagle3_lab.data.generation.dialogue import WAVES, ByTarget, Dialogue, Room, Said, _batches
from eagle3_lab.data.generation.preparation import Preparation, Sampling
from eagle3_lab.data.generation.prepared_file import licences_of, manifest_of, read_manifest
from eagle3_lab.data.generation.server import Server
from eagle3_lab.data.sources.prompt_files import PromptFiles
from eagle3_lab.data.sources.prompts import Desk, Talk
from eagle3_lab.data.sources.self_written import SelfWritten, user_opening
from eagle3_lab.data.tasks import Task
from eagle3_lab.errors import UserError
from eagle3_lab.system.jsonl_log import open_append_log
from eagle3_lab.target_model.hf_target import HFTarget

QUESTIONS = ["why?", "größer\u2028als\x85das?", "how many?", "when, and where, and for how long?", "who?", "so?"]


@pytest.fixture(scope="module")
def model() -> HFTarget:
    return random_target(vocab_size=264, max_position_embeddings=128, num_hidden_layers=2, dtype=torch.float32)


@pytest.fixture
def chat(chatml: PreTrainedTokenizerFast) -> Chat:
    return Chat(chatml)


@pytest.fixture
def target(model: HFTarget, chatml: PreTrainedTokenizerFast, chat: Chat) -> HFTarget:
    """A random target in float32 that writes bytes."""
    return HFTarget(model.model, chatml, dataclasses.replace(model.spec, end_tokens=(chat.end_of_turn,)))


@pytest.fixture
def brief(target: HFTarget) -> HFTarget:
    """It ends at every sixth byte: answers of a few tokens, so that second turns come about."""
    ends = (*range(0, 256, 6), *target.spec.end_tokens)
    return HFTarget(target.model, target.tokenizer, dataclasses.replace(target.spec, end_tokens=ends))


@pytest.fixture
def asked(tmp_path: Path) -> str:
    lines = [json.dumps({"id": f"q{i}", "turns": [text, "and?"]}) + "\n" for i, text in enumerate(QUESTIONS)]
    (tmp_path / "asked.jsonl").write_text("".join(lines))
    return str(tmp_path / "asked.jsonl")


def choice(path: str, **more: Any) -> Preparation:
    sampling = {"temperature": 1.0, "max_new_tokens": 6} | more.pop("sampling", {})
    return Preparation(PromptFiles(path), **({"sampling": Sampling(**sampling), "held_out": 2, "rows": 1} | more))


def never(dtype: torch.dtype) -> HFTarget:
    raise AssertionError(f"loaded in {dtype}")


# ------------------------------------------------------------------------------------------------------ stated terms


def test_other_terms_of_a_source_renew_the_manifest_and_answer_nothing_anew(
    brief: HFTarget, chat: Chat, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(licence: str) -> Path:
        source = PromptFiles(asked, licence=licence)
        sampling = Sampling(temperature=1.0, max_new_tokens=6)
        return Preparation(source, sampling=sampling, held_out=2, rows=3).make(brief, chat, tmp_path, never)

    place = made("CC0")
    before, manifest = place.read_bytes(), read_manifest(place)
    monkeypatch.setattr(ByTarget, "answer", None)
    assert made("CC BY 4.0") == place
    assert place.read_bytes() == before
    assert read_manifest(place) == manifest | {"licences": {"asked": "CC BY 4.0"}}
    assert licences_of(place) == {"asked": "CC BY 4.0"}


# ---------------------------------------------------------------------------------------------------------- resuming


class Killed(Exception):
    pass


def test_a_kill_behind_any_answer_and_within_its_line_ends_in_the_same_bytes(
    brief: HFTarget, chat: Chat, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, and no answer of a whole line is made twice."""
    real, stop, made = dialogue.read_back, 99, 0

    def said(*words: Any) -> Said:
        nonlocal made
        made += 1
        if made > stop:
            raise Killed
        return real(*words)

    monkeypatch.setattr(dialogue, "read_back", said)
    place = choice(asked, rows=3).make(brief, chat, tmp_path / "whole", never)
    whole, manifest, whole_made = place.read_bytes(), manifest_of(place).read_bytes(), made
    assert whole_made > len(QUESTIONS) and any(len(json.loads(line)["messages"]) == 4 for line in whole.splitlines())
    for stop in range(whole_made):
        folder, made = tmp_path / f"killed {stop}", 0
        with pytest.raises(Killed):
            choice(asked, rows=3).make(brief, chat, folder, never)
        (unfinished,) = folder.iterdir()
        data = unfinished.read_bytes()
        assert data.count(b"\n") == stop
        if stop:
            unfinished.write_bytes(data[:-3])  # and its last line only half written
        left, stop, made = whole_made - max(stop - 1, 0), 99, 0
        again = choice(asked, rows=3).make(brief, chat, folder, never)
        assert made == left
        assert (again.read_bytes(), manifest_of(again).read_bytes()) == (whole, manifest)
        assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".jsonl"]


@pytest.mark.parametrize("last", ["manifest", "file", "unlink"])
def test_a_kill_while_the_files_are_put_in_place_ends_in_the_same_bytes(
    last: str, brief: HFTarget, chat: Chat, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = choice(asked).make(brief, chat, tmp_path / "whole", never)
    real = preparation.put

    def put(place: Path, text: str) -> None:
        if last == ("manifest" if place.suffix == ".json" else "file"):
            raise Killed
        real(place, text)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(preparation, "put", put)
        if last == "unlink":
            patch.setattr(Path, "unlink", unlink)
        choice(asked).make(brief, chat, tmp_path / "killed", never)
    assert list((tmp_path / "killed").glob("*.unfinished"))
    monkeypatch.setattr(ByTarget, "answer", lambda *_: pytest.fail("answered again"))
    again = choice(asked).make(brief, chat, tmp_path / "killed", never)
    assert again.read_bytes() == whole.read_bytes()
    assert manifest_of(again).read_bytes() == manifest_of(whole).read_bytes()
    assert sorted(file.suffix for file in again.parent.iterdir()) == [".json", ".jsonl"]


# ---------------------------------------------------------------------------------------------------------- answering


def test_the_answers_are_those_of_the_target_after_the_ids_that_were_served(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    place = choice(asked, sampling={"temperature": 0.0}).make(target, chat, tmp_path / "made", never)
    for record in map(json.loads, place.read_bytes().splitlines()):
        for i in range(1, len(record["messages"]), 2):
            ids = torch.tensor([chat.prompt_ids(record["messages"][:i])])
            with torch.no_grad():
                made = target.model.generate(
                    ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=chat.end_of_turn
                )
            new = made[0, ids.shape[1] :].tolist()
            text = target.tokenizer.decode(new[:-1] if new[-1] == chat.end_of_turn else new)
            assert record["messages"][i]["content"] == text


def test_every_turn_of_a_conversation_draws_anew_and_the_same_again(target: HFTarget, chat: Chat) -> None:
    answerer, room = ByTarget(target, 1.0, seed=3), Room(8, 1, 100, 128)
    said = [list(answerer.answer([[5, 6, 7]], [0], turn, 1, room, {})) for turn in (0, 1, 0)]
    assert said[0] == said[2] != said[1]


def test_batches_are_by_length_and_hold_what_fits() -> None:
    room = Room(max_new_tokens=4, rows=2, batch_tokens=20, max_positions=50)
    ids = [[0] * n for n in (2, 3, 5, 6, 7, 9)] * 3
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = _batches(order, ids, room)
    assert sorted(i for batch in found for i in batch) == list(range(len(ids)))
    for batch in found:
        longest = max(len(ids[i]) for i in batch)
        assert len(batch) <= WAVES * room.rows_for(longest)
        assert room.rows_for(longest) == 1 or room.rows_for(longest) * (longest + 4) <= 20
    assert [room.rows_for(n) for n in (1, 6, 7, 40)] == [2, 2, 1, 1]
    assert len(ids[found[0][0]]) >= len(ids[found[-1][-1]]), "the longest first"


def test_a_dialogue_ends_at_an_empty_or_a_cut_answer_and_where_nothing_fits() -> None:
    def talk() -> Dialogue:
        turns = [("system", "s"), ("user", "u1"), ("user", "u2")]
        return Dialogue("d", "", 0, tuple({"role": role, "content": text} for role, text in turns))

    def said(text: str, cut: bool = False) -> Said:
        return Said(text, 1, cut, True, False)

    whole, cut, empty, long = talk(), talk(), talk(), talk()
    assert whole.ask() and len(whole.messages) == 2
    whole.hear(said("a"))
    assert whole.ask()
    whole.hear(said("b", cut=True))
    assert not whole.ask() and whole.stopped == "" and whole.said[-1].cut
    assert cut.ask()
    cut.hear(said("a", cut=True))
    assert not cut.ask() and cut.stopped == "answer cut at max_new_tokens" and len(cut.messages) == 3
    assert empty.ask()
    empty.hear(said(" \n"))
    assert not empty.ask() and empty.stopped == "empty answer" and not empty.said
    assert long.ask()
    long.stop("longer than the target reads")
    assert not long.ask() and len(long.messages) == 1


def test_questions_that_do_not_fit_are_dropped_and_counted(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    lines = [json.dumps({"turns": ["x" * 200]}) + "\n", *Path(asked).read_text().splitlines(keepends=True)]
    (tmp_path / "long.jsonl").write_text("".join(lines))
    place = choice(str(tmp_path / "long.jsonl")).make(target, chat, tmp_path / "made", never)
    stages = json.loads(manifest_of(place).read_text())["stages"]
    assert stages[1]["dropped"].get("longer than the target reads") == 1


def test_the_training_part_alone_is_answered_in_another_dtype(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    loaded: list[torch.dtype] = []

    def load(dtype: torch.dtype) -> HFTarget:
        loaded.append(dtype)
        return target

    sampling = {"greedy_share": 0.5}  # greedy and drawn ones are answered by one
    choice(asked, dtype=torch.bfloat16, sampling=sampling).make(target, chat, tmp_path / "a", load)
    choice(asked, dtype=torch.float32).make(target, chat, tmp_path / "b", load)
    assert loaded == [torch.bfloat16]


# ------------------------------------------------------------------------------------------------------------- the key


def test_the_key_tells_whatever_decides_the_file(target: HFTarget, chat: Chat, asked: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"turns": ["what?"]}) + "\n")
    changes: list[dict[str, Any]] = [
        {}, {"sampling": {"temperature": 0.5}}, {"sampling": {"top_p": 0.9}}, {"sampling": {"greedy_share": 0.5}},
        {"sampling": {"max_new_tokens": 7}}, {"sampling": {"seed": 1}}, {"held_out": 1}, {"rows": 2}, {"limit": 4},
        {"batch_tokens": 64}, {"dtype": torch.bfloat16}, {"regenerate": False}, {"server": Server()},
        {"server": Server(model="x")}, {"avoid": [Task("mine", str(other))]},
    ]  # fmt: skip
    places = {choice(asked, **change).place(target, chat, tmp_path) for change in changes}
    places.add(choice(str(other)).place(target, chat, tmp_path))
    spec = dataclasses.replace(target.spec, weights_hash="other")
    places.add(choice(asked).place(HFTarget(target.model, target.tokenizer, spec), chat, tmp_path))
    assert len(places) == len(changes) + 2
    patient = choice(asked, server=Server(concurrency=3, retries=1, timeout_s=5.0))
    assert patient.place(target, chat, tmp_path) == choice(asked, server=Server()).place(target, chat, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: Sampling(temperature=-1.0), r"sampling\.temperature must be >= 0"),
        (lambda p: Sampling(top_p=0.0), r"sampling\.top_p must lie in \(0, 1\]"),
        (lambda p: Sampling(greedy_share=1.5), r"sampling\.greedy_share must be a share"),
        (lambda p: Sampling(max_new_tokens=0), r"sampling\.max_new_tokens must be >= 1"),
        (lambda p: Preparation(p, held_out=1.0), r"prepare\.held_out must be a number from 0 or a share"),
        (lambda p: Preparation(p, rows=0), r"prepare\.rows must be >= 1, got 0"),
        (lambda p: Preparation(p, regenerate=False, server=Server()), r"prepare\.server must be null"),
        (lambda p: SelfWritten(0), r"count must be >= 1"),
        (lambda p: SelfWritten(1, temperature=0.0), r"temperature must be >= 1e-06, got 0"),
        (lambda p: SelfWritten(1, min_words=9, max_words=8), r"min_words must be within 1\.\.max_words, 8, got 9"),
    ],
)
def test_wrong_options_are_named(wrong: Callable[[PromptFiles], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong(PromptFiles("x"))


def test_no_more_conversations_are_asked_for_than_the_limit_wants(
    target: HFTarget, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talks(*_: object) -> Iterator[Talk]:
        for i, text in enumerate(["", "one", "two"]):  # the first cannot be used
            yield Talk(f"q{i}", ({"role": "user", "content": text},), "asked")
        pytest.fail("a target would have been made to write another batch")

    monkeypatch.setattr(PromptFiles, "talks", talks)
    with open_append_log(tmp_path / "j") as kept:
        found = choice(asked, limit=2)._talks(Desk(target, kept), Report("prompts"))
    assert [one.id for one in found] == ["q1", "q2"]


def test_nothing_usable_and_nothing_to_train_on_are_one_line(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").write_text('{"turns": [" "]}\n')
    with pytest.raises(UserError, match=r"prepare\.prompts: nothing usable .*1 \(empty question\)"):
        choice(str(tmp_path / "none.jsonl")).make(target, chat, tmp_path / "made", never)
    with pytest.raises(UserError, match=r"prepare\.held_out: 6 of 6 conversations leaves none to train on"):
        choice(asked, held_out=6).make(target, chat, tmp_path / "made", never)


def test_conversations_are_held_out_by_their_ids_alone(
    target: HFTarget, chat: Chat, asked: str, tmp_path: Path
) -> None:
    def held(path: str, **more: Any) -> set[str]:
        place = choice(path, sampling={"temperature": 0.0}, **more).make(target, chat, tmp_path / "made", never)
        found = map(json.loads, place.read_bytes().splitlines())
        return {record["id"] for record in found if record["split"] == "held_out"}

    lines = Path(asked).read_text().splitlines(keepends=True)
    (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
    assert held(asked) == held(str(tmp_path / "turned.jsonl"))
    assert held(asked, held_out=1) < held(asked, held_out=3)


# -------------------------------------------------------------------------------------------------------- self-written


def test_the_opening_is_the_template_up_to_the_users_text(target: HFTarget) -> None:
    opening = target.tokenizer.decode(user_opening(target))
    assert opening == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


def test_self_written_turns_are_filtered_without_repeats_and_resumed(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = iter(
        [
            [
                "One two three four five six seven eight nine",
                "one two, three four five six seven eight TEN",
                "too short",
            ],
            ["a turn with a <|im_end|> in it", "a turn with a \x07 in it", "the second one that can be used"],
            ["never needed in this test at all"],
        ]
    )
    monkeypatch.setattr(SelfWritten, "_written", lambda *_: next(written))
    source = SelfWritten(2, max_tokens=60)
    with open_append_log(tmp_path / "j") as kept:
        first = list(source.talks(Desk(target, kept)))
    assert [talk.messages[0]["content"] for talk in first] == [
        "One two three four five six seven eight nine",
        "the second one that can be used",
    ]
    monkeypatch.setattr(SelfWritten, "_written", lambda *_: pytest.fail("written again"))
    with open_append_log(tmp_path / "j") as kept:
        assert list(source.talks(Desk(target, kept))) == first
    assert source.licences() == {"self-written": source.licence}


def test_a_target_that_writes_nothing_usable_is_one_line(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfWritten, "_written", lambda *_: ["no"])
    with (
        open_append_log(tmp_path / "j") as kept,
        pytest.raises(UserError, match=r"of 320 turns .* only 0 can be used, 5"),
    ):
        list(SelfWritten(5, max_tokens=60).talks(Desk(target, kept)))
