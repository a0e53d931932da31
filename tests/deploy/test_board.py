"""The Grafana board: its structure, and data for every expression from a real Prometheus.

Grafana itself is not run. Where its own SDK is installed, it reads the board; else the checks here are structural.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse

from neaptide.cluster.gateway.metrics import GatewayMetrics, ReplicaLives
from neaptide.cluster.gateway.series import merged
from neaptide.engine.messages import StepOutputs, StepStats
from neaptide.server.batches.metrics import BatchMetrics, Overview
from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.storing.store import Store
from neaptide.server.counterfactual.frames import ShadowAnswer, ShadowFigures
from neaptide.server.counterfactual.metrics import POLICIES, ShadowMetrics
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.observe.facts import ServerFacts
from neaptide.server.observe.metrics import ONLINE_TIERS, ServerMetrics
from neaptide.server.observe.metrics_engine import EngineMetrics
from neaptide.server.observe.metrics_http import OF_A_GATEWAY, HttpMetrics
from neaptide.server.observe.metrics_info import InfoMetrics
from tests.patience import until
from tests.server.fake_engine import FakeEngine, some_stats
from tests.server.live import serving
from tests.server.observe.test_exposition import prometheus
from tools import grafana_board

BOARD = grafana_board.board()
VARIABLES = ("datasource", "model", "job", "instance", "replica")


class BusyServer:
    """A server's series, which grow with every scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = ServerMetrics(self.registry)
        client = EngineClient()
        client.subscribe(StepStats, self.metrics.on_stats)
        EngineMetrics(self.registry, EngineState(client, lambda: 0.0))
        FakeEngine(client).attach()
        InfoMetrics(self.registry, lambda: ServerFacts(model="m", ttft_slo_s=1.0, tpot_slo_s=0.1))
        batches = BatchMetrics(self.registry, Store(Path()), lambda: 100.0, BatchStatuses())
        batches._overview = Overview(first_created_at=50, first_expires_at=500, pending_requests=7)
        figures = ShadowFigures(20, 100.0)
        shown = ShadowAnswer(1.0, 0.0, 60.0, 25, figures, dict.fromkeys(POLICIES, figures))
        shadow = ShadowMetrics(self.registry)
        shadow.show(shown)
        shadow.age.set(5)
        self._client = client

    def page(self) -> str:
        step = some_stats(
            online_decode_tokens=5,
            offline_decode_tokens=50,
            cached_tokens=16,
            admitted_prompt_tokens=32,
            blocks_reserved=8,
            preempted_offline=1,
        )
        self._client.on_message(StepOutputs([], [step]))
        for tier in ONLINE_TIERS:
            self.metrics.ttft.labels(tier.value).observe(0.2)
            self.metrics.tpot.labels(tier.value).observe(0.05)
            for slo in ("ttft", "tpot"):
                self.metrics.attained.labels(tier.value, slo).inc()
        self.metrics.http.on_http("POST", "/v1/chat/completions", 503, 0.1)
        return generate_latest(self.registry).decode()


class OfReplicas(Collector):
    """The replicas' families on the gateway's page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.families: list[Metric] = []
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


class BusyGateway:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = GatewayMetrics(self.registry)
        ReplicaLives(self.registry, {"a": 1})
        HttpMetrics(self.registry, OF_A_GATEWAY).on_http("POST", "/v1/chat/completions", 503, 0.1)
        self._of_replicas = OfReplicas(self.registry)

    def page(self, server: str) -> str:
        self._metrics._replicas.labels("ready").set(1)
        self._metrics._slack.labels("a").set(0.5)
        for counter in (self._metrics._passed_on, self._metrics._lost):
            counter.labels("a").inc()
        self._of_replicas.families = merged([("a", server)])
        return generate_latest(self.registry).decode()


def test_every_panel_says_what_it_shows_and_stands_in_a_row() -> None:
    rows = [panel for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows[0]["title"] == "What is wrong"
    assert [row["collapsed"] for row in rows] == [False] * 4 + [True] * 3
    shown = grafana_board.panels(BOARD)
    assert all(panel["description"].endswith(".") for panel in shown)
    assert all(panel["fieldConfig"]["defaults"]["noValue"] for panel in shown)
    assert len({panel["id"] for panel in [*shown, *rows]}) == len(shown) + len(rows)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in shown)
    assert all(row["panels"] if row["collapsed"] else not row["panels"] for row in rows)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_expression_selects_by_the_variables() -> None:
    assert [one["name"] for one in BOARD["templating"]["list"]] == list(VARIABLES)
    for panel in grafana_board.panels(BOARD):
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            expression = target["expr"]
            assert expression.count("neaptide_") == expression.count('{job=~"$job",instance=~"$instance"'), expression
            assert "@" not in expression


@pytest.mark.parametrize("title", ["TTFT", "TPOT"])
def test_latencies_have_their_target_as_a_line(title: str) -> None:
    (panel,) = (one for one in grafana_board.panels(BOARD) if one["title"] == title)
    assert panel["targets"][-1]["legendFormat"] == "target"
    assert (
        f'neaptide_target_seconds{{job=~"$job",instance=~"$instance",slo="{title.lower()}"}}'
        in (panel["targets"][-1]["expr"])
    )
    assert panel["fieldConfig"]["overrides"][0]["matcher"]["options"] == "target"


def unknown(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """Places in our JSON that Grafana's has not, or has otherwise. Theirs may have defaults that ours leaves out."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from unknown(value, theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from unknown(one, other, f"{place}[{number}]")
    elif ours != theirs:
        yield place


def test_grafanas_own_sdk_knows_every_field_of_the_board() -> None:
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="needs grafana-foundation-sdk")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    ours = json.loads(grafana_board.text())
    found = dashboard.Dashboard.from_json(ours)
    assert (found.title, len(found.panels), len(found.templating.list_val)) == ("Neaptide", len(BOARD["panels"]), 5)
    assert list(unknown(ours, json.loads(encoder.JSONEncoder().encode(found)))) == []


def asked(expression: str) -> str:
    """The expression as Grafana sends it for everything selected."""
    for name in ("$job", "$instance", "$replica"):
        expression = expression.replace(name, ".*")
    return expression.replace("$__rate_interval", "1m")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
async def test_every_expression_has_data(tmp_path: Path) -> None:
    server, gateway = BusyServer(), BusyGateway()

    app = FastAPI()

    @app.get("/metrics")
    async def page(of: str = "") -> PlainTextResponse:
        own = server.page()
        return PlainTextResponse(gateway.page(own) if of == "gateway" else own)

    async with (
        serving(app) as live,
        prometheus(tmp_path, live.port, {"of": ["gateway"]}) as scraper,
    ):
        for panel in grafana_board.panels(BOARD):
            for target in panel["targets"]:

                async def has_data(query: str = asked(target["expr"])) -> bool:
                    found: Any = await scraper.data("query", query=query)
                    values = [one["value"][1] for one in found["result"]] if found else []
                    return any(not math.isnan(float(value)) for value in values)

                await until(has_data)
