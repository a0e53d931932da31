"""Several engines on one clock: what one does, all do; nothing is lost or done twice; the same comes out each time."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.cluster.autoscaling import Scale
from neaptide.cluster.routing import ROUTERS
from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import PLACEMENTS, Placement, SimulatedFleet, parted
from neaptide.engine.scheduler import online_load
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.bound import Devices, bound_tokens_per_s
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import BASE, constant, mixed, offline, online, profile

OF_THE_MACHINE = ("scheduler_ms", "peak_memory_bytes", "wall_s")


def figures(result: SimResult) -> dict[str, Any]:
    """Those that two runs must have in common."""
    found: dict[str, Any] = msgspec.to_builtins(result)
    return {name: found[name] for name in SimResult.__struct_fields__ if name not in OF_THE_MACHINE}


def pool_of(num_rows: int, own_tokens: int = 8) -> OfflineSet:
    """Rows on five prefixes."""
    rows = [TraceRequest(0.0, ((BASE + k % 5, 24), (BASE + 9 + k, own_tokens)), 1 + k % 7) for k in range(num_rows)]
    return OfflineSet("scene", rows, synthetic=True)


def chats(count: int, gap_s: float = 0.05, prompt_tokens: int = 24) -> list[TraceRequest]:
    return online(*((gap_s * k, prompt_tokens, 1 + k % 9) for k in range(count)))


def tokens_of(scene: Scenario) -> int:
    return sum(row.input_tokens + row.output_tokens for one in scene.offline for row in one.requests)


def logical_tokens(result: SimResult, window_s: float) -> int:
    return round(result.offline_tokens_per_s * window_s)


# ---- one replica ----


@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_is_what_simulate_gives(router: str) -> None:
    scene = mixed(step_noise=0.1)
    run = simulate_cluster(scene, SimulatedFleet(router=router, placement="partition"))
    assert figures(run.result) == figures(simulate(scene).result)


@pytest.mark.parametrize(
    "scene",
    [
        mixed(overlap_depth=1),
        mixed(plan="neaptide", refill=False),
        mixed(online=(), refill=False),
        mixed(window_s=(0.2, 1.1)),
        constant(offline_sets=[offline(*[(0, 4, 3)] * 6, batch_size=2)]),
        mixed(drain_s=0.01, tpot_slo_s=0.001),
    ],
)
def test_one_replica_is_what_simulate_gives_in_other_scenes(scene: Scenario) -> None:
    run = simulate_cluster(scene, SimulatedFleet(placement="partition"))
    assert figures(run.result) == figures(simulate(scene).result)


# ---- several ----


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_row_and_every_request_is_done_once(placement: Placement) -> None:
    scene = constant(chats(40), [pool_of(500)], refill=False, profile=profile(256), max_num_seqs=16, drain_s=1e6)
    run = simulate_cluster(replace(scene, window_s=(0.0, 1e4)), SimulatedFleet(replicas=3, placement=placement))
    assert (run.result.rows.done, run.result.rows.open) == (500, 0)
    assert run.result.online.requests == 40
    assert run.whole.num_unfinished == 0
    assert sum(one.online.requests for one in run.result.replicas) == 40
    assert all(one.online.requests > 5 and one.offline.requests_completed > 50 for one in run.result.replicas)


@settings(max_examples=8, deadline=None)
@given(
    lost_at_s=st.lists(st.floats(0.05, 6.0), min_size=1, max_size=4),
    start_up_s=st.floats(0.0, 3.0),
    lease_s=st.floats(0.0, 3.0),
    replicas=st.integers(1, 4),
    scales=st.booleans(),
)
def test_lost_replicas_lose_no_row_and_none_runs_again_after_its_end(
    lost_at_s: list[float], start_up_s: float, lease_s: float, replicas: int, scales: bool
) -> None:
    """``SharedRows.done`` raises if a row ends a second time."""
    scene = constant(chats(20), [pool_of(80)], refill=False, profile=profile(128), max_num_seqs=8, drain_s=1e6)
    fleet = SimulatedFleet(
        replicas=replicas,
        lost_at_s=tuple(lost_at_s),
        start_up_s=start_up_s,
        lease_s=lease_s,
        decide_s=0.5,
        scale=Scale(1, 4, down_after_s=1.0) if scales else None,
    )
    run = simulate_cluster(replace(scene, window_s=(0.0, 1e3)), fleet)
    result = run.result
    assert (result.rows.done, result.rows.open) == (80, 0)
    assert logical_tokens(result, 1e3) == tokens_of(scene)
    assert result.offline.requests_completed == 80
    assert result.online.requests == 20
    assert run.whole.num_unfinished == result.failed_online
    states = [one.state for one in result.replicas]
    assert states.count("lost") == len(lost_at_s) or scales or start_up_s > 0


def test_a_lost_replica_fails_only_what_it_had_and_its_rows_are_done_after_the_lease() -> None:
    scene = constant(chats(40), [pool_of(200)], refill=False, profile=profile(256), max_num_seqs=8, drain_s=1e6)
    fleet = SimulatedFleet(replicas=2, lost_at_s=(1.0,), start_up_s=5.0, lease_s=2.0)
    result = simulate_cluster(replace(scene, window_s=(0.0, 1e3)), fleet).result
    lost, other, new = result.replicas
    assert (lost.state, lost.ended_s) == ("lost", 1.0)
    assert (new.begins_s, new.ready_s) == (1.0, 6.0)
    assert 0 < result.failed_online <= 8 + 2
    assert result.failed_online == round((1 - (lost.online.attainment["both"] or 0)) * lost.online.requests)
    assert other.online.attainment["both"] == 1.0
    assert 0 < result.rows.given_back <= 8 + 64 + 64
    assert logical_tokens(result, 1e3) == tokens_of(scene)
    assert result.wasted_tokens > 0


def test_what_a_lost_replica_had_in_flight_counts_where_it_is_done() -> None:
    scene = constant((), [pool_of(60)], refill=False, profile=profile(256), max_num_seqs=8, overlap_depth=1)
    fleet = SimulatedFleet(replicas=2, lost_at_s=(0.7,), start_up_s=0.5, lease_s=0.2)
    result = simulate_cluster(replace(scene, window_s=(0.0, 1e3)), fleet).result
    assert result.rows.given_back > 0
    assert logical_tokens(result, 1e3) == tokens_of(scene)


def test_the_same_seed_gives_the_same_figures() -> None:
    scene = mixed(step_noise=0.2, refill=True)
    fleet = SimulatedFleet(replicas=3, router="random", lost_at_s=(0.5,), start_up_s=0.3, lease_s=0.2)
    first, second = (simulate_cluster(scene, fleet).result for _ in range(2))
    assert figures(first) == figures(second)
    assert first.replicas == second.replicas
    assert first.sizes == second.sizes


def test_two_replicas_do_twice_the_work() -> None:
    scene = constant(offline_sets=[pool_of(500)], refill=False, profile=profile(256), max_num_seqs=8)
    for placement in PLACEMENTS:
        one, two = (
            simulate_cluster(scene, SimulatedFleet(replicas=replicas, placement=placement)).result
            for replicas in (1, 2)
        )
        assert one.offline.makespan_s is not None
        assert two.offline.makespan_s is not None
        assert 1.8 < one.offline.makespan_s / two.offline.makespan_s < 2.1


def test_claims_come_in_chunks_and_a_replica_does_not_hoard() -> None:
    """Eight seats a replica: of 600 rows it holds at most those that run, those that wait, and a chunk."""
    scene = constant((), [pool_of(600)], refill=False, profile=profile(256), max_num_seqs=8, window_s=(0.0, 1.0))
    result = simulate_cluster(scene, SimulatedFleet(replicas=2)).result
    assert result.rows.done + result.rows.open == 600
    assert result.rows.done < 300


def test_requests_wait_for_a_replica_that_starts() -> None:
    fleet = SimulatedFleet(lost_at_s=(0.0,), start_up_s=2.0)
    result = simulate_cluster(constant(chats(3)), fleet).result
    assert result.failed_online == 0
    assert result.online.ttft_s["p50"] == pytest.approx(2.0, abs=0.2)


def test_a_fleet_grows_and_shrinks_with_its_load_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts for 0.9 s of every second in the first three, then nearly none."""
    monkeypatch.setattr(online_load, "LOAD_WINDOW_S", 1.0)
    busy, calm = chats(300, 0.01, 60), online(*((3.5 + k, 4, 1) for k in range(30)))
    scene = mixed(online=[*busy, *calm], offline=[pool_of(100)], refill=False, max_num_seqs=64, window_s=(0.0, 35.0))
    fleet = SimulatedFleet(scale=Scale(1, 4, down_after_s=5.0), start_up_s=0.5, decide_s=0.5)
    result = simulate_cluster(scene, fleet).result
    sizes = [size for _, size in result.sizes]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    assert {"stopped", "serving"} == {one.state for one in result.replicas}
    assert (result.rows.done, result.rows.open, result.failed_online) == (100, 0, 0)
    assert result.online.requests == 330
    assert result.replica_hours < max(sizes) * 35.0 / 3600
    spans_s = [(one.ready_s, 35.0 if one.ended_s is None else one.ended_s) for one in result.replicas]
    devices = Devices(sum(to_s - from_s for from_s, to_s in spans_s) / 35.0, len(spans_s))
    bounds = result.offline.bound_tokens_per_s
    expected = bound_tokens_per_s(scene, (0.0, 35.0), devices)
    assert {name: bounds[name] for name in expected} == pytest.approx(expected)
    assert 0.0 < (result.offline.share_of_bound or 0.0) < 1.0


# ---- placement ----


def test_parts_hold_every_row_once_and_share_the_work() -> None:
    sets = [pool_of(300), offline(*[(8, 4, 2)] * 50)]
    parts = parted(sets, profile(), 3)
    for number, one in enumerate(sets):
        rows = [request for part in parts for request in part[number].requests]
        assert sorted(map(repr, rows)) == sorted(map(repr, one.requests))
    sizes = [sum(len(one.requests) for one in part) for part in parts]
    assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 0}, "from 1 to 1024"),
        ({"router": "best"}, "there is no router 'best'"),
        ({"placement": "partition", "lost_at_s": (1.0,)}, "needs claims"),
        ({"scale": Scale(2, 3)}, "cannot start with 1"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedFleet(**fields)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_set_in_batches_is_not_shared(placement: Placement) -> None:
    scene = constant(offline_sets=[offline(*[(0, 4, 3)] * 6, batch_size=2)])
    with pytest.raises(ValueError, match="keeps one engine busy"):
        simulate_cluster(scene, SimulatedFleet(replicas=2, placement=placement))
