"""The experiment of figure 10 of BROS, on made-up results."""

import pytest

from lab.tests.experiments.bros.runs import MadeUp, cell, cell_runs
from neaptide_lab.experiments.bros import latency as experiment
from neaptide_lab.experiments.bros.setting import LLAMA_3_70B, Runs
from neaptide_lab.experiments.bros.work import WindowWork
from neaptide_lab.experiments.result import Row


def rows(runs: Runs, lengths: str = "ShareGPT") -> dict[str, Row]:
    return {row.case.removeprefix(f"{lengths}: "): row for row in experiment.latency_rows(lengths, runs)}


def test_latencies_and_offline_tokens_are_compared_cell_by_cell() -> None:
    made = rows(
        {
            cell(3.0): cell_runs(neaptide=MadeUp(0.1, 900.0), fcfs_v0=MadeUp(0.4, 1000.0)),
            cell(6.0): cell_runs(neaptide=MadeUp(0.1, 700.0), fcfs_v0=MadeUp(1.0, 1000.0)),
        }
    )
    cut = made["latency of neaptide below fcfs-v0"]
    assert (cut.ours, cut.paper, cut.holds) == (pytest.approx(82.5), 74.20, True)
    assert made["offline tokens of neaptide against fcfs-v0"].ours == pytest.approx(-20.0)
    assert made["latency of bros below round-robin"].ours == pytest.approx(0.0)
    assert made["latency of bros below round-robin"].holds is None


def test_a_latency_that_is_not_low_enough_does_not_hold() -> None:
    runs = {cell(): cell_runs(neaptide=MadeUp(0.27), fcfs_v0=MadeUp(1.0))}
    assert rows(runs)["latency of neaptide below fcfs-v0"].holds is False


def test_of_other_lengths_it_only_informs() -> None:
    runs = {cell(lengths="LMSYS"): cell_runs()}
    assert rows(runs, "LMSYS")["latency of neaptide below fcfs-v0"].holds is None


def test_every_model_is_judged_by_itself() -> None:
    made = rows(
        {
            cell(): cell_runs(neaptide=MadeUp(0.1), fcfs_v0=MadeUp(1.0)),
            cell(model=LLAMA_3_70B): cell_runs(neaptide=MadeUp(0.3), fcfs_v0=MadeUp(1.0)),
        }
    )
    assert made["latency of neaptide below fcfs-v0"].holds
    assert made["ShareGPT, OPT-13B: latency of neaptide below fcfs-v0"].holds
    assert made["ShareGPT, Llama-3-70B: latency of neaptide below fcfs-v0"].holds is False


@pytest.mark.parametrize(("work", "holds"), [(0.97, True), (0.96, False)])
def test_work_is_judged_in_the_worst_cell(work: float, holds: bool) -> None:
    runs = {
        cell(3.0): cell_runs(),
        cell(6.0): cell_runs(neaptide=MadeUp(work=WindowWork(100.0, 0.5, work - 0.5))),
    }
    row = rows(runs)["lowest work of neaptide, of fcfs (OPT-13B, ShareGPT at 6/s)"]
    assert (row.ours, row.holds) == (pytest.approx(100.0 * work), holds)


@pytest.mark.parametrize(("tokens_per_s", "holds"), [(950.0, True), (940.0, False)])
def test_offline_tokens_are_judged_where_fcfs_does_the_same_online_work(tokens_per_s: float, holds: bool) -> None:
    behind = MadeUp(offline_tokens_per_s=5000.0, work=WindowWork(97.0, 0.5, 0.5))
    level = MadeUp(offline_tokens_per_s=1000.0, work=WindowWork(98.0, 0.5, 0.5))
    ours = MadeUp(offline_tokens_per_s=tokens_per_s)
    made = rows({cell(3.0): cell_runs(neaptide=ours, fcfs=behind), cell(6.0): cell_runs(neaptide=ours, fcfs=level)})
    assert made["cells where fcfs does as many online tokens"].ours == 1
    row = made["lowest offline tokens of neaptide, of fcfs, there (OPT-13B, ShareGPT at 6/s)"]
    assert (row.ours, row.holds) == (pytest.approx(tokens_per_s / 10.0), holds)


def test_where_fcfs_is_behind_everywhere_offline_tokens_are_not_judged() -> None:
    made = rows({cell(): cell_runs(fcfs=MadeUp(work=WindowWork(50.0, 0.5, 0.5)))})
    assert made["cells where fcfs does as many online tokens"].ours == 0
    assert not any("there" in case for case in made)


def test_where_work_falls_short_the_steps_say_why() -> None:
    short = MadeUp(work=WindowWork(100.0, 0.5, 0.4), gaps="90% sat out")
    (note,) = experiment.gap_notes({cell(3.0): cell_runs(), cell(6.0): cell_runs(neaptide=short)})
    assert note == (
        "OPT-13B, ShareGPT at 6/s: neaptide does 90.0% of the work of fcfs. Steps of neaptide: 90% sat out. "
        "Steps of fcfs: none."
    )
