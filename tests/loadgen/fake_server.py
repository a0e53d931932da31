"""An OpenAI-compatible server that is no Neaptide: words are tokens, answers come at once."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEMPLATE_TOKENS = 5
"""That a chat has around its text."""


class FakeServer:
    """What it was asked, and how it behaves."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        """Of generations, in the order of arrival."""
        self.uploads: list[bytes] = []
        self.cancelled: list[str] = []
        self.keys: set[str | None] = set()
        self.can_tokenize = True
        self.has_template = True
        self.fails_every = 0
        """So many-th generation is refused; 0: none."""
        self.stalls = threading.Event()
        """Set when streams may go on after the first token."""
        self.stalls.set()
        self.asked_for_batch = False
        counts = {"total": 2, "completed": 1, "failed": 0}
        self.batch: dict[str, Any] = {
            "id": "batch-1",
            "status": "in_progress",
            "request_counts": counts,
            "errors": None,
        }
        """As it is whenever it is asked for, but not when it is made."""


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    state = FakeServer()

    class Handler(_Handler):
        server_state = state

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            state.stalls.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"data": [{"id": "fake"}]})
        elif self.path.startswith("/v1/batches/"):
            self.server_state.asked_for_batch = True
            self._json(self.server_state.batch)
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def do_POST(self) -> None:
        state = self.server_state
        state.keys.add(self.headers.get("authorization"))
        content = self.rfile.read(int(self.headers["content-length"]))
        if not state.has_template and b'"messages"' in content:
            self._json({"error": {"message": "This model has no chat template; use /v1/completions."}}, 400)
        elif self.path == "/v1/files":
            state.uploads.append(content)
            self._json({"id": "file-1"})
        elif self.path == "/v1/batches":
            self._json(state.batch | {"status": "validating"})
        elif self.path.endswith("/cancel"):
            state.cancelled.append(self.path)
            self._json(state.batch | {"status": "cancelling"})
        elif self.path == "/tokenize" and state.can_tokenize:
            self._json({"count": _prompt_tokens(json.loads(content))})
        elif self.path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(json.loads(content))
        else:
            self._json({"error": {"message": "no such page"}}, 404)

    def _generate(self, body: dict[str, Any]) -> None:
        state = self.server_state
        usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": 1}
        if not body.get("stream"):
            self._json({"usage": usage})
            return
        state.bodies.append(body)
        if state.fails_every and len(state.bodies) % state.fails_every == 0:
            self._json({"error": {"message": "overloaded"}}, 503)
            return
        count = body.get("max_completion_tokens", body.get("max_tokens"))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for k in range(count):
                self._event({"choices": [{"delta": {"content": "a"}, "text": "a"}]})
                if k == 0:
                    state.stalls.wait()
            usage["completion_tokens"] = count
            self._event({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}], "usage": usage})
        except OSError:  # the client hung up
            pass
        self.close_connection = True

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _json(self, data: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return len(body["messages"][0]["content"].split()) + TEMPLATE_TOKENS
    return len(body["prompt"].split()) + body.get("add_special_tokens", True)
