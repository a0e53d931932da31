"""Every call of the files, batches and admin routes leaves one line: which key, what, on which object, how it ended."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from neaptide.server.app import ServerState, create_app
from neaptide.server.http.auth import KeyRing
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.asgi import Exchange
from tests.server.batches.fakes import CHAT, Server, numbered
from tests.server.conftest import make_context

RING = KeyRing(("alpha:admin", "beta"))
ALPHA, BETA = (RING.identify(f"Bearer {key}").tenant[:8] for key in ("alpha", "beta"))
PAGE = "https://chat.example"


@dataclass
class Audited:
    app: FastAPI
    http: httpx2.AsyncClient
    caplog: pytest.LogCaptureFixture

    def lines(self) -> list[dict[str, Any]]:
        found = [json.loads(r.getMessage()) for r in self.caplog.records if r.name == "neaptide.requests"]
        self.caplog.clear()
        return found

    async def call(self, method: str, path: str, key: str = "alpha", **more: Any) -> tuple[Any, dict[str, Any]]:
        """A call's reply and its one line."""
        headers = {"Authorization": f"Bearer {key}", "x-request-id": "mine"}
        reply = await self.http.request(method, path, headers=headers, **more)
        (line,) = self.lines()
        assert line["request_id"] == "mine"
        assert line["e2e_ms"] >= 0
        return reply, line


@pytest.fixture
async def audited(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Audited]:
    caplog.set_level(logging.DEBUG)
    async with Server(tmp_path) as server:
        context = make_context(tokenizer, server.client)
        state = ServerState(context=context, keys=RING, cors_origins=(PAGE,), batches=server.service)
        app = create_app(state, extra_routers=(files_router(server.service), batches_router(server.service)))
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Audited(app, http, caplog)


def what(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("key", "method", "endpoint", "object_id", "status", "outcome"))


async def test_the_life_of_a_file_and_a_batch(audited: Audited) -> None:
    upload = {"files": {"file": ("in.jsonl", numbered(1))}, "data": {"purpose": "batch"}}
    reply, line = await audited.call("POST", "/v1/files", **upload)
    file_id = reply.json()["id"]
    assert what(line) == (ALPHA, "POST", "/v1/files", file_id, 200, "ok")
    reply, line = await audited.call("GET", f"/v1/files/{file_id}/content")
    assert what(line) == (ALPHA, "GET", "/v1/files/{file_id}/content", file_id, 200, "ok")
    assert line["sent_bytes"] == len(reply.content) == len(numbered(1))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    reply, line = await audited.call("POST", "/v1/batches", json=body)
    batch_id = reply.json()["id"]
    assert what(line) == (ALPHA, "POST", "/v1/batches", batch_id, 200, "ok")
    _, line = await audited.call("POST", f"/v1/batches/{batch_id}/cancel")
    assert what(line) == (ALPHA, "POST", "/v1/batches/{batch_id}/cancel", batch_id, 200, "ok")
    _, line = await audited.call("GET", "/v1/batches?limit=1")
    assert what(line) == (ALPHA, "GET", "/v1/batches", None, 200, "ok")


async def test_anothers_object_is_named_with_who_asked_for_it(audited: Audited) -> None:
    file_id = f"file-{'0' * 24}"
    _, line = await audited.call("DELETE", f"/v1/files/{file_id}", key="beta")
    assert what(line) == (BETA, "DELETE", "/v1/files/{file_id}", file_id, 404, "client_error")


async def test_a_call_without_a_known_key_is_written_down(audited: Audited) -> None:
    _, line = await audited.call("GET", "/v1/files", key="guess")
    assert what(line) == (None, "GET", "unmatched", None, 401, "client_error")


async def test_a_page_of_a_site_that_may_not_call_is_written_down(audited: Audited) -> None:
    headers = {"origin": "https://other.example", "access-control-request-method": "POST"}
    reply = await audited.http.options("/v1/files", headers=headers)
    assert reply.status_code == 400
    (line,) = audited.lines()
    assert what(line) == (None, "OPTIONS", "unmatched", None, 400, "client_error")


async def test_the_operators_switch_is_written_down(audited: Audited) -> None:
    _, line = await audited.call("POST", "/admin/offline", json={"state": "nonsense"})
    assert what(line) == (ALPHA, "POST", "/admin/offline", None, 400, "client_error")
    _, line = await audited.call("POST", "/admin/offline", key="beta", json={"state": "paused"})
    assert what(line) == (BETA, "POST", "/admin/offline", None, 403, "client_error")


async def test_nothing_that_a_caller_made_up_is_written_down(audited: Audited) -> None:
    for method, path in (("GET", "/v1/files/canary"), ("GET", "/v1/batches/canary/x"), ("CANARY", "/v1/files")):
        _, line = await audited.call(method, path)
        assert "canary" not in json.dumps(line).lower()
    assert line["method"] == "other"


async def test_other_routes_leave_no_such_line(audited: Audited) -> None:
    await audited.http.get("/v1/models", headers={"Authorization": "Bearer alpha"})
    await audited.http.get("/health")
    assert audited.lines() == []


async def test_a_reader_that_leaves_is_told_from_one_that_got_everything(audited: Audited) -> None:
    upload = {"files": {"file": ("in.jsonl", numbered(5_000))}, "data": {"purpose": "batch"}}
    reply, _ = await audited.call("POST", "/v1/files", **upload)
    path = f"/v1/files/{reply.json()['id']}/content"
    exchange = Exchange(audited.app, path, None, {"authorization": "Bearer alpha"}, method="GET")
    exchange.hang_up()
    await asyncio.gather(exchange.task, return_exceptions=True)
    (line,) = audited.lines()
    assert (line["outcome"], line["sent_bytes"]) == ("aborted", 0)
