"""The size of a live fleet, by what its replicas say: the fleet is a list, time is passed in."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from neaptide.cluster.autoscaling import Scale
from neaptide.cluster.gateway.replicas import ReplicaStatus
from neaptide.cluster.launch.scaling import MOST_REPLICAS, Scaling, WantedReplicas
from tests.cluster.gateway.conftest import Cluster
from tests.patience import until

SCALE = Scale(1, 3, online_share=0.5, offline_efficiency=0.5, deadline_share=1.0, down_after_s=60.0)


class Fleet:
    """As many as have been asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dismissed: list[str] = []

    def grow(self, count: int) -> None:
        self.size += count

    def shrink(self, name: str) -> None:
        self.size -= 1
        self.dismissed.append(name)


async def serving(cluster: Cluster, **loads: float) -> None:
    """Replicas with these online loads, which the gateway has heard of."""
    for name, load in loads.items():
        (await cluster.add(name)).online_load = load
    await until(lambda: {one.name: one.online_load for one in cluster.gateway.replicas.all} == loads)


async def test_online_load_starts_replicas_and_those_that_start_count(cluster: Cluster) -> None:
    await serving(cluster, a=1.2)
    fleet = Fleet(1)
    scaling = Scaling(SCALE, fleet, cluster.gateway.replicas)
    await scaling.decide(0.0)
    assert fleet.size == 3
    await scaling.decide(10.0)
    assert (fleet.size, fleet.dismissed) == (3, [])


async def test_a_batch_that_would_be_late_starts_replicas(cluster: Cluster) -> None:
    """80 s of work that takes twice its least time, in 100 s: 1.6 replicas."""
    await serving(cluster, a=0.0)
    cluster.replicas["a"].backlog = [(10_000.0, 1.0), (100.0, 80.0)]
    fleet = Fleet(1)
    await Scaling(SCALE, fleet, cluster.gateway.replicas).decide(asyncio.get_running_loop().time())
    assert fleet.size == 2


async def test_when_less_was_enough_for_long_the_one_with_the_least_online_work_goes(cluster: Cluster) -> None:
    await serving(cluster, a=0.5, b=0.1, c=0.5)
    fleet = Fleet(3)
    scaling = Scaling(SCALE, fleet, cluster.gateway.replicas)
    await scaling.decide(0.0)
    for replica in cluster.replicas.values():
        replica.online_load /= 2
    await until(lambda: sum(one.online_load for one in cluster.gateway.replicas.all) < 0.6)
    for now_s in (10.0, 59.0):
        await scaling.decide(now_s)
    assert fleet.dismissed == []
    await scaling.decide(61.0)
    assert fleet.dismissed == ["b"]


@pytest.mark.parametrize("away", ["database", "replicas"])
async def test_nothing_is_decided_while_it_is_unknown_what_there_is_to_do(cluster: Cluster, away: str) -> None:
    await serving(cluster, a=0.0, b=1.4)
    for name, replica in cluster.replicas.items():
        replica.backlog = None
        replica.status = 503 if away == "replicas" else 200
        await cluster.until(name, ReplicaStatus.CLOSED if away == "replicas" else ReplicaStatus.READY)
    fleet = Fleet(2)
    await Scaling(SCALE, fleet, cluster.gateway.replicas).decide(0.0)
    assert (fleet.size, fleet.dismissed) == (2, [])


def wanted(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("neaptide_cluster_replicas_wanted")


async def test_what_is_needed_is_a_series_for_another_autoscaler(cluster: Cluster) -> None:
    """1.2 replicas' worth of online work may take 0.6 of the time."""
    await serving(cluster, a=1.2)
    registry = CollectorRegistry()
    series = WantedReplicas(cluster.gateway.replicas, registry)
    await series.decide(0.0)
    assert wanted(registry) == 2
    cluster.replicas["a"].backlog = [(-1.0, 1.0)]
    await series.decide(asyncio.get_running_loop().time())
    assert wanted(registry) == MOST_REPLICAS


async def test_no_number_is_wanted_before_one_is_known_and_the_last_one_stays(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    series = WantedReplicas(cluster.gateway.replicas, registry)
    await series.decide(0.0)
    assert wanted(registry) is None
    await serving(cluster, a=1.2)
    await series.decide(10.0)
    cluster.replicas["a"].backlog = None
    await series.decide(20.0)
    assert wanted(registry) == 2
