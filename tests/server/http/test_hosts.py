"""Pages of other sites cannot talk to a server on loopback under a name of their own, nor change anything here."""

from collections.abc import AsyncIterator, Iterable

import httpx2
import pytest
from starlette.datastructures import Headers

from neaptide.server.app import ServerState, create_app
from neaptide.server.http.hosts import HostFilter, OriginFilter
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import make_context


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("app.localhost:1", True),
        ("127.0.0.1:8000", True),
        ("127.1.2.3", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("mine.example", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("[::2]:80", False),
        ("", False),
        ("[", False),
        ("localhost/@evil", False),
        ("evil.example, localhost", False),
    ],
)
@pytest.mark.acceptance("A27", "Host headers of other sites")
def test_names_that_are_ours(host: str | None, admitted: bool) -> None:
    assert HostFilter(["Mine.example"]).admits(host) is admitted


@pytest.mark.parametrize(
    ("names", "bound_to", "keys_required", "filtered"),
    [
        ((), "127.0.0.1", False, True),
        ((), "::1", False, True),
        ((), "localhost", False, True),
        ((), "127.0.0.1", True, False),
        ((), "0.0.0.0", False, False),
        (("a.example",), "0.0.0.0", True, True),
        (("*",), "127.0.0.1", False, False),
    ],
)
def test_when_names_are_checked(names: tuple[str, ...], bound_to: str, keys_required: bool, filtered: bool) -> None:
    found = HostFilter.of_settings(names, bound_to=bound_to, keys_required=keys_required)
    assert (found is not None) is filtered


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/nothing"])
@pytest.mark.acceptance("A27", "Host headers of other sites")
async def test_another_name_is_refused_in_the_envelope(tokenizer: Tokenizer, path: str) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), hosts=HostFilter()))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as http:
        refused = await http.get(path, headers={"host": "evil.example"})
        answered = await http.get(path)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unknown_host"
    assert refused.headers["x-request-id"]
    assert answered.status_code != 400


SITE = "https://chat.example"


@pytest.mark.parametrize(
    ("headers", "allowed", "admitted"),
    [
        ({}, (), True),
        ({"origin": "https://evil.test"}, (), False),
        ({"origin": "null"}, (), False),
        ({"origin": ""}, (), False),
        ({"origin": "http://[::1"}, (), False),
        ({"origin": "http://localhost:3000"}, (), False),
        ({"origin": "http://localhost:8000"}, (), True),
        ({"origin": "https://localhost:8000"}, (), True),  # a proxy has ended TLS
        ({"origin": "http://api.example", "host": "API.example:80"}, (), True),
        ({"origin": "https://api.example", "host": "api.example"}, (), True),
        ({"origin": "https://api.example.evil.test", "host": "api.example"}, (), False),
        ({"origin": "ftp://localhost:8000"}, (), False),
        ({"origin": SITE}, (SITE,), True),
        ({"origin": "https://evil.test"}, (SITE,), False),
        ({"origin": "https://evil.test"}, ("*",), True),
        ({"sec-fetch-site": "cross-site"}, (), False),
        ({"sec-fetch-site": "same-site"}, (), False),
        ({"sec-fetch-site": "none"}, (), True),
        ({"sec-fetch-site": "cross-site", "origin": SITE}, (SITE,), True),
        # A proxy has put another name in Host: the browser knows better.
        ({"sec-fetch-site": "same-origin", "origin": SITE, "host": "10.0.0.1:8000"}, (), True),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:8000"}, (), False),
    ],
)
@pytest.mark.acceptance("A27", "writes of pages of other sites")
def test_writes_of_pages_of_other_sites_are_refused(
    headers: dict[str, str], allowed: Iterable[str], admitted: bool
) -> None:
    origins = OriginFilter(tuple(allowed))
    sent = Headers({"host": "localhost:8000", **headers})
    refusals = [origins.refusal(method, sent) for method in ("POST", "DELETE", "PUT")]
    assert [refusal is None for refusal in refusals] == [admitted] * 3
    assert [origins.refusal(method, sent) for method in ("GET", "HEAD", "OPTIONS")] == [None] * 3


@pytest.mark.parametrize("path", ["/v1/files", "/v1/chat/completions", "/nothing"])
async def test_a_foreign_page_is_refused_before_its_body_is_read(tokenizer: Tokenizer, path: str) -> None:
    app = create_app(ServerState(context=make_context(tokenizer)))
    asked_for_body = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal asked_for_body
        asked_for_body = True
        yield b"x"

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as http:
        refused = await http.post(path, content=body(), headers={"origin": "https://evil.test"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert refused.json()["error"]["code"] == "cross_site_request"
    assert refused.headers["x-request-id"]
    assert not asked_for_body
