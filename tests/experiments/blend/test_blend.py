"""The experiments on BlendServe's figures, on small pools."""

import pytest

from neaptide.experiments.batchllm import planning_time
from neaptide.experiments.blend import partition, sampling, sharing
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
