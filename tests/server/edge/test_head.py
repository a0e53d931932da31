"""HEAD is GET without a body, on every route and on the socket."""

from collections.abc import AsyncIterator

import pytest
from starlette.responses import StreamingResponse

from tests.server.conftest import Server
from tests.server.live import RawClient, request_bytes, serving


async def head(client: RawClient) -> tuple[int, dict[str, str]]:
    raw = await client.reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode().strip().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/openapi.json", "/docs", "/dashboard", "/load"])
async def test_head_has_the_headers_of_get_and_no_body(server: Server, path: str) -> None:
    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(request_bytes("HEAD", path))
        status, headers = await head(client)
        # The connection goes on: what follows the headers is the next reply.
        await client.send(request_bytes("GET", path))
        got_status, got_headers, body = await client.reply()
    assert (status, got_status) == (200, 200)
    assert headers.get("content-type") == got_headers.get("content-type")
    if path != "/metrics":  # which counts
        assert int(headers["content-length"]) == len(body)


async def test_head_of_a_refusal_has_its_status_and_no_body(server: Server) -> None:
    async with serving(server.app) as live:
        client = await live.connect()
        for path, expected in (("/nothing", 404), ("/v1/chat/completions", 405), ("/v1/models/x", 404)):
            await client.send(request_bytes("HEAD", path))
            assert (await head(client))[0] == expected
        await client.send(request_bytes("GET", "/health"))
        assert (await client.reply())[0] == 200


async def test_head_of_a_stream_ends_it_at_its_headers(server: Server) -> None:
    made: list[bytes] = []

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(1000):
            made.append(b"x" * 1000)
            yield made[-1]

    @server.app.get("/parts")
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts(), media_type="text/plain")

    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(request_bytes("HEAD", "/parts"))
        status, headers = await head(client)
        await client.send(request_bytes("GET", "/health"))
        after = await client.reply()
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert after[0] == 200
    assert len(made) == 1
