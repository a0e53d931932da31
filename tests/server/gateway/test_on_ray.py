"""What the application on Ray does by itself; Ray is asked in ``tests/e2e/cluster/test_ray.py``."""

from pathlib import Path

import pytest

from tests.server.gateway.conftest import Cluster

on_ray = pytest.importorskip("neaptide.launch.cluster.on_ray", reason="Ray is not installed", exc_type=ImportError)


async def test_a_gateway_has_the_replicas_that_the_deployment_has(cluster: Cluster) -> None:
    await cluster.add("kept")
    await cluster.add("moved")
    await cluster.add("gone")
    kept, moved, _ = cluster.gateway.replicas.all
    found = {"kept": kept.url, "moved": "http://127.0.0.1:1", "new": "http://127.0.0.1:2"}
    on_ray.update(cluster.gateway.replicas, found)
    assert {replica.name: replica.url for replica in cluster.gateway.replicas.all} == found
    assert kept in cluster.gateway.replicas.all
    assert moved not in cluster.gateway.replicas.all


def test_replicas_of_a_node_have_places_that_are_free_again_when_they_end(tmp_path: Path) -> None:
    first, first_lock = on_ray.take_place(str(tmp_path))
    second, second_lock = on_ray.take_place(str(tmp_path))
    assert (first, second) == ("replica-1", "replica-2")
    first_lock.close()
    again, again_lock = on_ray.take_place(str(tmp_path))
    assert again == "replica-1"
    again_lock.close()
    second_lock.close()
