"""The experiment of figure 12 of BROS, on made-up results; and one real run of the set-up, tiny."""

import pytest

from lab.tests.experiments.bros.runs import MadeUp, cell, cell_runs
from neaptide_lab.experiments.bros import rt_only, setting
from neaptide_lab.experiments.bros.runs import run_cells, worth
from neaptide_lab.experiments.bros.setting import ALONE, BROS, OPT_13B, POLICIES, Size
from neaptide_lab.experiments.bros.work import WindowWork


def test_latency_and_throughput_stand_beside_the_papers() -> None:
    runs = {
        cell(): cell_runs(
            neaptide=MadeUp(0.05, work=WindowWork(110.0, 0.5, 0.0)),
            bros=MadeUp(0.08, attainment={"both": 0.5}),
        )
    }
    made = {row.case: row for row in rt_only.rt_only_rows("ShareGPT", runs)}
    cut, times = made["ShareGPT: latency of bros below fcfs-v0"], made["ShareGPT: online tokens of neaptide / fcfs-v0"]
    assert (cut.ours, cut.paper) == (pytest.approx(20.0), 29.36)
    assert (times.ours, times.paper) == (pytest.approx(1.1), 1.08)
    assert made["ShareGPT: latency of neaptide below fcfs"].ours == pytest.approx(50.0)
    assert made["ShareGPT: mean attainment of both targets, bros"].ours == 50.0


def test_the_best_of_bros_attains_most_and_then_gets_most_offline_work_done() -> None:
    few = MadeUp(offline_tokens_per_s=9000.0, attainment={"both": 0.9})
    slow = MadeUp(offline_tokens_per_s=1000.0, attainment={"both": 0.954})
    best = MadeUp(offline_tokens_per_s=2000.0, attainment={"both": 0.951})
    assert max((few, slow, best), key=worth) is best  # type: ignore[type-var]


TINY = Size((OPT_13B,), (15.0,), 0.5, batch_sizes=(4, 16), lengths=("LMSYS",))


def test_a_cell_has_every_policy_and_bros_with_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "DRAIN_S", 0.0)
    ((load, one),) = run_cells(TINY, has_alone=True).items()
    assert str(load) == "OPT-13B, LMSYS at 15/s"
    assert set(one.by_policy) == {*POLICIES, ALONE}
    assert one.by_policy[ALONE].result.offline.tokens_per_s == 0.0
    assert all(one.by_policy[name].offline_tokens_per_s > 0 for name in POLICIES)
    assert one.bros_by_size[4].result.steps != one.bros_by_size[16].result.steps
    assert one.by_policy[BROS] is one.bros_by_size[one.bros_size]
    assert all(0.0 < made.planning_s < made.result.wall_s / made.result.steps for made in one.by_policy.values())


def test_without_offline_work_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rt_only, "QUICK", TINY)
    monkeypatch.setattr(setting, "DRAIN_S", 2.0)
    result = rt_only.run(quick=True)
    (runs,) = result.data["runs"].values()
    offline = [one["result"]["offline"]["tokens_per_s"] for one in runs.values()]
    assert len(offline) == 6
    assert not any(offline)
    assert any("had no end" in note for note in result.notes)
    assert any("neaptide" in note and "fcfs-v0" in note for note in result.notes)
