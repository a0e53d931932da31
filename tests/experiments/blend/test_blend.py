"""The experiments on BlendServe's figures, on small pools."""

import pytest

from neaptide.experiments.blend import live, sharing
from neaptide.experiments.planning import partition, planning_time, sampling
from neaptide.experiments.result import ExperimentResult


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
    # The slowest hundredth of operations of a tenth of a millisecond is also what neighbours do to the caches, but not
    # each time.
    for _ in range(5):
        result = planning_time.run(quick=True)
        if not result.failed:
            break
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
