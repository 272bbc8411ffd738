"""A small server of OpenAI's completions protocol in a thread, whose replies a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]


class Fake:
    """A completions server whose replies a test decides. ``seen``: (path, headers, body) of every request."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.reply: Callable[[Any], Reply] = lambda body: (200, answer(f"to {body['prompt'][0]}"))
        self.models: Reply = (200, json.dumps({"data": [{"id": "tiny"}]}).encode())
        self.at_once = self.most = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.path, dict(self.headers), None))
                self._send(*outer.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.seen.append((self.path, dict(self.headers), body))
                    outer.at_once += 1
                    outer.most = max(outer.most, outer.at_once)
                try:
                    self._send(*outer.reply(body))
                finally:
                    with outer._lock:
                        outer.at_once -= 1

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def asked(self) -> list[Any]:
        return [body for path, _, body in self.seen if path == "/v1/completions"]


def answer(text: str, reason: str = "stop") -> bytes:
    return json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode()


@contextmanager
def serving() -> Iterator[Fake]:
    found = Fake()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
        thread.join()
