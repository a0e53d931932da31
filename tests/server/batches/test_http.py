"""The routes: shapes, statuses, scoping, and what the OpenAI client makes of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

from neaptide.server.http.auth import AuthMiddleware, KeyRing
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.error_replies import install_handlers
from neaptide.server.quotes.desk import QuoteDesk
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from tests.server.batches.fakes import CHAT, Server, jsonl, line, numbered


def app_of(server: Server, keys: list[str] | None = None, desk: QuoteDesk | None = None) -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    app.state.context = SimpleNamespace(bodies=BodyThreads())  # all that these routes want of it
    install_handlers(app, RequestValidationError)
    app.add_middleware(AuthMiddleware, keys=KeyRing(keys or []))
    app.include_router(files_router(server.service))
    app.include_router(batches_router(server.service, desk))
    return app


@asynccontextmanager
async def http_client(app: FastAPI, key: str = "") -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://t", headers=headers) as client:
        yield client


@asynccontextmanager
async def openai_client(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    async with openai.AsyncOpenAI(base_url="http://t/v1", api_key="k", http_client=http, max_retries=0) as client:
        yield client


async def test_the_openai_client_from_upload_to_results(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, openai_client(app_of(server)) as client:
        server.engine.auto = True
        file = await client.files.create(
            file=("in.jsonl", numbered(3)),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.object, file.purpose, file.status, file.filename) == ("file", "batch", "processed", "in.jsonl")
        assert file.expires_at == file.created_at + 3600
        assert (await client.files.retrieve(file.id)) == file
        assert (await client.files.wait_for_processing(file.id)).id == file.id
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.object, batch.status) == ("batch", "validating")
        assert batch.request_counts is not None
        assert batch.request_counts.total == 0
        await server.until_status(batch.id, "completed")
        batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is None
        assert batch.usage is not None
        assert batch.usage.total_tokens == 60
        content = await client.files.content(batch.output_file_id)
        lines = [json.loads(entry) for entry in content.text.splitlines()]
        assert [entry["custom_id"] for entry in lines] == ["c0", "c1", "c2"]
        assert lines[0]["id"].startswith("batch_req_")
        output_file = await client.files.retrieve(batch.output_file_id)
        assert (output_file.purpose, output_file.bytes) == ("batch_output", len(content.content))
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_the_openai_client_pages_through_lists(tmp_path: Path) -> None:
    async with Server(tmp_path, engine=False) as server, openai_client(app_of(server)) as client:
        files = [(await server.upload(numbered(1))).id for _ in range(5)]
        batches = [(await server.create(input_file_id=file_id)).id for file_id in files]
        assert [entry.id async for entry in client.files.list(limit=2)] == files[::-1]
        assert [entry.id async for entry in client.files.list(limit=2, order="asc")] == files
        assert [entry.id async for entry in client.batches.list(limit=2)] == batches[::-1]


async def test_the_openai_client_sees_cancel_and_its_conflict(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, openai_client(app_of(server)) as client:
        batch = await server.create(numbered(2))
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        await server.until_status(batch.id, "cancelled")
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        failed = await server.create(b"oops\n")
        await server.until_status(failed.id, "failed")
        with pytest.raises(openai.ConflictError, match="'failed'") as error:
            await client.batches.cancel(failed.id)
        assert error.value.response.headers["x-should-retry"] == "false"
        shown = await client.batches.retrieve(failed.id)
        assert shown.errors is not None
        assert shown.errors.data is not None
        assert (shown.errors.data[0].line, shown.errors.data[0].code) == (1, "invalid_json_line")


GOOD: dict[str, Any] = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"completion_window": None}, "missing_required_parameter", "completion_window"),
        ({"input_file_id": 3}, "invalid_type", "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "invalid_value", "endpoint"),
        ({"completion_window": "48h"}, "invalid_value", "completion_window"),
        ({"metadata": []}, "invalid_type", "metadata"),
        ({"metadata": {"k": 1}}, "invalid_type", "metadata.k"),
        ({"metadata": {"k": "a\0"}}, "invalid_value", "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, "invalid_value", "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "invalid_value", "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": True}},
            "invalid_value",
            "output_expires_after.seconds",
        ),
    ],
)
async def test_create_bodies_that_are_refused(tmp_path: Path, fields: dict[str, Any], code: str, param: str) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.post("/v1/batches", json=GOOD | fields)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
        assert (await client.get("/v1/batches")).json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }


async def test_a_file_of_another_purpose_is_refused_at_create(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        file = await server.upload(numbered(1), purpose="user_data")
        reply = await client.post("/v1/batches", json=GOOD | {"input_file_id": file.id})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_file_id")


async def test_a_server_about_to_end_takes_no_new_file(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        server.service.suspend()
        reply = await client.post("/v1/files", files={"file": ("x", b"x\n")}, data={"purpose": "batch"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_shutdown")
        assert reply.headers["retry-after"]
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_server_about_to_end_takes_no_new_batch(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        file = await server.upload(numbered(1))
        server.service.suspend()
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        reply = await client.post("/v1/batches", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_shutdown")
        assert reply.headers["retry-after"]
        assert (await client.get("/v1/batches")).json()["data"] == []


@pytest.mark.acceptance("A19", "creates of one key at once", count=4)
async def test_one_batch_per_idempotency_key(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        headers = {"Idempotency-Key": "abc"}
        replies = await asyncio.gather(*(client.post("/v1/batches", json=GOOD, headers=headers) for _ in range(4)))
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["id"] for reply in replies}) == 1
        other = await client.post("/v1/batches", json=GOOD | {"input_file_id": "file-y"}, headers=headers)
        assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")
        assert len((await client.get("/v1/batches")).json()["data"]) == 1
        bad = await client.post("/v1/batches", json=GOOD, headers={"Idempotency-Key": "k" * 300})
        assert bad.status_code == 400


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "after=batch_unknown", "limit=", "after=%00", "after=%ff"]
)
async def test_list_parameters_that_are_refused(tmp_path: Path, query: str) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.get(f"/v1/batches?{query}")
        assert reply.status_code == 400
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_limit_that_is_no_number_is_said_to_be_none(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        message = (await client.get("/v1/batches?limit=secret")).json()["error"]["message"]
        assert message.startswith("Invalid value for 'limit': Input should be a valid integer")
        assert "secret" not in message


async def test_a_form_without_a_file_is_told_how_curl_sends_one(tmp_path: Path) -> None:
    """``-F file=PATH`` without the ``@``."""
    form = {"purpose": (None, b"batch"), "file": (None, b"in.jsonl")}
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.post("/v1/files", files=form)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
        assert "-F file=@PATH" in reply.json()["error"]["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "order=up", "after=file-unknown", "purpose=" + "p" * 65])
async def test_file_list_parameters_that_are_refused(tmp_path: Path, query: str) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.get(f"/v1/files?{query}")
        assert reply.status_code == 400
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_files_are_listed_by_purpose_with_the_ends_of_the_page(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        ids = [(await server.upload(b"x", purpose=purpose)).id for purpose in ("batch", "user_data", "batch")]
        page = (await client.get("/v1/files?purpose=batch&order=asc&limit=1")).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[0], True)
        page = (await client.get(f"/v1/files?purpose=batch&order=asc&after={ids[0]}")).json()
        assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[2]], False)


async def test_unknown_ids_are_404(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        for identity in ("x", "file-" + "0" * 24, "%00", "x" * 500, "..%2f..%2fneaptide.db"):
            for method, url in (
                ("GET", f"/v1/files/{identity}"),
                ("GET", f"/v1/files/{identity}/content"),
                ("DELETE", f"/v1/files/{identity}"),
                ("GET", f"/v1/batches/{identity}"),
                ("POST", f"/v1/batches/{identity}/cancel"),
            ):
                assert (await client.request(method, url)).status_code == 404, url


async def test_every_route_keeps_tenants_apart(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        app = app_of(server, ["one", "two"])
        async with http_client(app, "one") as one, http_client(app, "two") as two, http_client(app) as nobody:
            upload: dict[str, Any] = {"files": {"file": ("in.jsonl", numbered(1))}, "data": {"purpose": "batch"}}
            file_id = (await one.post("/v1/files", **upload)).json()["id"]
            batch_id = (await one.post("/v1/batches", json=GOOD | {"input_file_id": file_id})).json()["id"]
            owner = app.user_middleware[0].kwargs["keys"].identify("Bearer one").tenant  # type: ignore[attr-defined]
            await server.service.get_batch(batch_id, owner)
            for method, url in (
                ("GET", f"/v1/files/{file_id}"),
                ("GET", f"/v1/files/{file_id}/content"),
                ("DELETE", f"/v1/files/{file_id}"),
                ("GET", f"/v1/batches/{batch_id}"),
                ("POST", f"/v1/batches/{batch_id}/cancel"),
            ):
                assert (await two.request(method, url)).status_code == 404
                assert (await nobody.request(method, url)).status_code == 401
            assert (await one.get(f"/v1/files/{file_id}")).status_code == 200
            for url in ("/v1/files", "/v1/batches"):
                assert len((await one.get(url)).json()["data"]) == 1
                assert (await two.get(url)).json()["data"] == []
            stolen = (await two.post("/v1/batches", json=GOOD | {"input_file_id": file_id})).json()
            while stolen["status"] != "failed":
                await asyncio.sleep(0.005)
                stolen = (await two.get(f"/v1/batches/{stolen['id']}")).json()
            assert stolen["errors"]["data"][0]["param"] == "file_id"


# ---- uploads and downloads ------------------------------------------------------------------------------


async def test_content_knows_its_length_and_ranges(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        file = await server.upload(b"0123456789")
        whole = await client.get(f"/v1/files/{file.id}/content")
        assert (whole.content, whole.headers["content-length"]) == (b"0123456789", "10")
        assert whole.headers["content-type"] == "application/octet-stream"
        part = await client.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=2-4"})
        assert (part.status_code, part.content) == (206, b"234")
        assert part.headers["content-range"] == "bytes 2-4/10"


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "batch"}, {}, None),
        ({"purpose": "batch"}, {"other": ("in.jsonl", b"x")}, "file"),
        ({}, {"file": ("in.jsonl", b"x")}, "purpose"),
        ({"purpose": "assistants"}, {"file": ("in.jsonl", b"x")}, "purpose"),
        ({"purpose": "batch"}, {"file": ("in.csv", b"x")}, "file"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
            {"file": ("in.jsonl", b"x")},
            "expires_after[seconds]",
        ),
        (
            {"purpose": "batch", "expires_after[seconds]": "3600"},
            {"file": ("in.jsonl", b"x")},
            "expires_after[anchor]",
        ),
        ({"purpose": "p" * 5000}, {"file": ("in.jsonl", b"x")}, None),
    ],
)
async def test_uploads_that_are_refused(
    tmp_path: Path, data: dict[str, str], files: dict[str, Any], param: str | None
) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.post("/v1/files", data=data, files=files)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert not list((tmp_path / "files").iterdir())


FORM_HEADERS = {"Content-Type": "multipart/form-data; boundary=b"}
FORM_BODY = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="C:\\\\dir\\\\in.jsonl"\r\n\r\nline\r\n--b--\r\n'
)


@pytest.mark.acceptance("A18", "forms cut anywhere", count=len(range(0, len(FORM_BODY) - 4, 7)))
async def test_a_form_cut_anywhere_leaves_nothing(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        for length in range(0, len(FORM_BODY) - 4, 7):
            reply = await client.post("/v1/files", content=FORM_BODY[:length], headers=FORM_HEADERS)
            assert reply.status_code == 400, length
        assert not list((tmp_path / "files").iterdir())
        whole = await client.post("/v1/files", content=FORM_BODY, headers=FORM_HEADERS)
        assert (whole.status_code, whole.json()["filename"], whole.json()["bytes"]) == (200, "in.jsonl", 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"BATCH.JSONL", None),
        (b"a" * 249 + b".jsonl", None),
        (b"a" * 294 + b".jsonl", "The file name has 300 characters; at most 255 are possible."),
        (b"in.json", "The file's name must end with .jsonl"),
        (b"a\tb.jsonl", "The file name has control characters."),
    ],
)
async def test_a_name_is_taken_or_refused_with_the_reason(name: bytes, words: str | None, tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        body = FORM_BODY.replace(b"C:\\\\dir\\\\in.jsonl", name)
        reply = await client.post("/v1/files", content=body, headers=FORM_HEADERS)
        assert reply.status_code == (200 if words is None else 400)
        assert words is None or words in reply.json()["error"]["message"]


async def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        messages: Iterator[dict[str, Any]] = iter(
            [{"type": "http.request", "body": FORM_BODY[:150], "more_body": True}, {"type": "http.disconnect"}]
        )
        sent = []

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", FORM_HEADERS["Content-Type"].encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/files",
            "raw_path": b"/v1/files",
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("t", 80),
            "root_path": "",
        }
        await app_of(server)(scope, receive, send)
        assert not list((tmp_path / "files").iterdir())


async def test_too_large_is_413_by_header_and_by_count(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.service.files.max_file_bytes = 1000
        async with http_client(app_of(server)) as client:

            async def endless() -> AsyncIterator[bytes]:
                yield FORM_BODY[:150]
                for _ in range(10):
                    yield b"x" * 500

            big: dict[str, Any] = {"files": {"file": ("in.jsonl", b"x" * 2_000_000)}, "data": {"purpose": "batch"}}
            small: dict[str, Any] = {"files": {"file": ("in.jsonl", b"x" * 1001)}, "data": {"purpose": "batch"}}
            replies = [
                await client.post("/v1/files", **big),
                await client.post("/v1/files", **small),
                await client.post("/v1/files", content=endless(), headers=FORM_HEADERS),
            ]
            assert [reply.status_code for reply in replies] == [413] * 3
            assert replies[0].json()["error"]["type"] == "invalid_request_error"
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data", "", "multipart/form-data; boundary="]
)
async def test_wrong_content_types(tmp_path: Path, content_type: str) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        reply = await client.post("/v1/files", content=FORM_BODY, headers={"Content-Type": content_type})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_content_type")


async def test_ids_and_prompts_may_be_any_text(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        server.engine.auto = True
        upload: dict[str, Any] = {
            "files": {"file": ("in.jsonl", jsonl([line("ü", "äöü😀")]))},
            "data": {"purpose": "batch"},
        }
        file_id = (await client.post("/v1/files", **upload)).json()["id"]
        batch_id = (await client.post("/v1/batches", json=GOOD | {"input_file_id": file_id})).json()["id"]
        record = await server.until_status(batch_id, "completed")
        assert list(server.results(record)[0]) == ["ü"]
