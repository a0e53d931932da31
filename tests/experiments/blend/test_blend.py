"""The experiments on BlendServe's figures, on small pools."""

import pytest

from neaptide.experiments.blend import live, partition, planning_time, sampling, sharing, throughput
from neaptide.experiments.result import ExperimentResult
from neaptide.loadgen.workloads.blend_sets import DENSITY_TOKENS
from neaptide.loadgen.workloads.offline_sets import OfflineSet


def drawn(result: ExperimentResult) -> None:
    from matplotlib.figure import Figure

    assert result.plot is not None
    result.plot(Figure())


def test_blend_keeps_nearly_all_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "QUICK_REQUESTS", 1200)
    result = sharing.run(quick=True)
    kept = result.data["kept"]["trace 1"]
    assert kept["dfs"][-1] == pytest.approx(1.0)
    assert kept["blendserve"][0] >= 0.98
    drawn(result)


def test_planning_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_time, "LONG", (80, 64, 16, 4))
    monkeypatch.setattr(planning_time, "SHORT_QUICK", (2000, 32, 16, 4))
    result = planning_time.run(quick=True)
    assert not result.failed
    assert result.data["adding_s"] > 0
    drawn(result)


def test_parts_are_even_and_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "QUICK_REQUESTS", 2000)
    monkeypatch.setattr(partition, "QUICK_SCALE", 160)
    result = partition.run(quick=True)
    assert not result.failed
    assert set(result.data["scaling"]) == {"2", "4"}
    uneven = next(row for row in result.rows if "furthest" in row.case)
    assert uneven.holds is None  # one answer of some 30,000 tokens is more than a replica's share
    drawn(result)


def test_all_lengths_tell_all_and_a_sample_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "QUICK_REQUESTS", 1200)
    result = sampling.run(quick=True)
    found = result.data["found"]["trace 1"]
    assert found["1.0"] == [1.0, 1.0]
    assert found["0.01"][0] < 1.0
    drawn(result)


@pytest.mark.parametrize(("number", "density"), [(1, 1.4), (4, 0.9)])
def test_shorter_answers_leave_a_trace_its_density(number: int, density: float) -> None:
    set_ = throughput.with_shorter_answers(number, 3000, 4000)
    lengths = [(request.input_tokens, request.output_tokens) for request in set_.requests]
    assert max(output for _, output in lengths) == 6000
    shared = set_.sharing().tokens - set_.sharing().unique_tokens
    compute = sum(p + d for p, d in lengths) - shared
    assert DENSITY_TOKENS * compute / sum(p * d + d * d / 2 for p, d in lengths) == pytest.approx(density, rel=0.05)


def test_throughput_is_told_over_depth_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"dfs": 12.0, "blendserve": 10.0, "neaptide": 8.0}

    def made_up(set_: OfflineSet, policy: str, plan: str | None) -> tuple[float, float]:
        return seconds[policy] - (plan is not None), 0.5

    monkeypatch.setattr(throughput, "throughput", made_up)
    monkeypatch.setattr(throughput, "QUICK_REQUESTS", 800)
    result = throughput.run(quick=True)
    gains = {row.case: row.ours for row in result.rows if " over " in row.case}
    assert gains == {
        "trace 1: dfs over dfs": 1.0,
        "trace 1: blendserve over dfs": pytest.approx(1.2),
        "trace 1: neaptide over dfs": 1.5,
        "trace 1: neaptide, two ends over dfs": pytest.approx(12 / 7),
    }
    drawn(result)


def test_a_pool_is_run_to_its_end() -> None:
    set_ = throughput.with_shorter_answers(1, 800, 3000)
    few = OfflineSet("few", [r for r in set_.requests if r.output_tokens < 100][:60], synthetic=True)
    seconds, of_bound = throughput.throughput(few, "blendserve", None)
    assert seconds > 0
    assert 0 < of_bound <= 1


def test_a_pool_beside_online_work_is_told_way_by_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUICK", live.Size(12, 1, 3, (600.0, 601.0), (0.5,), (0.2,)))
    monkeypatch.setattr(live, "LONG_TOKENS", (5, 10))
    ways = ("echo", "neaptide", "neaptide, two ends")
    monkeypatch.setattr(live, "WAYS", {way: live.WAYS[way] for way in ways})
    result = live.run(quick=True)
    (runs,) = result.data["cells"].values()
    assert set(runs) == {"alone", *ways}
    assert runs["alone"]["offline_tokens_per_s"] is None
    assert all(runs[way]["offline_tokens_per_s"] > 0 for way in ways)
    assert set(runs["neaptide"]["attainment"]) >= {"both", "both_from_arrival"}
    judged = {row.case.rpartition(": ")[2]: row.holds for row in result.rows}
    assert judged["neaptide, attainment"] is True
    assert judged["neaptide, two ends, offline tokens/s"] is None  # no rival
    drawn(result)
