"""Sends batch lines to vLLM's own application, in its process: a line is answered exactly as a chat is.

Tools, reasoning, images, adapters and vLLM's own refusals come with it. Only HTTP is used, so vLLM's handlers may
change.
"""

import asyncio
import copy
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Message


class HttpReply(NamedTuple):
    status: int
    body: bytes


class LineApp:
    """vLLM's application without its middlewares, which have judged the batch's own request before."""

    def __init__(self, app: FastAPI) -> None:
        self._app = copy.copy(app)
        self._app.user_middleware = []
        self._app.middleware_stack = None

    async def post(self, path: str, body: bytes, headers: dict[str, str], is_dropped: asyncio.Event) -> HttpReply:
        """The reply to one line. ``is_dropped`` stands for a client that disconnects: vLLM then aborts the request."""
        status, parts, sent = 500, bytearray(), False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await is_dropped.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.extend(message.get("body", b""))

        await self._app(self._scope(path, headers), receive, send)
        return HttpReply(status, bytes(parts))

    def _scope(self, path: str, headers: dict[str, str]) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "state": {},
        }
