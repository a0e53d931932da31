"""Request targets: the absolute form that proxies get, and what 405 says is allowed."""

import pytest
from starlette.types import ASGIApp

from neaptide.server.app import ServerState, create_app
from neaptide.server.edge.auth import KeyRing
from neaptide.server.edge.hosts import HostFilter
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.asgi import Exchange
from tests.server.conftest import Server, make_context
from tests.server.live import serving


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
        ("http://localhost", 404),
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
