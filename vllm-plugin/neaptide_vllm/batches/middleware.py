"""``service_tier`` and latency targets on vLLM's own endpoints.

vLLM reads a tier and ignores it; its scheduler knows priorities. It passes ``vllm_xargs`` on unread, so a wrong target
would count for nothing without a word.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.server.http.error_replies import error_response
from neaptide.server.http.errors import ApiError, InvalidRequestError
from neaptide_vllm.scheduling.online import TARGETS, target_ms

PRIORITY_HEADER = "x-vllm-priority"
"""vLLM takes it over the body's ``priority``."""
TARGET_HEADERS = {name: f"x-neaptide-{name.replace('_', '-')}" for name in TARGETS}
"""Header of each target, for clients that cannot add fields to a body."""
PRIORITIES = {"priority": -1, "flex": 1}
BATCH_PRIORITY = 2
"""Above 0 is offline work for ``neaptide_vllm.scheduler``: a caller waits for flex, none for a batch's line."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class _Asked(msgspec.Struct):
    service_tier: str | None = None
    priority: int | None = None
    vllm_xargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Asked)


class RequestMiddleware:
    """Sets the priority of requests with a service tier, reads targets from headers, and refuses wrong ones."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
        messages = [message] if message["type"] != "http.request" else []
        try:
            scope, whole = _read(scope, bytes(body))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        messages.append({"type": "http.request", "body": whole, "more_body": bool(messages)})

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def _read(scope: Scope, body: bytes) -> tuple[Scope, bytes]:
    """The request as vLLM gets it. What vLLM refuses itself is left as it is.

    Raises:
        InvalidRequestError: a target is no positive number.
    """
    headers = Headers(scope=scope)
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return scope, body
    given = asked.vllm_xargs or {}
    for name in TARGETS:
        if name in given:
            _check(given[name], f"vllm_xargs.{name}")
    named = {name: _check(headers[header], header) for name, header in TARGET_HEADERS.items() if header in headers}
    added: list[tuple[bytes, bytes]] = []
    if named.keys() - given.keys():
        body = _with_targets(body, named | given)
        added.append((b"content-length", str(len(body)).encode()))
    priority = PRIORITIES.get(asked.service_tier or "") if asked.priority is None else None
    if priority is not None and PRIORITY_HEADER not in headers:
        added.append((PRIORITY_HEADER.encode(), str(priority).encode()))
    replaced = {name for name, _ in added}
    kept = [(name, value) for name, value in scope["headers"] if name not in replaced]
    return {**scope, "headers": kept + added}, body


def _check(value: object, param: str) -> float:
    try:
        return target_ms(value)
    except ValueError:
        raise InvalidRequestError("A latency target must be a positive number of milliseconds.", param=param) from None


def _with_targets(body: bytes, arguments: Mapping[str, Any]) -> bytes:
    whole: dict[str, Any] = msgspec.json.decode(body)
    return msgspec.json.encode(whole | {"vllm_xargs": arguments})
