"""``service_tier`` on vLLM's own endpoints: vLLM reads the field and ignores it, its scheduler knows priorities."""

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PRIORITY_HEADER = "x-vllm-priority"
"""vLLM takes it over the body's ``priority``."""
PRIORITIES = {"priority": -1, "flex": 1}
BATCH_PRIORITY = 2
"""Above 0 is offline work for ``neaptide_vllm.scheduler``: a caller waits for flex, none for a batch's line."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class _Asked(msgspec.Struct):
    service_tier: str | None = None
    priority: int | None = None


_decoder = msgspec.json.Decoder(_Asked)


def priority_of(body: bytes) -> int | None:
    """The priority that a request's tier stands for; None if it has none, or asks for a priority itself."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # vLLM refuses it.
    return PRIORITIES.get(asked.service_tier or "") if asked.priority is None else None


class TierMiddleware:
    """Sets the priority of requests with a service tier."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(_PATHS)
        if not is_ours or any(name == PRIORITY_HEADER.encode() for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        body = bytearray()
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        priority = priority_of(bytes(body))
        if priority is not None:
            header = PRIORITY_HEADER.encode(), str(priority).encode()
            scope = {**scope, "headers": [*scope["headers"], header]}
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)
