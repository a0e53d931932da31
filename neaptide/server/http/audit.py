"""Audit lines in the request log: every call of the files, batches and admin routes, with its key and object."""

import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.server.http.auth import ANONYMOUS
from neaptide.server.observe.request_log import CallRecord, log_request

AUDITED_PATHS = ("/v1/files", "/v1/batches", "/admin")
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})
_OBJECT_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")


class AuditMiddleware:
    """Writes the audit lines. It is outside of the key check, so that refused calls are logged too. Logs no text of the
    caller."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(AUDITED_PATHS):
            await self._app(scope, receive, send)
            return
        start_s = self._clock()
        status, sent_bytes, is_whole = 500, 0, False

        async def send_counted(message: Message) -> None:
            nonlocal status, sent_bytes, is_whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            state = scope.get("state", {})
            log_request(
                CallRecord(
                    request_id=str(state.get("request_id", "")),
                    key=state.get("principal", ANONYMOUS).key_id,
                    endpoint=getattr(scope.get("route"), "path", None) or "unmatched",
                    method=scope["method"] if scope["method"] in METHODS else "other",
                    object_id=_object_id(scope),
                    status=status,
                    outcome=_outcome(status) if is_whole else "aborted",
                    sent_bytes=sent_bytes,
                    e2e_ms=round((self._clock() - start_s) * 1000, 3),
                )
            )


def note_object(scope: Scope, object_id: str) -> None:
    """Sets the file or batch that a call has created."""
    scope.setdefault("state", {})["object_id"] = object_id


def _object_id(scope: Scope) -> str | None:
    params = scope.get("path_params", {})
    for found in (scope.get("state", {}).get("object_id"), params.get("file_id"), params.get("batch_id")):
        if found is not None and _OBJECT_ID.fullmatch(found):
            return str(found)
    return None


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
