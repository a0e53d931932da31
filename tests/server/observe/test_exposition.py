"""What a scraper gets from ``/metrics``, and that a real Prometheus reads every name of it."""

import asyncio
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry, Gauge

from neaptide.server.observe.exposition import OPENMETRICS, SHARE, TEXT, Scrapes, expose
from tests.e2e.server import free_port
from tests.patience import PATIENCE_S, until
from tests.server.conftest import MODEL_ID, USER, Server
from tests.server.live import serving

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ('Application/OpenMetrics-Text; Version="1.0.0"', OPENMETRICS),
        ("text/plain;q=0.2, application/openmetrics-text;q=0.5", OPENMETRICS),
        ("text/plain;q=0.5, application/openmetrics-text;q=0.2", TEXT),
        ("text/plain, application/openmetrics-text", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=high", TEXT),
        ("application/openmetrics-text;version=2.0.0", TEXT),
        ("application/openmetrics-text;version=2.0.0, text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;q=0.3, text/plain;version=1.0.0", OPENMETRICS),
    ],
)
def test_the_form_is_the_one_that_is_asked_for(accept: str, content_type: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:x", "A gauge.", registry=registry).set(3)
    content, sent_as = expose(registry, accept)
    assert sent_as == content_type
    end = "# EOF\n" if content_type == OPENMETRICS else ""
    assert content.decode() == f"# HELP vllm:x A gauge.\n# TYPE vllm:x gauge\nvllm:x 3.0\n{end}"


async def names(server: Server, accept: str) -> set[str]:
    """Of all samples in a scrape."""
    text = (await server.http.get("/metrics", headers={"accept": accept})).text
    return {re.split(r"[ {]", line)[0] for line in text.splitlines() if not line.startswith("#")}


async def test_every_name_is_legal_everywhere_and_the_same_in_both_forms(server: Server) -> None:
    await server.http.get("/metrics")  # the first exchange makes series of its own
    in_text, in_openmetrics = await names(server, ""), await names(server, PROMETHEUS_3)
    assert in_text == in_openmetrics
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in in_text)


async def test_every_help_text_is_a_sentence(server: Server) -> None:
    text = (await server.http.get("/metrics")).text
    texts = dict(re.findall(r"^# HELP ((?:neaptide_|vllm:)\S+) (.*)$", text, re.MULTILINE))
    assert len(texts) > 50
    assert {name for name, words in texts.items() if len(words.split()) < 4 or not words.endswith(".")} == set()


# ---- a real one ------------------------------------------------------------------------------------------


class Prometheus:
    """A Prometheus that scrapes one server, and its answers."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def data(self, path: str, **params: str) -> Any:
        """What the API says; None while it does not answer."""
        try:
            reply = await self._http.get(f"/api/v1/{path}", params=params)
        except httpx2.TransportError:
            return None
        return reply.json()["data"] if reply.status_code == 200 else None

    async def until_scraped(self) -> None:
        async def is_up() -> bool:
            targets = await self.data("targets")
            return bool(targets) and [target["health"] for target in targets["activeTargets"]] == ["up"]

        await until(is_up)


@asynccontextmanager
async def prometheus(
    directory: Path, target_port: int, second: dict[str, list[str]] | None = None
) -> AsyncIterator[Prometheus]:
    """Scrapes the port; with ``second`` as a second job too, with these parameters of the query."""
    scrape = {"job_name": "neaptide", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    jobs = [scrape] if second is None else [scrape, scrape | {"job_name": "second", "params": second}]
    config = {"global": {"scrape_interval": "3s", "scrape_timeout": "3s"}, "scrape_configs": jobs}
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            yield Prometheus(http)
    finally:
        with suppress(ProcessLookupError):  # what it was asked has failed then, and says so
            process.kill()
        await process.wait()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
async def test_a_real_prometheus_reads_every_name(server: Server, tmp_path: Path) -> None:
    body = {"messages": USER, "max_tokens": 4}
    assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    server.engine.emit_stats(running_online=3)
    sent = await names(server, "")
    async with serving(server.app) as live, prometheus(tmp_path, live.port) as scraper:
        await scraper.until_scraped()
        kept = set(await scraper.data("label/__name__/values"))
        # Not the series itself: it is stale from a scrape on that a busy machine makes fail.
        (sample,) = (await scraper.data("query", query="last_over_time(vllm:num_requests_running[1h])"))["result"]
    assert {name for name in kept if name.startswith("vllm_")} == set()
    assert {name for name in sent if name.startswith(("vllm:", "neaptide_"))} <= kept
    assert (sample["metric"]["model_name"], sample["value"][1]) == (MODEL_ID, "3")


class Counted:
    """A registry whose expositions are counted, and when each was begun."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.begun_s: list[float] = []
        Gauge("count", "Expositions so far.", registry=self.registry).set_function(lambda: len(self.begun_s))

    async def refresh(self) -> None:
        self.begun_s.append(asyncio.get_running_loop().time())


async def test_those_who_scrape_at_once_get_one_exposition_that_is_younger_than_their_question() -> None:
    made = Counted()
    scrapes = Scrapes(made.registry, made.refresh)
    found = await asyncio.gather(*(scrapes.exposition("") for _ in range(200)))
    assert len(made.begun_s) <= 2
    assert {content for content, _ in found} == {found[0][0]}
    assert b"count 2.0" in (await scrapes.exposition(""))[0]
    assert (await scrapes.exposition(PROMETHEUS_3))[1] == OPENMETRICS


async def test_one_who_scrapes_all_the_time_takes_a_share_of_the_loop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made, spent_s = Counted(), 0.02
    counter = iter(range(1_000))
    monkeypatch.setattr("neaptide.server.observe.exposition.time.perf_counter", lambda: spent_s * next(counter))
    scrapes = Scrapes(made.registry, made.refresh)
    for _ in range(3):
        await scrapes.exposition("")
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(made.begun_s)]
    assert min(gaps_s) >= spent_s / SHARE - 1e-3
