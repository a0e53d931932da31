"""One HTTP exchange with an ASGI app, step by step: what a transport that collects the reply cannot show."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """Sends a JSON body, shows what comes back as it comes, and can hang up."""

    def __init__(
        self, app: ASGIApp, path: str, body: object, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> None:
        self.sent: list[Message] = []
        raw = json.dumps(body).encode()
        self._messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
        self._hung_up = asyncio.Event()
        self._news = asyncio.Event()
        all_headers = {"content-type": "application/json", **(headers or {})}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in all_headers.items()],
            "server": ("test", 80),
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._hung_up.is_set():
            raise OSError("the client is gone")
        self.sent.append(message)
        self._news.set()

    def hang_up(self) -> None:
        self._hung_up.set()

    async def until(self, text: str) -> None:
        """Waits for the reply to contain ``text``."""
        while text not in self.text:
            self._news.clear()
            await self._news.wait()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[str, str]:
        start = next(m for m in self.sent if m["type"] == "http.response.start")
        return {key.decode().lower(): value.decode() for key, value in start["headers"]}

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body").decode()

    @property
    def events(self) -> list[Any]:
        text = re.sub("^:.*\n", "", self.text, flags=re.MULTILINE)  # Comments.
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def settle() -> None:
    """Lets everything that is ready to run on the loop run."""
    for _ in range(20):
        await asyncio.sleep(0)
