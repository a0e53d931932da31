"""What counts as a rival's best point, and as its one best setting, on results made by hand; one small real sweep."""

import pytest
from msgspec.structs import replace

from neaptide.experiments import tuned_rivals
from neaptide.experiments.tuned_rivals import OURS, Load, Point, Runs, Size, TraceRuns, one_setting, settings
from neaptide.simulation.points import PolicyPoint
from neaptide.simulation.result import SimResult
from neaptide.simulation.simulator import simulate
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
    return TraceRuns(ours, ours, {"priority": [point(template, *rival) for rival in rivals], "fcfs": []})


def test_the_best_point_is_the_fastest_that_attains_as_much_less_one_point(template: SimResult) -> None:
    one = trace(template, (SMALL, 0.98, 900.0), (LARGE, 0.979, 2000.0))
    best = one.best("priority")
    assert best is not None
    assert best.point == SMALL


def test_there_may_be_none(template: SimResult) -> None:
    assert trace(template, (SMALL, 0.5, 900.0)).best("priority") is None


def test_the_one_setting_keeps_up_on_most_traces_and_is_then_the_fastest(template: SimResult) -> None:
    runs: Runs = {
        "calm": trace(template, (SMALL, 1.0, 500.0), (LARGE, 1.0, 900.0)),
        "busy": trace(template, (SMALL, 1.0, 500.0), (LARGE, 0.2, 900.0)),
    }
    assert one_setting("priority", runs) == SMALL
    runs["busy"] = trace(template, (SMALL, 0.2, 500.0), (LARGE, 0.2, 900.0))
    assert one_setting("priority", runs) == LARGE


def test_fewer_step_tokens_than_seats_are_left_out() -> None:
    assert settings("fcfs", (512, 1024), (256, 1024)) == [
        PolicyPoint("fcfs", 512, 256),
        PolicyPoint("fcfs", 1024, 256),
        PolicyPoint("fcfs", 1024, 1024),
    ]


def test_a_sweep_compares_every_rival_on_every_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = (
        Load("azure_conv_2023", (600.0, 600.7), 1.2, "batchllm-2000-200-s4", warm_up_s=0.2),
        Load("azure_code_2023", (1134.9, 1135.4), 1.1, "batchllm-2000-200-s4", warm_up_s=0.2),
    )
    monkeypatch.setattr(tuned_rivals, "QUICK", Size(loads, (2048,), (64,)))
    monkeypatch.setattr(tuned_rivals, "CLIENT_LIMIT_TOKENS", 8)
    monkeypatch.setattr(tuned_rivals, "OFFLINE_REQUESTS", 100)
    result = tuned_rivals.run(quick=True)
    assert set(result.data["runs"]) == {load.trace for load in loads}
    names = {"neaptide", "priority@2048x64", "fcfs@2048x64", "online alone"}
    assert all(set(points) == names for points in result.data["runs"].values())
    for rival in ("priority", "fcfs"):
        cases = [row.case for row in result.rows if rival in row.case]
        assert sum("best point" in case for case in cases) == 2
        assert any(case == f"all traces, geometric mean: {rival}@2048x64" for case in cases)
    shares = [row.ours for row in result.rows if row.case.endswith("of the bound")]
    assert len(shares) == 2
    assert min(shares) > 0
    assert not result.failed
