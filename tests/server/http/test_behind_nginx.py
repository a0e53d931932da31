"""The shipped configuration of nginx in front of the server: TLS, a path prefix, streams and large bodies."""

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.e2e.server import free_port
from tests.patience import PATIENCE_S, until
from tests.server.conftest import USER, Server
from tests.server.live import serving

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "nginx" / "neaptide.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(not (NGINX and shutil.which("openssl")), reason="needs nginx and openssl")


@dataclass
class Front:
    """What clients see."""

    url: str
    http: httpx2.AsyncClient


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of ``tls.crt`` and ``tls.key``, for localhost."""
    directory = tmp_path_factory.mktemp("certificate")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", "tls.key", "-out", "tls.crt", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


def configured(text: str, own: dict[str, str]) -> str:
    """The configuration with what an operator changes; each of these places occurs once."""
    for shipped, changed in own.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, changed)
    return text


@contextmanager
def running(directory: Path, certificate: Path, port: int, upstream_port: int) -> Iterator[None]:
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    own = {
        "http {": f"http {{ access_log off; {temporary}",
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "server_name llm.example;": "server_name localhost;",
        "/etc/nginx/tls.crt": f"{certificate}/tls.crt",
        "/etc/nginx/tls.key": f"{certificate}/tls.key",
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{upstream_port};",
    }
    file = directory / "nginx.conf"
    file.write_text(configured(CONFIGURATION.read_text(), own))
    main = f"daemon off; pid {directory}/pid; error_log {directory}/error.log;"
    main += " user root;" if os.geteuid() == 0 else ""
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-p", str(directory), "-c", str(file), "-g", main], stderr=subprocess.PIPE)
    try:
        yield
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
async def front(server: Server, certificate: Path, tmp_path: Path) -> AsyncIterator[Front]:
    port = free_port()
    url = f"https://localhost:{port}"
    trusted = ssl.create_default_context(cafile=str(certificate / "tls.crt"))
    async with (
        serving(server.app, timeout_graceful_shutdown=1) as live,
        httpx2.AsyncClient(verify=trusted, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        with running(tmp_path, certificate, port, live.port):

            async def answers() -> bool:
                try:
                    return (await http.get(f"{url}/neaptide/livez")).status_code == 200
                except httpx2.TransportError:
                    return False

            await until(answers)
            yield Front(f"{url}/neaptide", http)


async def test_a_chat_passes_with_tls_and_without_the_prefix(front: Front) -> None:
    reply = await front.http.post(front.url + CHAT, json={"messages": USER, "max_tokens": 3})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 3


async def test_a_stream_passes_as_it_comes(front: Front, server: Server) -> None:
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    body = {"messages": USER, "max_tokens": 3, "stream": True}
    async with front.http.stream("POST", front.url + CHAT, json=body) as reply:
        lines = reply.aiter_lines()
        # The engine has said nothing so far.
        assert (await anext(lines)).startswith(":")
        server.engine.released.set()
        assert [line async for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


async def test_a_large_body_reaches_the_server(front: Front) -> None:
    """nginx alone takes 1 MB, and refuses more with a page of its own."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000_000}]})
    reply = await front.http.post(front.url + CHAT, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_page_of_the_server_itself_is_not_foreign(front: Front) -> None:
    origin = front.url.removesuffix("/neaptide")
    for site, status in ((origin, 200), ("https://evil.example", 403)):
        reply = await front.http.post(
            front.url + CHAT, json={"messages": USER, "max_tokens": 1}, headers={"origin": site}
        )
        assert reply.status_code == status, reply.text


async def test_a_prefix_that_is_kept_is_named(server: Server) -> None:
    reply = await server.http.post(f"/neaptide{CHAT}", json={"messages": USER})
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        404,
        "Unknown request URL. Paths begin with /v1: a proxy in front must remove its own prefix.",
    )
    assert (await server.http.get("/nothing")).json()["error"]["message"] == "Unknown request URL."
