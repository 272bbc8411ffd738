"""Answers from a server that speaks OpenAI's completions protocol (vLLM, SGLang): the same target, served.

Prompts go as token ids, made by our own rendering of the template: what is trained on is then what was served, whatever
template the server would apply. Every sampling parameter is sent too, since a server fills in what is missing from the
served model's own generation_config. Nothing from the environment is sent: no key, no proxy.

Source: the names and neutral values are those of vLLM's and SGLang's CompletionRequest.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle3_lab.data.dialogue import Answerer, Room, Said, Written
from eagle3_lab.data.records import say, whole_characters
from eagle3_lab.data.regenerate import hash_seed
from eagle3_lab.errors import UserError

LONGEST_S = 86_400
WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the first retry, doubled each time, and the longest
TRY_AGAIN = (408, 429, 500, 502, 503, 504)

REQUEST = 2  # raised whenever the same prompts may be answered otherwise by the same server; answers are keyed by it
NEUTRAL = {
    "n": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "echo": False,
    "stream": False,
}
"""With these a server draws from the target's own distribution, stops where the target does, writes every token as
text, and, where it can, tells which tokens it wrote."""


@dataclass(frozen=True)
class Server:
    """Where the target is served.

    Args:
        url: up to and including the version, as clients are given it.
        model: the served name; null: the only one that the server lists.
        concurrency: requests at a time.
        retries: further tries of a request that fails for the moment (no connection, 429, 5xx).
        timeout_s: seconds for one answer.
        key_file: a file whose first line is sent as the bearer token; null: none is.
        remote: false: only this machine is asked; prompts leave it only where this is true.

    Raises:
        ValueError: a value outside its range, or a url of another machine without ``remote``.
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    concurrency: int = 64
    retries: int = 6
    timeout_s: float = 600.0
    key_file: Path | None = None
    remote: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise ValueError(f"server.url {self.url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"server.url must be http://HOST:PORT/v1, got {self.url!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("server.url must hold no name and password; key_file names a file with a token")
        if not self.remote and not _is_here(host):
            raise ValueError(f"server.url is of another machine, {host}; set server.remote: true to send prompts there")
        for name, value in (("concurrency", self.concurrency), ("timeout_s", self.timeout_s)):
            if not value > 0:
                raise ValueError(f"server.{name} must be > 0, got {value}")
        if self.timeout_s > LONGEST_S:
            raise ValueError(f"server.timeout_s must be <= {LONGEST_S}, a day, got {self.timeout_s}")
        if self.retries < 0:
            raise ValueError(f"server.retries must be >= 0, got {self.retries}")


class ByServer(Answerer):
    """The target as served elsewhere. ``begun_by`` returns the name of the model that began the answers, given the one
    that is asked now. Its draws are the server's: seeds are sent, and whether the same answers come
    again is the server's matter; what is in the journal stays."""

    def __init__(
        self,
        server: Server,
        end_tokens: Sequence[int],
        temperature: float,
        top_p: float | None = None,
        seed: int = 0,
        begun_by: Callable[[str], str] = lambda model: model,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.server, self.end_tokens = server, tuple(end_tokens)
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self._wait, self._begun_by = wait, begun_by
        # A redirect would carry prompts, and the token, to wherever it says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    @cached_property
    def model(self) -> str:
        """The served model's name. Raises UserError where the server does not tell which."""
        if self.server.model is not None:
            return self.server.model
        reply = self._asked("models", None)
        listed = reply.get("data")
        names = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise UserError(
                f"server.url: {self.server.url} lists {len(names)} models {names[:5]}; name one as server.model"
            )
        return names[0]

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        turn: int,
        rows: int,
        room: Room,
        known: Mapping[int, Said],
    ) -> Iterator[tuple[int, Written]]:
        """Also where a request fails for good, what others have answered comes before the error."""
        model, failed = self.model, threading.Event()
        if (first := self._begun_by(model)) != model:
            raise UserError(
                f"server.url: answers were begun by model {first!r}, and {self.server.url} now has {model!r}; serve "
                f"{first!r} again, or name the other one as server.model to begin anew"
            )

        def one(i: int) -> Written | None:
            if failed.is_set():  # the rest need not be asked
                return None
            try:
                request = self._request(model, prompts[i], numbers[i], turn, room)
                return self._written(self._asked("completions", request))
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.server.concurrency) as pool:
            running = {pool.submit(one, i): i for i in range(len(prompts)) if i not in known}
            try:
                errors = []
                for done in as_completed(running):
                    if (error := done.exception()) is not None:
                        errors.append(error)
                    elif (said := done.result()) is not None:
                        yield running[done], said
            finally:
                failed.set()  # whoever does not want the rest does not wait for it
        if errors:
            raise errors[0]

    def _request(self, model: str, prompt: Sequence[int], number: int, turn: int, room: Room) -> dict[str, Any]:
        request = NEUTRAL | {"model": model, "prompt": list(prompt), "max_tokens": room.max_new_tokens}
        request |= {"temperature": self.temperature, "seed": hash_seed(self.seed + turn, number) & 0x7FFFFFFF}
        request["stop_token_ids"] = list(self.end_tokens)
        return request if self.top_p is None else request | {"top_p": self.top_p}

    def _written(self, reply: dict[str, Any]) -> Written:
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        text = choice.get("text") if isinstance(choice, dict) else None
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if not isinstance(text, str) or reason not in ("stop", "length") or not whole_characters(text):
            shown = say(choices) if choice is None else f"text {say(text)}, finish_reason {say(reason)}"
            raise UserError(
                f"server.url: {self.server.url} answered choices {shown}; one choice with a text and finish_reason "
                "'stop' or 'length' is needed"
            )
        cut, tokens = reason == "length", choice.get("token_ids") if isinstance(choice, dict) else None
        whole = isinstance(tokens, list) and tokens and all(type(one) is int and one >= 0 for one in tokens)
        if isinstance(tokens, list) and whole and (cut or tokens[-1] in self.end_tokens):
            return Written(tuple(tokens), cut)
        return Written(None, cut, text)  # a server that does not tell which tokens it wrote: its text stands for them

    def _asked(self, what: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One reply, tried again while it may help."""
        for tries in range(self.server.retries + 1):
            try:
                return self._parsed(self._once(what, body))
            except urllib.error.HTTPError as error:
                with error:
                    fault, passing = f"HTTP {error.code} {_short(error.read(400))}", error.code in TRY_AGAIN
            except (OSError, http.client.HTTPException) as error:
                fault, passing = f"{type(error).__name__}: {_short(str(error).encode())}", True
            if not passing or tries == self.server.retries:
                raise UserError(
                    f"server.url: {self.server.url}/{what} failed, tried {tries + 1} times ({fault}); a server of "
                    "OpenAI's completions protocol with the target is needed there"
                )
            self._wait(min(WAIT * 2**tries, LONGEST_WAIT) * random.uniform(0.5, 1.0))  # no result depends on it
        raise AssertionError("the last try returns or raises")

    def _once(self, what: str, body: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.server.key_file is not None:
            headers["Authorization"] = f"Bearer {_token(self.server.key_file)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.url.rstrip('/')}/{what}", data, headers)
        with self._opener.open(request, timeout=self.server.timeout_s) as reply:
            return reply.read()

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise UserError(f"server.url: {self.server.url} answered {_short(data)}; a JSON object is needed")
        return reply


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: what would redirect is an error."""


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(file: Path) -> str:
    try:
        lines = file.expanduser().read_text("utf-8").split()
    except (OSError, RuntimeError, ValueError) as error:  # no such file; no such home; not UTF-8
        raise UserError(f"server.key_file: {file} cannot be read ({type(error).__name__})") from None
    if not lines or not lines[0].isascii():
        raise UserError(f"server.key_file: {file} holds no token")
    return lines[0]


def _short(data: bytes) -> str:
    text = " ".join(data[:400].decode("utf-8", "replace").split())
    return repr(text if len(text) <= 120 else text[:117] + "...")
