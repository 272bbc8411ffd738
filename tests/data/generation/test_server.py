"""Answers from a server, asked of a small one in a thread: what is sent, what is tried again, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import Fake, Reply, answer, serving

from eagle3_lab.data.generation.dialogue import Room, Said, Written
from eagle3_lab.data.generation.server import LONGEST_WAIT, ByServer, Server
from eagle3_lab.errors import UserError

ENDS = (3, 9)
ROOM = Room(max_new_tokens=5, rows=8, batch_tokens=1000, max_positions=100)
PROMPTS = [[i, 7, 8] for i in range(12)]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as found:
        yield found


def ask(
    fake: Fake, prompts: list[list[int]] = PROMPTS, turn: int = 1, **more: Any
) -> tuple[list[Written], list[float]]:
    """The answers, and how long it would have waited between tries."""
    waits: list[float] = []
    by = ByServer(Server(fake.url, **more), ENDS, 0.7, 0.9, seed=3, wait=waits.append)
    made = dict(by.answer(prompts, range(len(prompts)), turn, 8, ROOM, {}))
    return [made[i] for i in range(len(prompts))], waits


def test_prompts_go_as_ids_and_answers_come_back_in_their_order(fake: Fake) -> None:
    said, waits = ask(fake)
    assert said == [Written(None, False, f"to {i}") for i in range(12)]
    assert waits == []
    bodies = fake.asked()
    assert sorted(body["prompt"] for body in bodies) == PROMPTS
    assert {(b["model"], b["max_tokens"], b["temperature"], b["top_p"], b["n"]) for b in bodies} == {
        ("tiny", 5, 0.7, 0.9, 1)
    }
    seeds = {body["prompt"][0]: body["seed"] for body in bodies}
    assert len(set(seeds.values())) == 12
    fake.seen.clear()
    ask(fake)
    assert {body["prompt"][0]: body["seed"] for body in fake.asked()} == seeds
    fake.seen.clear()
    ask(fake, turn=2)
    assert not {body["seed"] for body in fake.asked()} & set(seeds.values()), "another turn draws anew"


def test_every_sampling_parameter_is_sent_whatever_the_servers_own_defaults_are(fake: Fake) -> None:
    """vLLM and SGLang fill what is missing from the served model's generation_config, at temperature 0 too."""
    list(ByServer(Server(fake.url), ENDS, 0.0).answer(PROMPTS[:1], [0], 0, 8, ROOM, {}))
    (body,) = fake.asked()
    assert isinstance(body.pop("seed"), int)
    assert body == {
        "model": "tiny", "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0.0, "n": 1, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
        "ignore_eos": False, "stop_token_ids": [3, 9], "skip_special_tokens": False, "return_token_ids": True,
        "echo": False, "stream": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "token_ids", "tokens"),
    [
        ("stop", [5, 6, 3], (5, 6, 3)),
        ("length", [5, 6], (5, 6)),
        ("stop", [5, 6], None),  # no end among them: they are not all
        ("stop", [], None),
        ("stop", [5, True], None),
        ("stop", "56", None),
        ("length", [5, -1], None),
    ],
)
def test_tokens_that_the_server_tells_are_taken_where_they_are_whole(
    fake: Fake, reason: str, token_ids: object, tokens: tuple[int, ...] | None
) -> None:
    choice = {"text": "x", "finish_reason": reason, "token_ids": token_ids}
    fake.reply = lambda body: (200, json.dumps({"choices": [choice]}).encode())
    (written,), _ = ask(fake, PROMPTS[:1])
    assert written == Written(tokens, reason == "length", "" if tokens else "x")


def test_answers_that_another_model_began_are_not_continued(fake: Fake) -> None:
    by = ByServer(Server(fake.url), ENDS, 0.0, begun_by=lambda model: "older")
    with pytest.raises(UserError, match=r"begun by model 'older', and .* now has 'tiny'; serve 'older' again"):
        list(by.answer(PROMPTS, range(12), 0, 8, ROOM, {}))
    assert not fake.asked()


def test_an_answer_that_ran_out_of_tokens_is_cut(fake: Fake) -> None:
    fake.reply = lambda body: (200, answer("abcde", "length"))
    assert ask(fake, PROMPTS[:1])[0] == [Written(None, True, "abcde")]


def test_no_more_than_so_many_requests_are_under_way(fake: Fake) -> None:
    meeting = threading.Barrier(3)

    def reply(body: Any) -> Reply:
        meeting.wait(20)  # the first three wait for each other: three at a time there are
        return 200, answer("x")

    fake.reply = reply
    ask(fake, concurrency=3)
    assert fake.most == 3


def test_nothing_of_the_environment_is_sent(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key nor a way through a proxy: one that does not exist would fail the request."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "not-to-be-seen")
    ask(fake)
    assert len(fake.asked()) == 12
    assert "not-to-be-seen" not in repr(fake.seen)
    assert all("Authorization" not in headers for _, headers, _ in fake.seen)


def test_a_key_is_sent_where_a_file_names_it(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("abc\n")
    ask(fake, key_file=tmp_path / "key")
    assert {headers["Authorization"] for _, headers, _ in fake.seen} == {"Bearer abc"}
    for missing in (tmp_path / "none", Path("~nobody-of-this-name/key")):
        with pytest.raises(UserError, match=rf"server\.key_file: {missing} cannot be read"):
            ask(fake, key_file=missing)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_fails_for_the_moment_is_tried_again_later_and_later(fake: Fake, status: int) -> None:
    left = [status] * 4
    fake.reply = lambda body: (left.pop(), b"busy") if left else (200, answer("x"))
    said, waits = ask(fake, PROMPTS[:1], retries=4)
    assert said[0].text == "x"
    for wait, full in zip(waits, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert full / 2 <= wait <= full <= LONGEST_WAIT


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, b'{"error": "too long"}'), r"tried 1 times \(HTTP 400 .*too long"),
        ((401, b"no"), r"tried 1 times \(HTTP 401"),
        ((302, b""), r"tried 1 times \(HTTP 302"),
        ((500, b"ouch\nouch"), r"tried 2 times \(HTTP 500 'ouch ouch'\)"),
        ((200, b"<html>\nnot for you</html>"), r"answered '<html> not for you</html>'; a JSON object"),
        ((200, b"\xff\xfe\x00"), r"a JSON object is needed"),
        ((200, b"[]"), r"answered '\[\]'; a JSON object"),
        ((200, b"[" * 100_000), r"answered '\[\[.*; a JSON object"),
        ((200, b"{}"), r"answered choices null; one choice"),
        ((200, b'{"choices": []}'), r"answered choices a list of 0; one choice"),
        ((200, b'{"choices": ["x"]}'), r"text null, finish_reason null"),
        ((200, b'{"choices": [{"text": 3, "finish_reason": "stop"}]}'), r"text 3, finish_reason \"stop\""),
        ((200, answer("x", "eaten")), r"finish_reason \"eaten\"; one choice"),
        ((200, b'{"choices": [{"text": "\\ud83d", "finish_reason": "stop"}]}'), r"one choice with a text"),
    ],
)
def test_nonsense_is_one_line(fake: Fake, reply: Reply, message: str) -> None:
    fake.reply = lambda body: reply
    with pytest.raises(UserError, match=message) as told:
        ask(fake, retries=1)
    assert "\n" not in str(told.value) and fake.url in str(told.value)


def test_a_server_that_is_not_there_is_one_line() -> None:
    by = ByServer(Server("http://127.0.0.1:1/v1", retries=2), ENDS, 0.0, wait=lambda _: None)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1/v1/models failed, tried 3 times"):
        list(by.answer(PROMPTS, range(12), 0, 8, ROOM, {}))


def test_one_request_that_fails_stops_the_others(fake: Fake) -> None:
    fake.reply = lambda body: (400, b"no")
    with pytest.raises(UserError):
        ask(fake, [[i] for i in range(300)], concurrency=2)
    assert len(fake.asked()) < 10


def test_what_is_known_is_not_asked_and_what_came_before_a_failure_is_kept(fake: Fake) -> None:
    by = ByServer(Server(fake.url, concurrency=1), ENDS, 0.0, wait=lambda _: None)
    known = {i: Said("known", 2, False, True, False) for i in (0, 5)}
    fake.reply = lambda body: (400, b"no") if body["prompt"][0] == 7 else (200, answer("x"))
    made: dict[int, Written] = {}
    with pytest.raises(UserError, match="HTTP 400"):
        for i, said in by.answer(PROMPTS, range(12), 0, 8, ROOM, known):
            made[i] = said
    assert set(made) == {1, 2, 3, 4, 6}
    assert [body["prompt"][0] for body in fake.asked()] == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("models", [b"{}", b'{"data": []}', b'{"data": [{"id": "a"}, {"id": "b"}]}', b'{"data": 3}'])
def test_which_model_is_asked_must_be_clear(fake: Fake, models: bytes) -> None:
    fake.models = (200, models)
    with pytest.raises(UserError, match=r"lists \d models .*; name one as server\.model"):
        ask(fake)
    said, _ = ask(fake, PROMPTS[:1], model="a")
    assert said and fake.asked()[0]["model"] == "a"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "http://example.org/v1"}, r"of another machine, example\.org; set server\.remote: true"),
        ({"url": "http://127.0.0.1.example.org/v1"}, r"of another machine"),
        ({"url": "http://10.0.0.1:8000/v1"}, r"of another machine"),
        ({"url": "localhost:8000"}, r"must be http://HOST:PORT/v1"),
        ({"url": "file:///etc/passwd"}, r"must be http://HOST:PORT/v1"),
        ({"url": "http://a:b@localhost/v1"}, r"no name and password"),
        ({"url": "http://localhost:x/v1"}, r"server\.url 'http://localhost:x/v1'"),
        ({"concurrency": 0}, r"server\.concurrency must be > 0, got 0"),
        ({"retries": -1}, r"server\.retries must be >= 0, got -1"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(**wrong)


def test_addresses_of_this_machine_need_no_leave() -> None:
    for url in ("http://localhost:8000/v1", "http://127.0.0.2/v1", "http://[::1]:3/v1"):
        assert Server(url).url == url
    assert Server("https://example.org/v1", remote=True).remote
