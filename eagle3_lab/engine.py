"""Serving engines: a head's throughput and acceptance where it is deployed, by the engine's own counters.

An engine serves the target over OpenAI's completions protocol, once plainly and once with the head. `VLLM` starts vLLM
on this machine's loopback, from an environment of its own (`make engine`), and ends it by its process id; `Addresses`
names two servers that run already, vLLM's or SGLang's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_lab.data.generation.server import Server
from eagle3_lab.errors import UserError

PINNED = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
"""Greedy decoding, whatever a model's own generation settings say."""

VLLM_COUNTS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
SGLANG_LENGTH = "sglang:spec_accept_length"
METRIC = re.compile(r"^([a-z0-9_:]+?)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class Engine(ABC):
    """What serves the target. ``drafts``: tokens drafted a round; ``batch_sizes``: requests at a time, ascending."""

    drafts: int
    batch_sizes: Sequence[int]

    @abstractmethod
    def serve(self, target: str, head: Path | None) -> AbstractContextManager[Client]:
        """Return a server of the target, with the head in folder ``head`` or plain. Raises UserError where none is."""

    @property
    @abstractmethod
    def needs_head(self) -> bool:
        """Whether the head is handed over as a folder; else the server has it already."""


@dataclass(frozen=True)
class Completion:
    """One answer: its text and how many tokens the engine counts in it."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Client:
    """Requests to one server. ``root``: its address without a path; ``model``: the served name."""

    root: str
    model: str
    timeout_s: float = 600.0

    @staticmethod
    def of(url: str) -> Client:
        """Return a client of the server at ``url``, which ends in ``/v1``. Raises UserError where none answers."""
        root = url.rstrip("/").removesuffix("/v1")
        listed = _json(_get(f"{root}/v1/models", 30.0), root).get("data")
        if not isinstance(listed, list) or not listed or "id" not in listed[0]:
            raise UserError(f"engine: {url} lists no model; an OpenAI-compatible server is needed there")
        return Client(root, listed[0]["id"])

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Return the greedy answer to a prompt of token ids."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_new_tokens, **PINNED}
        reply = _json(_get(f"{self.root}/v1/completions", self.timeout_s, body), self.root)
        try:
            return Completion(reply["choices"][0]["text"], reply["usage"]["completion_tokens"])
        except (LookupError, TypeError):
            raise UserError(
                f"engine: {self.root} answered {str(reply)[:120]!r}; a choice and its usage are needed"
            ) from None

    def complete_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_a_time: int) -> list[Completion]:
        """Return the answers to all prompts, in their order, ``at_a_time`` of them asked at once."""
        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_new_tokens), prompts))

    def metrics(self) -> dict[str, float]:
        """Return the server's counters and gauges by name, summed over labels."""
        values: dict[str, float] = {}
        for name, value in METRIC.findall(_get(f"{self.root}/metrics", 30.0).decode("utf-8", "replace")):
            values[name] = values.get(name, 0.0) + float(value)
        return values


def acceptance_length(before: dict[str, float], after: dict[str, float], where: str) -> float:
    """Return the tokens emitted per round between two readings of a server's metrics, the bonus token counted.

    Raises:
        UserError: a server without metrics of speculation.
    """
    drafts, accepted = VLLM_COUNTS
    if drafts in after and accepted in after:
        rounds = after[drafts] - before.get(drafts, 0.0)
        if rounds <= 0:
            raise UserError(f"engine: {where} drafted nothing; start it with the head")
        return 1 + (after[accepted] - before.get(accepted, 0.0)) / rounds
    if SGLANG_LENGTH in after:
        return after[SGLANG_LENGTH]
    raise UserError(
        f"engine: {where} has no metrics of speculation ({drafts} or {SGLANG_LENGTH}); start it with the head, and "
        "SGLang with --enable-metrics"
    )


class VLLM(Engine):
    """vLLM, started on this machine's loopback from an environment of its own.

    Args:
        drafts: tokens drafted a round (a chain).
        batch_sizes: requests at a time.
        python: the environment's interpreter; `make engine` makes it.
        dtype: of the target and the head.
        context: tokens of prompt and answer together at most.
        cache_gib: memory for keys and values.
        startup_s: seconds until the server must answer.
        eager: leave compilation out: the server starts sooner and decodes slower.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(
        self,
        drafts: int = 3,
        batch_sizes: list[int] | None = None,
        python: Path = Path(".venv-engine/bin/python"),
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        context: int = 2048,
        cache_gib: int = 1,
        startup_s: float = 600.0,
        eager: bool = False,
    ) -> None:
        self.drafts, self.batch_sizes = drafts, _sizes(drafts, batch_sizes)
        if context < 1 or cache_gib < 1 or startup_s <= 0:
            raise ValueError(
                f"engine.context, cache_gib and startup_s must be >= 1, got {context, cache_gib, startup_s}"
            )
        self.python, self.dtype, self.context = python.expanduser(), dtype, context
        self.cache_gib, self.startup_s, self.eager = cache_gib, startup_s, eager

    @property
    def needs_head(self) -> bool:
        return True

    @contextmanager
    def serve(self, target: str, head: Path | None) -> Iterator[Client]:
        if not self.python.is_file():
            raise UserError(f"engine.python: no file {self.python}; run `make engine`, or name another environment's")
        port = _free_port()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                self.command(target, head, port),
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield self._ready(process, f"http://127.0.0.1:{port}", log)
            finally:
                _end(process)

    def command(self, target: str, head: Path | None, port: int) -> list[str]:
        """Return the server's command line."""
        words = [str(self.python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype]
        words += ["--max-model-len", str(self.context), "--generation-config", "vllm"]
        words += ["--no-enable-prefix-caching", "--max-num-seqs", str(max(self.batch_sizes))]
        if self.eager:
            words.append("--enforce-eager")
        if head is not None:
            config = {"method": _method(head), "model": str(head.resolve()), "num_speculative_tokens": self.drafts}
            words += ["--speculative-config", json.dumps(config)]
        return words

    def _environment(self) -> dict[str, str]:
        own = {"VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        openmp = self.python.absolute().parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():  # of the CPU build, which asks for it ahead of torch's own
            own["LD_PRELOAD"] = str(openmp)
        return os.environ | own

    def _ready(self, process: subprocess.Popen[bytes], root: str, log: Any) -> Client:  # noqa: ANN401 - a file
        deadline = time.monotonic() + self.startup_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise UserError(f"engine: vLLM ended with status {process.returncode} before it answered: {_last(log)}")
            with contextlib.suppress(UserError):
                _get(f"{root}/health", 5.0)
                return Client.of(f"{root}/v1")
            time.sleep(1.0)
        raise UserError(f"engine: vLLM has not answered within {self.startup_s:.0f} s; raise engine.startup_s")


class Addresses(Engine):
    """Two servers that run already: one of the target alone, one with the head.

    Args:
        plain: address of the first, up to and including ``/v1``.
        speculating: of the second.
        drafts: tokens that the second drafts a round.
        batch_sizes: requests at a time.
        remote: false: only this machine is asked.

    Raises:
        ValueError: an address that is none, or of another machine without ``remote``; a number below 1.
    """

    def __init__(
        self,
        plain: str,
        speculating: str,
        drafts: int = 3,
        batch_sizes: list[int] | None = None,
        remote: bool = False,
    ) -> None:
        self.drafts, self.batch_sizes = drafts, _sizes(drafts, batch_sizes)
        for url in (plain, speculating):
            Server(url, remote=remote)
        self.plain, self.speculating = plain, speculating

    @property
    def needs_head(self) -> bool:
        return False

    @contextmanager
    def serve(self, target: str, head: Path | None) -> Iterator[Client]:
        yield Client.of(self.plain if head is None else self.speculating)


def _sizes(drafts: int, batch_sizes: list[int] | None) -> list[int]:
    sizes = [1, 2, 4, 8, 16, 32, 64] if batch_sizes is None else batch_sizes
    if drafts < 1:
        raise ValueError(f"engine.drafts must be >= 1, got {drafts}")
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"engine.batch_sizes must be ascending numbers from 1 on, got {sizes}")
    return sizes


def _method(head: Path) -> str:
    """Return what vLLM calls the kind of head in a folder that `export` wrote."""
    config = json.loads((head / "config.json").read_text("utf-8"))
    kinds = {"LlamaForCausalLMEagle3": "eagle3", "Eagle3DraftModel": "eagle3", "MedusaModel": "medusa"}
    return kinds.get(config["architectures"][0], "eagle")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and the workers of its session, which is its own."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _last(log: Any) -> str:  # noqa: ANN401 - a file
    """Return the line of a log that says what went wrong: its last error, else its last line."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*Error: ", line)]
    return (errors or lines or ["nothing"])[-1][-240:]


def _get(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        with error:
            message = " ".join(error.read(300).decode("utf-8", "replace").split())
        raise UserError(f"engine: {url} answered HTTP {error.code} ({message[:160]})") from None
    except OSError as error:
        raise UserError(f"engine: {url} is not reachable ({error}); start the server, or correct the address") from None


def _json(data: bytes, root: str) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise UserError(f"engine: {root} answered {data[:80]!r}; a JSON object is needed")
    return reply
