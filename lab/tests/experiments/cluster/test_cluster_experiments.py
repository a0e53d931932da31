"""The experiments on clusters, on loads that take a second."""

import pytest

from neaptide.estimator.device_profile import load_profile
from neaptide_lab.experiments.cluster import day, routing, scaling
from neaptide_lab.experiments.result import ExperimentResult


def drawn(result: ExperimentResult) -> None:
    from matplotlib.figure import Figure

    assert result.plot is not None
    result.plot(Figure())


def test_one_pool_on_several_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "POOL", "batchllm-64-64-s16")
    monkeypatch.setattr(scaling, "QUICK_ROWS", 128)
    monkeypatch.setattr(scaling, "QUICK_REPLICAS", (1, 2))
    result = scaling.run(quick=True)
    of_linear = {row.case: row.ours for row in result.rows if "of linear" in row.case}
    assert set(of_linear) == {"claims, 2 replicas: of linear", "partition, 2 replicas: of linear"}
    assert all(0.4 < share <= 1.05 for share in of_linear.values())
    assert all(row.ours < 2.0 for row in result.rows if "lost" in row.case)
    drawn(result)


def test_routers_are_held_against_one_big_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "QUICK", (routing.Case("agent_miniswe", (0.0, 20.0), 4.0),))
    monkeypatch.setattr(routing, "MAX_OUTPUT_TOKENS", 4)
    result = routing.run(quick=True)
    hits = {row.case.split(", ")[1].split(":")[0]: row for row in result.rows if "hits" in row.case}
    assert hits["slack"].ours > hits["random"].ours
    assert all(row.paper is not None and row.ours <= row.paper + 1e-9 for row in hits.values())
    drawn(result)


def test_one_device_in_the_place_of_several_is_as_much_faster() -> None:
    profile = load_profile(routing.PROFILE)
    big = routing.as_one(profile, 4)
    assert big.num_blocks == 4 * profile.num_blocks
    assert big.costs["mixed"].pair_s == pytest.approx(profile.costs["mixed"].pair_s / 4)


@pytest.mark.full
def test_a_day_loses_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "QUICK", day.Size(28800.0, 4.0, 8))
    result = day.run(quick=True)
    left = {row.case: row.ours for row in result.rows if row.case.endswith("rows left")}
    assert len(left) == 3
    assert len(result.data[day.SCALED]["sizes"]) > 1
    drawn(result)
