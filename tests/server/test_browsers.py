"""What browsers need: a page of the routes that loads nothing from elsewhere, and leave for pages of other sites."""

import re

import httpx2
import pytest

from neaptide.server.app import ServerState, create_app
from neaptide.server.http.auth import KeyRing
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import Server, make_context

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_the_page_of_routes_shows_every_operation_and_loads_nothing(server: Server) -> None:
    reply = await server.http.get("/docs")
    assert reply.status_code == 200
    document = (await server.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in reply.text
    assert "://" not in reply.text
    assert "<script" not in reply.text
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    assert reply.headers["content-security-policy"] == policy
    targets = set(re.findall(r'href="#([^"]+)"', reply.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', reply.text))


async def test_the_page_of_routes_has_an_index_and_names_errors_once(server: Server) -> None:
    page = (await server.http.get("/docs")).text
    for name in ("POST /v1/chat/completions", "GET /v1/models"):
        assert page.index(f'<a href="#{name}">') < page.index(f'<h2 id="{name}">')
    assert "`" not in page
    tokenize = page.partition('<h2 id="POST /tokenize">')[2].split("<h2")[0]
    (errors,) = re.findall(r"<tr><td>errors<td>([\d, ]+):", tokenize)
    assert (found := errors.split(", ")) == sorted(set(found))
    assert "400" in found


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_what_describes_the_api_is_open_beside_keys_for_a_browser_has_none(
    tokenizer: Tokenizer, path: str
) -> None:
    state = ServerState(context=make_context(tokenizer), keys=KeyRing(("k",)))
    transport = httpx2.ASGITransport(app=create_app(state))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        replies = [await http.get(path), await http.get(path, headers={"authorization": "Bearer k"})]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].text == replies[1].text


async def test_the_pages_that_load_scripts_from_elsewhere_are_gone(server: Server) -> None:
    assert (await server.http.get("/redoc")).status_code == 404


def calling(tokenizer: Tokenizer, *origins: str) -> httpx2.AsyncClient:
    """A client of a server with a key that lets these sites call."""
    state = ServerState(context=make_context(tokenizer), keys=KeyRing(("k",)), cors_origins=origins)
    transport = httpx2.ASGITransport(app=create_app(state))
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


async def test_by_default_no_page_of_another_site_may_call(tokenizer: Tokenizer) -> None:
    async with calling(tokenizer) as http:
        asked = await http.options("/v1/chat/completions", headers=PREFLIGHT)
        called = await http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer k"})
    assert asked.status_code == 401
    assert "access-control-allow-origin" not in {**asked.headers, **called.headers}


@pytest.mark.parametrize(
    ("origins", "allowed"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.example", PAGE), PAGE)]
)
async def test_a_page_of_a_named_site_may_call(tokenizer: Tokenizer, origins: tuple[str, ...], allowed: str) -> None:
    async with calling(tokenizer, *origins) as http:
        asked = await http.options("/v1/chat/completions", headers=PREFLIGHT)
        called = await http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer k"})
        refused = await http.get("/v1/models", headers={"origin": PAGE})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, allowed)
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert (called.status_code, called.headers["access-control-allow-origin"]) == (200, allowed)
    assert called.headers["x-request-id"]
    # The page must be able to read what was wrong.
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, allowed)


async def test_a_page_of_a_site_that_is_not_named_may_not_call(tokenizer: Tokenizer) -> None:
    async with calling(tokenizer, "https://other.example") as http:
        asked = await http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
