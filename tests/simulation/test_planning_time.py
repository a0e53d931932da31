"""Planning takes what the profile says on the virtual clock; every step here takes 0.1 s beside."""

from dataclasses import replace
from pathlib import Path

import pytest

from neaptide.estimator.device_profile import PlanningCost, load_profile, profile_names
from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import STEP_S, constant, mixed, online, profile

PLANNING = PlanningCost(fixed_s=0.02, running_request_s=0.005)
SLOW_PLANNER = profile(num_blocks=48, planning=PlanningCost(2e-3, 1e-4))


def planned_slowly(depth: int, **fields: object) -> Scenario:
    """Two answers of four tokens."""
    requests = online((0.0, 8, 4), (0.0, 8, 4))
    return constant(requests, profile=profile(planning=PLANNING), overlap_depth=depth, **fields)


def token_times(scenario: Scenario) -> tuple[float, float]:
    """When the first and the last token of the first request came."""
    record = simulate(scenario).measures.online["online-0"]
    return record.first_s, record.last_s


def test_a_step_waits_for_its_planning_and_that_for_every_request_that_runs() -> None:
    first_s, last_s = token_times(planned_slowly(0))
    assert first_s == pytest.approx(0.02 + STEP_S)
    assert last_s - first_s == pytest.approx(3 * (0.02 + 2 * 0.005 + STEP_S))


def test_planning_hides_behind_the_step_in_flight() -> None:
    """Only the first planning is waited for."""
    first_s, last_s = token_times(planned_slowly(1))
    assert first_s == pytest.approx(0.02 + STEP_S)
    assert last_s - first_s == pytest.approx(3 * STEP_S)


def test_a_scale_of_0_plans_in_no_time() -> None:
    assert token_times(planned_slowly(0, planning_scale=0.0)) == pytest.approx((STEP_S, 4 * STEP_S))


def test_a_step_is_as_long_as_without() -> None:
    """What the cost model learns from has no planning in it."""
    run = simulate(planned_slowly(0))
    assert run.measures.steps((-1.0, 1e9))["duration_s"].tolist() == pytest.approx([STEP_S] * 4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["neaptide", "priority"])
def test_a_run_with_planning_time_replays(policy: str, depth: int, tmp_path: Path) -> None:
    scenario = mixed(num_online=12, policy=policy, step_noise=0.1, cost_model=None, overlap_depth=depth)
    run = simulate(replace(scenario, profile=SLOW_PLANNER), step_log=tmp_path / "log")
    assert run.num_unfinished == 0
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)


def test_the_same_run_comes_out_twice(tmp_path: Path) -> None:
    scenario = replace(mixed(num_online=12), profile=SLOW_PLANNER)
    for name in ("a", "b"):
        simulate(scenario, step_log=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_that_comes_with_the_package_charges_planning(name: str) -> None:
    planning = load_profile(name).planning
    assert 3e-4 < planning.seconds(100) < planning.seconds(1000) < 2e-3
