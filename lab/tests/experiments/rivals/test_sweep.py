"""What counts as a rival's best point, and as its one best setting, on results made by hand; one small real sweep."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.policies import find_policy
from neaptide.simulation.points import PolicyPoint
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import Run, simulate
from neaptide_lab.experiments.rivals import loads, sweep
from neaptide_lab.experiments.rivals.kept import KeptRuns
from neaptide_lab.experiments.rivals.loads import Load, scenario_of
from neaptide_lab.experiments.rivals.sweep import (
    FULL,
    ONLY_LIKELY,
    OURS,
    RIVALS,
    Point,
    Runs,
    Size,
    TraceRuns,
    falls_short,
    in_turn,
    one_setting,
    rival_of,
    rows_of_one_setting,
    settings,
)
from tests.simulation.scenes import constant, offline, online

SMALL, LARGE = PolicyPoint("priority", 512, 128), PolicyPoint("priority", 2048, 128)


@pytest.fixture(scope="module")
def template() -> SimResult:
    return simulate(constant(online((0.0, 8, 1), (1.0, 8, 1)), [offline((0, 4, 1))])).result


def point(template: SimResult, policy: PolicyPoint, attained: float, tokens_per_s: float) -> Point:
    attainment = template.online.attainment | {"both": attained}
    online_part = replace(template.online, attainment=attainment)
    return Point(
        policy, replace(template, online=online_part, offline=replace(template.offline, tokens_per_s=tokens_per_s))
    )


def trace(template: SimResult, *rivals: tuple[PolicyPoint, float, float]) -> TraceRuns:
    """Ours attains 99% at 1,000 tokens/s."""
    ours = point(template, OURS, 0.99, 1000.0)
    of_priority = [point(template, *rival) for rival in rivals]
    none = {rival: [] for rival in RIVALS}
    return TraceRuns(ours, ours, none | {"priority": of_priority}, {rival: {} for rival in RIVALS})


def test_of_a_rival_that_was_not_run_nothing_is_said(template: SimResult) -> None:
    runs = {"a": trace(template, (SMALL, 0.5, 900.0))}
    assert [row.case for row in sweep._rows("priority", runs, judged=True)] == [
        "a: best point of priority (none keeps up)"
    ]
    assert sweep._rows("fcfs", runs, judged=True) == []
    assert "fcfs" not in sweep._kept(runs["a"])


def test_the_best_point_is_the_fastest_that_attains_as_much_less_one_point(template: SimResult) -> None:
    one = trace(template, (SMALL, 0.98, 900.0), (LARGE, 0.979, 2000.0))
    best = one.best("priority")
    assert best is not None
    assert best.point == SMALL


def test_there_may_be_none(template: SimResult) -> None:
    assert trace(template, (SMALL, 0.5, 900.0)).best("priority") is None


def test_the_one_setting_keeps_up_on_most_traces_and_is_then_the_fastest_there(template: SimResult) -> None:
    runs: Runs = {
        "calm": trace(template, (SMALL, 1.0, 500.0), (LARGE, 1.0, 900.0)),
        "busy": trace(template, (SMALL, 1.0, 500.0), (LARGE, 0.2, 900.0)),
    }
    assert one_setting("priority", runs) == SMALL
    runs["busy"] = trace(template, (SMALL, 0.2, 5000.0), (LARGE, 0.2, 10.0))
    assert one_setting("priority", runs) == LARGE


def test_ours_falls_short_where_a_rival_that_keeps_up_is_faster(template: SimResult) -> None:
    assert falls_short(trace(template, (SMALL, 0.98, 1001.0)))
    assert not falls_short(trace(template, (SMALL, 0.98, 1000.0), (LARGE, 0.97, 2000.0)))


def test_there_is_no_one_setting_if_all_miss_the_targets_everywhere(template: SimResult) -> None:
    assert one_setting("priority", {"busy": trace(template, (SMALL, 0.2, 500.0))}) is None


def test_one_setting_is_compared_where_it_keeps_up(template: SimResult) -> None:
    """Ours does 1,000 tokens/s on each trace; 1.15 times 800 is less, 1.15 times 900 is not."""
    runs: Runs = {"calm": trace(template, (SMALL, 1.0, 800.0)), "busy": trace(template, (SMALL, 0.2, 9000.0))}
    calm, busy, mean = rows_of_one_setting("priority", SMALL, runs, judged=True)
    assert (calm.paper, busy.paper) == (800.0, None)
    assert mean.ratio == pytest.approx(1000 / 800)
    assert mean.holds
    runs["calm"] = trace(template, (SMALL, 1.0, 900.0))
    assert rows_of_one_setting("priority", SMALL, runs, judged=True)[-1].holds is False


def test_fewer_step_tokens_than_seats_are_left_out() -> None:
    assert settings("fcfs", (512, 1024), (256, 1024)) == [
        PolicyPoint("fcfs", 512, 256),
        PolicyPoint("fcfs", 1024, 256),
        PolicyPoint("fcfs", 1024, 1024),
    ]


def test_mixed_loads_come_together_in_the_order_of_their_arrivals() -> None:
    code = Load("azure_code_2023", (1134.0, 1139.0), 0.5, "batchllm-2000-200-s4")
    both = Load("azure_conv_2023", (600.0, 605.0), 1.0, "batchllm-2000-200-s4", mixed_with=(code,), warm_up_s=2.0)
    chats = dataclasses.replace(both, mixed_with=())
    mixed, *parts = (list(scenario_of(load).online) for load in (both, chats, dataclasses.replace(code, warm_up_s=2.0)))
    assert all(parts)
    assert sorted(mixed, key=str) == sorted(parts[0] + parts[1], key=str)
    assert [r.arrival_s for r in mixed] == sorted(r.arrival_s for r in mixed)
    assert mixed[0].arrival_s >= 2.0


def test_the_most_promising_points_come_before_all_others_on_every_load() -> None:
    points = list(in_turn(FULL))
    titles = [load.title for load in FULL.loads]
    assert len(points) == len(set(points)) == 7 * (17 + 17 + 4 + 8)
    first = ["priority@1024x256", "priority@512x256", "priority@1536x256", "priority@1024x128", "priority@2048x128"]
    first += [
        "neaptide_lab.policies.slidingserve:SlidingServePaced@2048x256",
        "neaptide_lab.policies.qoserve:QoServePaced@2048x256",
    ]
    assert [(load.title, str(point)) for load, point in points[:49]] == [
        (title, point) for title in titles for point in first
    ]
    rest = [("priority", 12), ("fcfs", 17), ("slidingserve", 3), ("qoserve", 7)]
    assert [rival_of(point) for _, point in points[49:]] == [rival for rival, count in rest for _ in range(7 * count)]
    assert list(in_turn(ONLY_LIKELY)) == points[:49]


def test_every_setting_of_a_rival_that_knows_deadlines_is_a_policy_of_its_own() -> None:
    assert {rival_of(point) for point in FULL.deadline_aware} == {"slidingserve", "qoserve"}
    assert len({find_policy(point.policy) for point in FULL.deadline_aware}) == 6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads of half a second, one point of each rival."""
    both = (
        Load("azure_conv_2023", (600.0, 600.7), 1.2, "batchllm-2000-200-s4", warm_up_s=0.2, name="chats"),
        Load("azure_code_2023", (1134.9, 1135.4), 1.1, "batchllm-2000-200-s4", warm_up_s=0.2),
    )
    aware = tuple(PolicyPoint(policy, 2048, 64) for policy in ("slidingserve", "qoserve"))
    monkeypatch.setattr(sweep, "QUICK", Size(both, (2048,), (64,), aware))
    monkeypatch.setattr(loads, "CLIENT_LIMIT_TOKENS", 8)
    monkeypatch.setattr(loads, "OFFLINE_REQUESTS", 100)


@pytest.mark.usefixtures("small")
def test_a_sweep_compares_every_rival_on_every_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours follows the plan that a server makes of its pool, which is told of no answer; no other run has a plan."""
    plans: dict[tuple[str, bool], set[tuple[str | None, bool]]] = {}

    def noted(scenario: Scenario, *, least_attainment: float = 0.0, observers: Sequence[EngineObserver] = ()) -> Run:
        plan = (scenario.plan, scenario.planner_is_told)
        plans.setdefault((scenario.policy, bool(scenario.offline)), set()).add(plan)
        return simulate(scenario, least_attainment=least_attainment, observers=observers)

    monkeypatch.setattr(sweep, "simulate", noted)
    result = sweep.run(quick=True)
    assert plans == {
        ("neaptide", True): {("ends", False)},
        ("neaptide", False): {(None, True)},
        ("priority", True): {(None, True)},
        ("fcfs", True): {(None, True)},
        ("slidingserve", True): {(None, True)},
        ("qoserve", True): {(None, True)},
    }
    assert set(result.data["runs"]) == {"chats", "azure_code_2023"}
    names = {"neaptide", "online alone"} | {f"{rival}@2048x64" for rival in RIVALS}
    for trace_name, points in result.data["runs"].items():
        given_up = result.data["out_of_reach"][trace_name]
        assert set(points).union(*given_up.values()) == names
    for rival in RIVALS:
        assert sum(f"best point of {rival}" in row.case for row in result.rows) == 2
    shares = [row.ours for row in result.rows if "of what no policy could exceed" in row.case]
    assert len(shares) == 2
    assert min(shares) > 0
    bounded = [row for row in result.rows if "clairvoyant" in row.case]
    assert [row.case.split(":")[0] for row in bounded] == ["chats", "azure_code_2023"]
    assert all(row.paper is not None and row.ours <= row.paper for row in bounded)
    slower = {row.case.split(":")[0] for row in result.rows if "best point" in row.case and (row.ratio or 1.0) < 1.0}
    said = {note.split(":")[0] for note in result.notes if "What ended the offline work of our steps: " in note}
    assert said == slower
    assert not result.failed


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_a_sweep_that_was_cut_goes_on_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sweep.run_kept(True, KeptRuns(SimResult, tmp_path / "whole"))
    assert len((tmp_path / "whole").read_text().splitlines()) == 12
    num_left = 5

    def cut(scenario: Scenario, *, least_attainment: float) -> Run:
        nonlocal num_left
        if num_left == 0:
            raise KeyboardInterrupt
        num_left -= 1
        return simulate(scenario, least_attainment=least_attainment)

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "simulate", cut)
        with pytest.raises(KeyboardInterrupt):
            sweep.run_kept(True, KeptRuns(SimResult, tmp_path / "cut"))
    assert len((tmp_path / "cut").read_text().splitlines()) == 5
    kept = KeptRuns(SimResult, tmp_path / "cut")
    again = sweep.run_kept(True, kept)
    assert kept.num_found == 5
    assert again.rows == whole.rows


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_the_likely_points_are_run_alone_if_asked_and_are_not_run_again_by_the_whole_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the 2 x 2 points of vLLM's and two more, and ours alone besides, on two loads."""
    likely = PolicyPoint("priority", 2048, 64)
    whole = dataclasses.replace(sweep.QUICK, step_tokens=(1024, 2048))
    monkeypatch.setattr(sweep, "LIKELY", (likely,))
    monkeypatch.setattr(sweep, "FULL", whole)
    monkeypatch.setattr(sweep, "ONLY_LIKELY", dataclasses.replace(whole, only=(likely,)))
    result = sweep.run_kept(False, KeptRuns(SimResult, tmp_path / "runs"), only_likely=True)
    assert len((tmp_path / "runs").read_text().splitlines()) == 2 * 3
    assert {name for points in result.data["runs"].values() for name in points} == {
        "neaptide",
        "online alone",
        "priority@2048x64",
    }
    kept = KeptRuns(SimResult, tmp_path / "runs")
    sweep.run_kept(False, kept)
    assert (kept.num_found, len((tmp_path / "runs").read_text().splitlines())) == (2 * 3, 2 * 8)
