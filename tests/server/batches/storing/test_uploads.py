"""Uploads over sockets that are cut, too large, or not what a batch needs."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import until
from tests.server.batches.fakes import Server, jsonl, line
from tests.server.batches.test_http import app_of
from tests.server.live import Live, RawClient, request_bytes, serving

BOUNDARY = b"cut-here"
HEADERS = {"content-type": "multipart/form-data; boundary=cut-here"}
MIB = 1 << 20


@asynccontextmanager
async def listening(data_dir: Path) -> AsyncIterator[tuple[Server, Live]]:
    async with Server(data_dir) as server, serving(app_of(server)) as live:
        yield server, live


def form(content: bytes, purpose: bytes = b"batch") -> bytes:
    return (
        b"--%b\r\nContent-Disposition: form-data; name=purpose\r\n\r\n%b\r\n" % (BOUNDARY, purpose)
        + b"--%b\r\nContent-Disposition: form-data; name=file; filename=in.jsonl\r\n\r\n%b" % (BOUNDARY, content)
        + b"\r\n--%b--\r\n" % BOUNDARY
    )


async def upload(live: Live, content: bytes, purpose: bytes = b"batch") -> tuple[int, dict[str, Any]]:
    client = await live.connect()
    await client.send(request_bytes("POST", "/v1/files", form(content, purpose), HEADERS))
    status, _, body = await client.reply()
    client.close()
    return status, json.loads(body)


async def create(live: Live, file_id: str) -> str:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    client = await live.connect()
    await client.send(request_bytes("POST", "/v1/batches", json.dumps(body).encode()))
    status, _, reply = await client.reply()
    assert status == 200
    return str(json.loads(reply)["id"])


async def check_no_trace(server: Server, data_dir: Path) -> None:
    """Waits for the server to notice that the client has gone."""
    await until(lambda: not list((data_dir / "files").iterdir()))
    page = await server.service.files.list_page("", purpose=None, limit=9, after=None, ascending=True)
    assert page == ([], False)


async def until_written(data_dir: Path) -> None:
    """The upload has begun to reach the disk."""
    await until(lambda: any(path.stat().st_size for path in (data_dir / "files").iterdir()))


@pytest.mark.acceptance("A18", "uploads cut on the socket", count=10)
async def test_an_upload_cut_anywhere_leaves_no_trace(tmp_path: Path) -> None:
    request = request_bytes("POST", "/v1/files", form(b"x" * 3 * MIB), HEADERS)
    points = sorted(random.Random(18).sample(range(1, len(request)), 9))
    async with listening(tmp_path) as (server, live):
        for number, point in enumerate([*points, len(request) - 1]):
            client = await live.connect()
            await client.send(request[:point])
            if point > 2 * MIB:
                await until_written(tmp_path)
            if number % 2:
                reset(client)
            client.close()
            await check_no_trace(server, tmp_path)
        status, file = await upload(live, b"x" * 3 * MIB)
        assert (status, file["object"]) == (200, "file")


def reset(client: RawClient) -> None:
    """Closing will not say goodbye."""
    peer: socket.socket = client.writer.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.acceptance("A18", "uploads that say that they are too large")
async def test_201_mb_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    async with listening(tmp_path) as (server, live):
        client = await live.connect()
        await client.send(request_bytes("POST", "/v1/files", b"", {**HEADERS, "content-length": str(202_500_000)}))
        status, _, body = await client.reply()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        await check_no_trace(server, tmp_path)


@pytest.mark.acceptance("A18", "uploads that turn out to be too large")
@pytest.mark.parametrize("limit_bytes", [2_000_000, pytest.param(200_000_000, marks=pytest.mark.full)])
async def test_what_is_too_large_by_count_is_refused_on_the_way(tmp_path: Path, limit_bytes: int) -> None:
    async with listening(tmp_path) as (server, live):
        server.service.files.max_file_bytes = limit_bytes
        client = await live.connect()
        head = request_bytes("POST", "/v1/files", headers={**HEADERS, "transfer-encoding": "chunked"})
        await client.send(head.replace(b"content-length: 0\r\n", b""))
        begin = form(b"").partition(b"\r\n--%b--" % BOUNDARY)[0]
        piece = b"10000\r\n" + bytes(65_536) + b"\r\n"

        async def send_all() -> None:
            await client.send(b"%x\r\n%b\r\n" % (len(begin), begin))
            for _ in range((limit_bytes + 1_000_000) // 65_536):
                await client.send(piece)

        sending = asyncio.ensure_future(send_all())
        status, _, body = await client.reply()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        await sending
        client.close()
        await check_no_trace(server, tmp_path)


@pytest.mark.acceptance("A18", "an unknown purpose")
async def test_an_unknown_purpose_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    async with listening(tmp_path) as (server, live):
        status, reply = await upload(live, b"{}\n", purpose=b"weather")
        assert (status, reply["error"]["param"]) == (400, "purpose")
        await check_no_trace(server, tmp_path)


@pytest.mark.acceptance("A18", "50,001 lines, or bytes that are not UTF-8")
@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(jsonl(line(f"c{i}") for i in range(50_001)), "too_many_tasks", marks=pytest.mark.full, id="lines"),
        pytest.param(jsonl([line("a")]) + b'{"custom_id": "\xff"}\n', "invalid_json_line", id="utf8"),
    ],
)
async def test_a_file_that_is_no_batch_fails_its_batch_before_a_line_runs(
    tmp_path: Path, content: bytes, code: str
) -> None:
    async with listening(tmp_path) as (server, live):
        status, file = await upload(live, content)
        assert status == 200
        record = await server.until_status(await create(live, file["id"]), "failed")
        assert code in {error["code"] for error in record.errors or ()}
        assert server.engine.sent == []


@pytest.mark.parametrize(("num_fields", "status"), [(30, 200), (31, 400)])
async def test_a_form_has_at_most_32_parts(tmp_path: Path, num_fields: int, status: int) -> None:
    field = b"--%b\r\nContent-Disposition: form-data; name=f\r\n\r\nx\r\n" % BOUNDARY
    async with listening(tmp_path) as (_, live):
        client = await live.connect()
        body = num_fields * field + form(jsonl([line("a")]))
        await client.send(request_bytes("POST", "/v1/files", body, HEADERS))
        assert (await client.reply())[0] == status


async def test_what_stands_around_the_file_is_counted_too(tmp_path: Path) -> None:
    """A megabyte behind a file that is allowed, with no length said before."""
    whole = form(b"x") + b"\r\n" * (600 << 10)
    async with listening(tmp_path) as (server, live):
        server.service.files.max_file_bytes = 1000
        head = request_bytes("POST", "/v1/files", headers=HEADERS | {"transfer-encoding": "chunked"})
        client = await live.connect()
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(whole), whole)
        await client.send(head.replace(b"content-length: 0\r\n", b"") + body)
        status, _, reply = await client.reply()
        assert (status, json.loads(reply)["error"]["code"]) == (413, "request_too_large")
        await check_no_trace(server, tmp_path)
