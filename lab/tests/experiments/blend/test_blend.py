"""The experiments on BlendServe's figures, on small pools."""

import pytest

from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide_lab.experiments.blend import live, sharing
from neaptide_lab.experiments.planning import partition, planning_time, sampling
from neaptide_lab.experiments.result import ExperimentResult


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


@pytest.mark.full
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


@pytest.mark.full
def test_a_rival_that_misses_what_it_is_told_is_told_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUICK", live.Size(12, 1, 3, (600.0, 601.0), (0.5,), (0.2,)))
    monkeypatch.setattr(live, "LONG_TOKENS", (5, 10))
    monkeypatch.setattr(live, "WAYS", {way: live.WAYS[way] for way in ("echo", "neaptide")})
    monkeypatch.setattr(live, "TOLD_TPOT_S", (0.04, 0.001))
    monkeypatch.setattr(live, "CONCEDED", -1.0)  # nobody attains so much
    result = live.run(quick=True)
    (runs,) = result.data["cells"].values()
    assert [*runs] == ["alone", "echo", "neaptide", "echo, told 40 ms", "echo, told 1 ms"]
    assert runs["echo, told 1 ms"]["tpot_s"]["p50"] > 0.001  # it attains nothing of what it was told
    told = runs["echo, told 1 ms"]["attainment"]
    assert (told["both"], told["both_from_arrival"]) == (1.0, None)
    drawn(result)


@pytest.mark.full
def test_a_rival_that_attains_enough_is_told_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = [load_offline("mmlu", seed=0, limit=2)]
    scenario = live._scenario(live.Size(2, 0, 0, (600.0, 601.0), (0.5,), (0.2,)), 0.5, 0.2, "echo", None, offline)
    assert [*live.told_less(scenario, least=0.5)] == ["46 ms"]
    assert [*live.told_less(scenario, least=1.1)] == ["46 ms", "44 ms", "42 ms"]
