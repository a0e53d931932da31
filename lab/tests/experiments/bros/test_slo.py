"""The experiment of figure 11 of BROS, on made-up results."""

import pytest

from lab.tests.experiments.bros.runs import MadeUp, cell, cell_runs
from neaptide_lab.experiments.bros import slo as experiment
from neaptide_lab.experiments.bros.setting import ALONE, Runs
from neaptide_lab.experiments.result import Row


def attaining(ttft: float, tpot: float = 1.0) -> MadeUp:
    return MadeUp(attainment={"ttft": ttft, "tpot": tpot})


def rows(runs: Runs) -> dict[str, Row]:
    return {row.case.removeprefix("ShareGPT: "): row for row in experiment.slo_rows("ShareGPT", runs)}


def test_attainment_is_the_mean_of_the_cells_and_stands_beside_the_papers() -> None:
    made = rows({cell(3.0): cell_runs(bros=attaining(1.0, 0.9)), cell(6.0): cell_runs(bros=attaining(0.5, 0.7))})
    tpot = made["mean TPOT attainment of bros"]
    assert (tpot.ours, tpot.paper) == (pytest.approx(80.0), 65.49)
    assert made["mean TTFT attainment of bros"].ours == pytest.approx(75.0)
    assert made["mean TTFT attainment of round-robin"].paper == 10.55


def test_attainments_are_divided() -> None:
    made = rows({cell(): cell_runs(fcfs_v0=attaining(0.05, 0.5))})
    row = made["mean TTFT attainment, neaptide / fcfs-v0"]
    assert (row.ours, row.paper) == (pytest.approx(20.0), 36.38)
    assert made["mean TPOT attainment, bros / fcfs-v0"].ours == pytest.approx(2.0)


@pytest.mark.parametrize(("ttft", "holds"), [(0.9, True), (0.89, False)])
def test_ours_is_judged_where_online_alone_attains_enough(ttft: float, holds: bool) -> None:
    able = cell_runs(neaptide=attaining(ttft))
    unable = cell_runs(neaptide=attaining(0.2))
    unable.by_policy[ALONE] = attaining(0.94)  # type: ignore[assignment]
    made = rows({cell(3.0): able, cell(6.0): unable})
    assert made["cells where neaptide alone reaches 95% of TTFT"].ours == 1
    row = made["lowest TTFT attainment of neaptide there (OPT-13B, ShareGPT at 3/s)"]
    assert (row.ours, row.holds) == (pytest.approx(100.0 * ttft), holds)


def test_tpot_is_judged_too() -> None:
    made = rows({cell(): cell_runs(neaptide=attaining(1.0, 0.5))})
    assert made["lowest TPOT attainment of neaptide there (OPT-13B, ShareGPT at 5/s)"].holds is False
