"""What Ray Serve's autoscaler is told, and what it is to do: by hand, without Ray."""

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from neaptide.cluster.ray.scaling import MOST_PRESSURE, replicas_wanted, said

FIGURES = {"online_load": 0.5, "free_slack_ms": 1.0}


@dataclass
class Context:
    """As Serve's controller makes one."""

    aggregated_metrics: dict[str, dict[str, float]] | None
    target_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    policy_state: dict[str, Any] = field(default_factory=dict)


def server(figures: httpx.Response, backlog: httpx.Response) -> httpx.AsyncClient:
    replies = {"/figures": figures, "/backlog": backlog}
    transport = httpx.MockTransport(lambda request: replies[request.url.path])
    return httpx.AsyncClient(transport=transport, base_url="http://replica")


def jobs(*left_and_work_s: tuple[float, float]) -> httpx.Response:
    found = [{"left_seconds": left_s, "work_seconds": work_s} for left_s, work_s in left_and_work_s]
    return httpx.Response(200, json={"jobs": found})


async def test_a_replica_says_its_load_and_what_presses_on_all() -> None:
    """160 s of work, due in 200 s of which 0.8 count: one replica that does nothing else."""
    asked = server(httpx.Response(200, json=FIGURES), jobs((10_000.0, 1.0), (200.0, 160.0)))
    assert await said(asked) == {"online_load": 0.5, "pressure": 1.0}


async def test_what_is_late_presses_as_much_as_has_a_mean() -> None:
    asked = server(httpx.Response(200, json=FIGURES), jobs((-1.0, 1.0)))
    assert await said(asked) == {"online_load": 0.5, "pressure": MOST_PRESSURE}


@pytest.mark.parametrize("away", ["/figures", "/backlog"])
async def test_a_replica_that_does_not_know_says_nothing(away: str) -> None:
    replies = {"/figures": httpx.Response(200, json=FIGURES), "/backlog": jobs(), away: httpx.Response(503)}
    assert await said(server(replies["/figures"], replies["/backlog"])) == {}


@pytest.mark.parametrize(
    ("loads", "pressed", "replicas"),
    [
        ([0.0, 0.0], 0.0, 1),
        ([0.7, 0.6], 0.0, 3),  # 1.3 of at most 0.6 each
        ([0.2, 0.2], 0.9, 2),  # 0.9 of work that takes 1 / 0.6 of its least time, beside 0.4
        ([0.0], MOST_PRESSURE, 4),
    ],
)
def test_the_rule_is_that_of_other_fleets(loads: list[float], pressed: float, replicas: int) -> None:
    told = {"online_load": {f"r{i}": load for i, load in enumerate(loads)}, "pressure": {"r0": pressed}}
    assert replicas_wanted(Context(told)) == (replicas, {})


@pytest.mark.parametrize("told", [None, {}, {"online_load": {"r0": 9.0}}, {"pressure": {"r0": 9.0}}])
def test_unknown_means_no_change(told: dict[str, dict[str, float]] | None) -> None:
    assert replicas_wanted(Context(told, target_num_replicas=3)) == (3, {})
