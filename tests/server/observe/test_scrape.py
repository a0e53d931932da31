"""A real Prometheus, configured as in ``deploy/``, scrapes the server."""

import asyncio
import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.test_deploy import DEPLOY
from tests.e2e.server import free_port
from tests.patience import until
from tests.server.conftest import Server
from tests.server.live import serving


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
async def test_a_prometheus_scrapes_the_server(server: Server, tmp_path: Path) -> None:
    async with serving(server.app) as live:
        config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        (tmp_path / "prometheus.yml").write_text(
            config.replace("neaptide:8000", f"127.0.0.1:{live.port}").replace(
                "scrape_interval: 5s", "scrape_interval: 3s"
            )
        )
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
        port = free_port()
        flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
        process = await asyncio.create_subprocess_exec("prometheus", *flags, cwd=tmp_path, stderr=subprocess.DEVNULL)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                found = await _asked(http, 'up{job="neaptide"} == 1')
                assert found["data"]["result"]
                blocks = await _asked(http, "neaptide_kv_blocks")
                assert {one["metric"]["state"] for one in blocks["data"]["result"]} >= {"free", "online"}
        finally:
            with suppress(ProcessLookupError):  # what it was asked has failed then, and says so
                process.terminate()
            await process.wait()


async def _asked(http: httpx.AsyncClient, query: str) -> dict[str, Any]:
    """As soon as there is an answer."""
    found: dict[str, Any] = {}

    async def has_answer() -> bool:
        with suppress(httpx.HTTPError, KeyError, ValueError):
            reply = await http.get("/api/v1/query", params={"query": query})
            found.update(json.loads(reply.text))
            return bool(found["data"]["result"])
        return False

    await until(has_answer)
    return found
