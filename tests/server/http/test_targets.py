"""Request targets: the absolute form that proxies get, what 405 says is allowed, and HEAD as GET without a body."""

from collections.abc import AsyncIterator

import pytest
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from neaptide.server.app import ServerState, create_app
from neaptide.server.http.auth import KeyRing
from neaptide.server.http.hosts import HostFilter
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.asgi import Exchange
from tests.server.conftest import Server, make_context
from tests.server.live import RawClient, request_bytes, serving


async def status(app: ASGIApp, target: str, host: str = "localhost") -> int | None:
    exchange = Exchange(app, target, {}, {"host": host}, "GET")
    await exchange.task
    return exchange.status


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://localhost/version", 200),
        ("HTTPS://localhost:8000/version", 200),
        ("http://localhost/v1/models/org%2Fneaptide-tiny", 200),
        ("http://localhost/nothing", 404),
        ("http://localhost", 200),
        ("http://user@localhost/version", 404),
        ("http:///version", 404),
        ("ftp://localhost/version", 404),
        ("/http://localhost/version", 404),
    ],
)
async def test_an_absolute_target_is_its_path(server: Server, target: str, expected: int) -> None:
    assert await status(server.app, target) == expected


@pytest.mark.parametrize(
    ("target", "host", "expected"),
    [
        ("http://mine.example/version", "evil.example", 503),
        ("http://evil.example/version", "mine.example", 400),
        ("http://mine.example.evil.example/version", "mine.example", 400),
    ],
)
async def test_the_host_of_an_absolute_target_is_what_counts(
    tokenizer: Tokenizer, target: str, host: str, expected: int
) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), hosts=HostFilter(["mine.example"])))
    assert await status(app, target.replace("/version", "/health"), host) == expected


@pytest.mark.parametrize(
    "target", ["http://localhost/v1/models", "http://x/health/../v1/models", "http://health/v1/models"]
)
async def test_an_absolute_target_opens_nothing(tokenizer: Tokenizer, target: str) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), keys=KeyRing(("k",))))
    assert await status(app, target) == 401


async def test_an_absolute_target_on_a_socket(server: Server) -> None:
    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(b"GET http://localhost/version?x=1 HTTP/1.1\r\nhost: other\r\n\r\n")
        assert (await client.reply())[0] == 200


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/health", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/x", "GET, HEAD"),
        ("/v1/chat/completions", "POST"),
        ("/admin/offline", "POST"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_405_names_every_method_of_the_path(server: Server, path: str, allow: str) -> None:
    reply = await server.http.request("PATCH", path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allow)


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
