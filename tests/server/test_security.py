"""What gets in where, and what never gets out: every route by key, tenant, path, host and method; secrets; labels."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from neaptide.server.app import ServerState, create_app
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.wiring import BatchSettings
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import OPEN_PATHS, KeyRing
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import until
from tests.server.asgi import Exchange
from tests.server.batches.fakes import ThreadChecker
from tests.server.batches.test_same_answer import RowEngine
from tests.server.conftest import MODEL_ID, USER, make_context

CHAT = "/v1/chat/completions"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
WRONG_KEYS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer gamma"},
    {"authorization": "Bearer alpha,beta"},
    {"authorization": "Basic alpha"},
    {"x-api-key": "alpha"},
    {"cookie": "authorization=Bearer alpha"},
)
ODD_PATHS = (
    "//v1/models",
    "/v1//models",
    "/v1/../v1/models",
    "/health/../v1/models",
    "/v1/models/",
    "/health/",
    "/health//",
    "//health",
    "/HEALTH",
    "/health\0",
    "/health;/v1/models",
    "/metrics/x",
    "/./health",
    "//",
    "",
    "*",
    "/v1",
    "/nothing",
)
ODD_HOSTS = ("x/foo?", "x/health?", "x/health#", "health", "x@/health", "x\\health", "[::1", "", "a\tb")


@dataclass
class Fortress:
    """The whole app with the keys alpha and beta, files and batches included."""

    app: FastAPI
    data_dir: Path
    alpha: httpx2.AsyncClient
    beta: httpx2.AsyncClient

    async def status(self, method: str, path: str, headers: dict[str, str]) -> int | None:
        exchange = Exchange(self.app, path, {}, headers, method)
        await exchange.task
        if exchange.status == 401:
            assert exchange.headers["www-authenticate"] == "Bearer"
            assert exchange.headers["x-request-id"]
            if method != "HEAD":
                assert set(json.loads(exchange.text)["error"]) == {"message", "type", "param", "code"}
        return exchange.status


@asynccontextmanager
async def standing(data_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[Fortress]:
    client = EngineClient()
    context = make_context(tokenizer, client)
    compiler = ContextCompiler(context)
    settings = BatchSettings(data_dir=data_dir, tick_s=0.02)
    service = BatchService(settings, client, compiler, ThreadChecker(compiler))
    state = ServerState(context=context, keys=KeyRing(("alpha", "beta")), batches=service)
    app = create_app(state, extra_routers=(files_router(service), batches_router(service)))
    await service.start()
    RowEngine(client).attach()
    try:
        async with _http(app, "alpha") as alpha, _http(app, "beta") as beta:
            yield Fortress(app, data_dir, alpha, beta)
    finally:
        await service.stop()


def _http(app: FastAPI, key: str) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test", headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
async def fortress(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Fortress]:
    async with standing(tmp_path, tokenizer) as built:
        yield built


def every_route(app: FastAPI) -> set[str]:
    """Paths of all routes, in the document or not, with their parameters filled in."""
    found: set[str] = set()
    waiting: list[Any] = list(app.routes)
    while waiting:
        route = waiting.pop()
        if getattr(route, "path", None) is not None:
            path = route.path
            for name in ("{model_id:path}", "{file_id}", "{batch_id}"):
                path = path.replace(name, "x")
            found.add(path)
        else:
            waiting += route.original_router.routes
    return found


# ---- keys ------------------------------------------------------------------------------------------------


async def test_the_walk_finds_every_route(fortress: Fortress) -> None:
    found = every_route(fortress.app)
    document = {path.replace("{model_id}", "x") for path in fortress.app.openapi()["paths"]}
    assert {path.replace("{file_id}", "x").replace("{batch_id}", "x") for path in document} <= found
    assert {"/openapi.json", "/v1/files/x/content", "/v1/batches/x/cancel", "/admin/offline"} <= found
    assert found >= OPEN_PATHS


@pytest.mark.acceptance("A27", "every route x method without a known key", count=1_350)
async def test_every_route_by_method_without_a_known_key(fortress: Fortress) -> None:
    for path in every_route(fortress.app):
        for method in METHODS:
            for headers in WRONG_KEYS:
                status = await fortress.status(method, path, headers)
                if path in OPEN_PATHS:
                    assert status == (200 if method in ("GET", "HEAD") else 405), (method, path)
                else:
                    assert status == 401, (method, path, headers)


@pytest.mark.acceptance("A27", "odd paths x method, without and with a key", count=324)
async def test_odd_paths_open_nothing(fortress: Fortress) -> None:
    for path in ODD_PATHS:
        for method in METHODS:
            assert await fortress.status(method, path, {}) == 401, (method, path)
            status = await fortress.status(method, path, {"authorization": "Bearer alpha"})
            assert status in (404, 405), (method, path)


@pytest.mark.acceptance("A27", "Host headers that name an open path", count=171)
async def test_the_host_header_opens_nothing(fortress: Fortress) -> None:
    for path in every_route(fortress.app):
        if path not in OPEN_PATHS:
            for host in ODD_HOSTS:
                assert await fortress.status("GET", path, {"host": host}) == 401, (path, host)


async def test_a_405_names_every_method_of_routes_that_share_a_path(fortress: Fortress) -> None:
    for path, allow in (
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/x", "GET, HEAD, DELETE"),
        ("/v1/batches", "GET, HEAD, POST"),
    ):
        reply = await fortress.alpha.request("PATCH", path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allow)


@pytest.mark.acceptance("A27", "every route x method with a key", count=189)
async def test_every_route_by_method_with_a_key(fortress: Fortress) -> None:
    documented = fortress.app.openapi()["paths"]
    by_path: dict[str, set[str]] = {}
    for path, operations in documented.items():
        filled = path.replace("{model_id}", "x").replace("{file_id}", "x").replace("{batch_id}", "x")
        by_path.setdefault(filled, set()).update(name.upper() for name in operations)
    by_path["/v1/batches/check_receipt"] |= by_path["/v1/batches/x"]  # it could be a batch's name
    for path, offered in by_path.items():
        for method in METHODS:
            status = await fortress.status(method, path, {"authorization": "Bearer alpha"})
            as_get = "GET" if method == "HEAD" else method
            assert (status == 405) == (as_get not in offered), path
            assert status is not None
            assert status < 500, (method, path)


# ---- tenants ---------------------------------------------------------------------------------------------


async def upload(client: httpx2.AsyncClient, content: bytes, name: str = "in.jsonl") -> str:
    reply = await client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def create(client: httpx2.AsyncClient, file_id: str, **more: Any) -> httpx2.Response:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **more}
    return await client.post("/v1/batches", json=body)


async def ended(client: httpx2.AsyncClient, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def has_ended() -> bool:
        batch.update((await client.get(f"/v1/batches/{batch_id}")).json())
        return batch["status"] in ("completed", "failed")

    await until(has_ended)
    return batch


def a_line(text: str = "hi") -> bytes:
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).encode()


@pytest.mark.acceptance("A27", "another tenant's files and batches by every route", count=13)
async def test_another_tenants_things_do_not_exist(fortress: Fortress) -> None:
    file_id = await upload(fortress.alpha, a_line())
    batch = await ended(fortress.alpha, (await create(fortress.alpha, file_id)).json()["id"])
    assert batch["status"] == "completed"
    for identity in (file_id, batch["output_file_id"]):
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            stolen = await fortress.beta.request(method, f"/v1/files/{identity}{path}")
            unknown = await fortress.beta.request(method, f"/v1/files/file-{'0' * 24}{path}")
            assert (stolen.status_code, stolen.json()) == (404, unknown.json())
    for method, path in (("GET", ""), ("POST", "/cancel")):
        stolen = await fortress.beta.request(method, f"/v1/batches/{batch['id']}{path}")
        unknown = await fortress.beta.request(method, f"/v1/batches/batch_{'0' * 24}{path}")
        assert (stolen.status_code, stolen.json()) == (404, unknown.json())
    for path in ("/v1/files", "/v1/batches"):
        assert (await fortress.beta.get(path)).json()["data"] == []
    for path, identity in (("/v1/files", file_id), ("/v1/batches", batch["id"])):
        stolen = await fortress.beta.get(path, params={"after": identity})
        unknown = await fortress.beta.get(path, params={"after": "none"})
        assert (stolen.status_code, stolen.json()) == (400, unknown.json())
    # Alpha's things are as they were.
    assert (await fortress.alpha.get(f"/v1/files/{file_id}/content")).content == a_line()
    assert len((await fortress.alpha.get("/v1/files")).json()["data"]) == 2


async def test_a_batch_from_another_tenants_file_fails_as_from_a_missing_one(fortress: Fortress) -> None:
    file_id = await upload(fortress.alpha, a_line())
    stolen = await ended(fortress.beta, (await create(fortress.beta, file_id)).json()["id"])
    missing = await ended(fortress.beta, (await create(fortress.beta, f"file-{'0' * 24}")).json()["id"])
    assert stolen["status"] == "failed"
    assert stolen["errors"] == missing["errors"]


# ---- secrets ---------------------------------------------------------------------------------------------

CANARY = "canary-5e1f"
SPLIT = f"{CANARY}\r\nx-injected: {CANARY}\x1b[31m\x7f\x85\u2028"


async def confide(fortress: Fortress) -> list[httpx2.Response]:
    """Puts the canary wherever a caller can put text; returns the replies that must not repeat it."""
    alpha = fortress.alpha
    said = [{"role": "user", "content": SPLIT, "name": CANARY}]
    await alpha.post(CHAT, json={"messages": said, "max_tokens": 2, "user": SPLIT, "metadata": {CANARY: SPLIT}})
    await alpha.post(CHAT, json={"messages": said, "max_tokens": 2, "stop": [SPLIT], "stream": True})
    await alpha.post("/tokenize", json={"prompt": SPLIT})
    file_id = await upload(alpha, a_line(SPLIT), f"../../{CANARY}.jsonl")
    batch = (await create(alpha, file_id, metadata={CANARY: SPLIT})).json()
    await ended(alpha, batch["id"])
    bad_id = await upload(alpha, json.dumps({"custom_id": SPLIT, "method": CANARY, "url": SPLIT, "body": {}}).encode())
    failed = await ended(alpha, (await create(alpha, bad_id)).json()["id"])
    assert failed["status"] == "failed"
    assert CANARY not in json.dumps(failed["errors"])
    key = {"authorization": f"Bearer {CANARY}"}
    file = (f"{SPLIT}.jsonl", CANARY.encode())
    return [
        await alpha.post(CHAT, json={"messages": said, "model": SPLIT}),
        await alpha.post(CHAT, json={"messages": said, "temperature": SPLIT}),
        await alpha.post(CHAT, json={"messages": [{"role": SPLIT}], SPLIT: SPLIT}),
        await alpha.post(CHAT, content=f'{{"{CANARY}": '.encode(), headers={"content-type": "application/json"}),
        await alpha.post(CHAT, json={"messages": USER}, headers=key),
        await alpha.get(f"/v1/{CANARY}%0d%0a{CANARY}", headers={"x-request-id": f"{CANARY} {CANARY}"}),
        await alpha.get("/v1/models/x", headers={"x-request-id": f"{CANARY}\x1b[31m"}),
        await alpha.get("/v1/files", params={"after": SPLIT, "purpose": SPLIT}),
        await alpha.get("/v1/files", params={"limit": SPLIT, SPLIT: SPLIT}),
        await alpha.get(f"/v1/files/{CANARY}"),
        await alpha.post(f"/v1/batches/{CANARY}/cancel"),
        await alpha.post("/v1/files", files={"file": file}, data={"purpose": SPLIT}),
        await alpha.post("/v1/files", content=CANARY.encode(), headers={"content-type": CANARY}),
        await create(alpha, SPLIT, endpoint=SPLIT),
        await create(alpha, SPLIT, metadata={SPLIT: 5}),
        await alpha.request(CANARY, f"/{CANARY}"),
    ]


@pytest.mark.acceptance("A28", "secrets wherever a caller can put text, in logs, metrics, errors and names", count=24)
async def test_secrets_stay_out_of_logs_metrics_errors_and_names(
    fortress: Fortress, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "httpx2")  # the test's own client
    for reply in await confide(fortress):
        assert 400 <= reply.status_code < 500
        assert CANARY not in reply.text
        assert CANARY not in str(reply.headers)
    assert CANARY not in (await fortress.alpha.get("/metrics")).text
    for record in caplog.records:
        line = logging.Formatter().format(record)
        assert CANARY not in line
        assert line.replace("\n", "").isprintable() or record.exc_info
        assert "alpha" not in line.replace("alphabet", "")
    for path in fortress.data_dir.rglob("*"):
        assert CANARY not in path.name


async def test_an_unexpected_error_logs_the_route_not_the_path(
    fortress: Fortress, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(type(fortress.app.state.context), "serves", broken)
    reply = await fortress.alpha.get(f"/v1/models/{CANARY}%0d%0a")
    assert reply.status_code == 500
    assert "/v1/models/{model_id" in caplog.text
    assert CANARY not in caplog.text


async def test_file_names_are_data_and_come_back_safe(fortress: Fortress) -> None:
    file_id = await upload(fortress.alpha, a_line(), f'../a"b;\u202e{CANARY}.jsonl')
    reply = await fortress.alpha.get(f"/v1/files/{file_id}/content")
    disposition = reply.headers["content-disposition"]
    assert disposition.startswith("attachment; filename*=utf-8''a")
    assert disposition.isascii()
    assert '"' not in disposition
    assert [path.name for path in (fortress.data_dir / "files").iterdir()] == [file_id]
    for name in ("a\rx.jsonl", "a\0.jsonl", "a\x1b[31m.jsonl", "", "x" * 300 + ".jsonl", "..", "/"):
        refused = await fortress.alpha.post("/v1/files", content=form_with(name), headers=FORM)
        assert refused.status_code == 400, name


FORM = {"content-type": "multipart/form-data; boundary=b"}


def form_with(filename: str) -> bytes:
    """An upload by hand: clients escape what is odd in a name."""
    parts = (("purpose", "batch"), (f'file"; filename="{filename}', "x"))
    body = "".join(f'--b\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in parts)
    return (body + "--b--\r\n").encode()


@pytest.mark.parametrize(
    "sent", ["bytes=0-1,3-4", "bytes=" + "0-0," * 500 + "0-0", "bytes=9-", "bytes=3-1", "x=0-1", ""]
)
async def test_odd_ranges_get_the_whole_file(fortress: Fortress, sent: str) -> None:
    reply = await fortress.alpha.post("/v1/files", files={"file": ("a", b"12345")}, data={"purpose": "user_data"})
    content = await fortress.alpha.get(f"/v1/files/{reply.json()['id']}/content", headers={"range": sent})
    assert (content.status_code, content.content) == (200, b"12345")


@pytest.mark.acceptance("A28", "odd methods, paths and models against the number of metric labels", count=1_000)
async def test_labels_do_not_grow_with_odd_requests(fortress: Fortress) -> None:
    async def odd(i: int) -> None:
        await fortress.status(f"M{i}", f"/nothing/{i}", {})
        await fortress.status("GET", f"/v1/models/m{i}", {"authorization": "Bearer alpha"})
        await fortress.status("POST", f"/v1/files/f{i}/content", {"authorization": f"Bearer {i}"})
        await fortress.alpha.post(CHAT, json={"messages": USER, "model": f"m{i}", "service_tier": f"t{i}"})

    async def num_series() -> int:
        return len([line for line in (await fortress.alpha.get("/metrics")).text.splitlines() if line[0] != "#"])

    await num_series()
    await odd(0)
    before = await num_series()
    for i in range(1, 251):
        await odd(i)
    assert await num_series() == before
