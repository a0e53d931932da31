"""The replicas' series on the gateway's page, and the page for people that reads them."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from neaptide.cluster.gateway.series import OF_THE_DATABASE
from neaptide.server.batches.metrics import BatchMetrics
from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.storing.store import Store
from neaptide.server.observe.exposition import OPENMETRICS
from neaptide.server.observe.facts import ServerFacts
from neaptide.server.observe.overview import Report
from tests.cluster.gateway.conftest import CHAT, TO_STREAM, Cluster
from tests.server.engine_client.loop_clock import LoopClock


def page(tokens: float, pending: int) -> str:
    """As a replica has it."""
    registry = CollectorRegistry()
    computed = Counter("neaptide_step_tokens_total", "Tokens.", ["class"], registry=registry)
    computed.labels("online").inc(tokens)
    seconds = Histogram("neaptide_request_ttft_seconds", "TTFT.", ["tier"], buckets=(0.5, 1.0), registry=registry)
    seconds.labels("default").observe(0.75)
    Gauge("neaptide_batch_requests_pending", "Of the database.", registry=registry).set(pending)
    Gauge("vllm:num_requests_running", "Running.", ["model_name"], registry=registry).labels("neaptide-tiny").set(2)
    Gauge("process_resident_memory_bytes", "Of another process.", registry=registry).set(1)
    return generate_latest(registry).decode()


async def shown(cluster: Cluster, **headers: str) -> str:
    exchange = cluster.request("/metrics", method="GET", **headers)
    await exchange.task
    assert exchange.status == 200
    return exchange.text


async def lines(cluster: Cluster) -> list[str]:
    return (await shown(cluster)).splitlines()


async def test_each_replicas_series_have_its_name_and_those_of_the_database_none(cluster: Cluster) -> None:
    for name, tokens in (("a", 3.0), ("b", 5.0)):
        (await cluster.add(name)).page = page(tokens, pending=7)
    found = await lines(cluster)
    for line in (
        'neaptide_step_tokens_total{class="online",replica="a"} 3.0',
        'neaptide_step_tokens_total{class="online",replica="b"} 5.0',
        'neaptide_request_ttft_seconds_bucket{le="1.0",replica="a",tier="default"} 1.0',
        'neaptide_request_ttft_seconds_sum{replica="b",tier="default"} 0.75',
        'vllm:num_requests_running{model_name="neaptide-tiny",replica="a"} 2.0',
        'neaptide_cluster_replica_ready{replica="a"} 1.0',
        'neaptide_cluster_requests_in_flight{replica="b"} 0.0',
    ):
        assert found.count(line) == 1, line
    assert [line for line in found if line.startswith("neaptide_batch")] == ["neaptide_batch_requests_pending 7.0"]
    # The gateway's own process, and no other.
    assert sum(line.startswith("process_resident_memory_bytes ") for line in found) == 1


@pytest.mark.parametrize("accept", ["text/plain", OPENMETRICS])
async def test_the_page_is_one_that_scrapers_take_with_each_family_once(cluster: Cluster, accept: str) -> None:
    for name in ("a", "b"):
        (await cluster.add(name)).page = page(1.0, pending=1)
    text = await shown(cluster, accept=accept)
    families = list((openmetrics if accept == OPENMETRICS else classic)(text))
    names = [family.name for family in families]
    assert sorted(names) == sorted(set(names))
    (tokens,) = (family for family in families if family.name == "neaptide_step_tokens")
    counted = [(one.labels["replica"], one.value) for one in tokens.samples if one.name.endswith("_total")]
    assert (tokens.type, counted) == ("counter", [("a", 1.0), ("b", 1.0)])


async def test_a_replica_that_does_not_say_its_series_costs_the_others_none(cluster: Cluster) -> None:
    (await cluster.add("a")).page = None
    (await cluster.add("b")).page = page(5.0, pending=7)
    found = await lines(cluster)
    assert 'neaptide_step_tokens_total{class="online",replica="b"} 5.0' in found
    assert "neaptide_batch_requests_pending 7.0" in found
    assert not [line for line in found if line.startswith("neaptide_step") and 'replica="a"' in line]


async def test_what_one_replica_has_not_read_of_the_database_yet_another_says(cluster: Cluster) -> None:
    (await cluster.add("a")).page = page(3.0, pending=7).replace("neaptide_batch_requests_pending 7.0\n", "")
    (await cluster.add("b")).page = page(5.0, pending=7)
    assert (await lines(cluster)).count("neaptide_batch_requests_pending 7.0") == 1


async def test_of_a_replica_that_has_left_nothing_is_said(cluster: Cluster) -> None:
    (await cluster.add("a")).page = page(3.0, pending=7)
    assert 'neaptide_cluster_replica_ready{replica="a"} 1.0' in await lines(cluster)
    cluster.gateway.replicas.leave("a")
    found = await lines(cluster)
    for name in ("neaptide_cluster_replica_ready", "neaptide_cluster_free_slack_seconds", "neaptide_step_tokens_total"):
        assert not [line for line in found if line.startswith(name)], name


def test_the_series_that_are_taken_once_are_those_that_the_database_says() -> None:
    registry = CollectorRegistry()
    BatchMetrics(registry, Store(Path()), lambda: 0.0, BatchStatuses())
    of_one_server = {"neaptide_batches_by_outlook", "neaptide_batch_chunks_held", "neaptide_batch_claims_lost"}
    assert {family.name for family in registry.collect()} - of_one_server == OF_THE_DATABASE


def of_the_database(completed: float) -> str:
    registry = CollectorRegistry()
    ended = Counter("neaptide_batch_requests_total", "Lines.", ["outcome"], registry=registry)
    ended.labels("completed").inc(completed)
    return generate_latest(registry).decode()


async def test_what_the_database_counts_does_not_fall_where_another_replica_says_it_now(
    cluster: Cluster, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that it is never over by itself, however slow the machine is.
    monkeypatch.setattr("neaptide.cluster.gateway.series.BEHIND_S", 1000.0)
    first, second = await cluster.add("a"), await cluster.add("b")
    first.page, second.page = of_the_database(1000), of_the_database(990)
    said = 'neaptide_batch_requests_total{outcome="completed"} '
    assert f"{said}1000.0" in await lines(cluster)
    first.page = None
    assert f"{said}1000.0" in await lines(cluster)
    second.page = of_the_database(1005)
    assert f"{said}1005.0" in await lines(cluster)
    # It has really fallen.
    second.page = of_the_database(3)
    assert f"{said}1005.0" in await lines(cluster)
    await loop_clock.pass_s(1001.0)
    assert f"{said}3.0" in await lines(cluster)


async def test_what_the_gateway_answers_itself_is_counted_by_route(cluster: Cluster) -> None:
    assert (await cluster.asked(CHAT, TO_STREAM))[0] == 503
    assert (await cluster.asked("/v1/batches/batch_1", method="GET"))[0] == 503
    assert (await cluster.asked("/made/up", method="GET"))[0] == 503
    await cluster.add("a")
    assert (await cluster.asked(CHAT, TO_STREAM))[0] == 200
    found = await lines(cluster)
    of_the_gateway = "neaptide_cluster_http_requests_total"
    for labels in (
        f'code="503",method="POST",route="{CHAT}"',
        f'code="200",method="POST",route="{CHAT}"',
        'code="503",method="GET",route="/v1/batches/{which:path}"',
        'code="503",method="GET",route="unmatched"',
    ):
        assert f"{of_the_gateway}{{{labels}}} 1.0" in found
    assert 'neaptide_cluster_connections_ended_total{reason="refused"} 0.0' in found


async def test_every_life_of_a_replica_is_counted(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    for _ in range(2):
        cluster.gateway.replicas.join("a", replica.url)
    cluster.gateway.replicas.leave("a")
    assert 'neaptide_cluster_replica_starts_total{replica="a"} 3.0' in await lines(cluster)


async def test_the_dashboard_sums_replicas_and_tells_the_worst_first(cluster: Cluster) -> None:
    facts = ServerFacts(model="m", ttft_slo_s=1.0, tpot_slo_s=0.1)
    (await cluster.add("a")).report = Report(at_s=100.0, facts=facts, occupancy=(2,) * 9)
    (await cluster.add("b")).report = Report(at_s=100.0, facts=facts, occupancy=(3,) * 9, storage_failing=True)
    await cluster.add("c")  # says nothing of itself
    exchange = cluster.request("/dashboard/data", method="GET")
    await exchange.task
    found = json.loads(exchange.text)
    assert found["status"]["sentence"] == "b: Files and batches cannot be stored. Chats go on."
    assert found["now"]["running_online"] == 5
    assert [(one["name"], one["severity"], one["sentence"]) for one in found["replicas"]] == [
        ("a", "info", "Ready. There was no work in the last five minutes."),
        ("b", "bad", "Files and batches cannot be stored. Chats go on."),
        ("c", "bad", "It does not answer."),
    ]
