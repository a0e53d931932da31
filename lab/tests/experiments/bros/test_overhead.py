"""The experiment of figure 14 of BROS, on made-up results."""

import pytest

from lab.tests.experiments.bros.runs import MadeUp, cell, cell_runs
from neaptide_lab.experiments.bros.overhead import overhead_rows


@pytest.mark.parametrize(("planning_s", "percent", "holds"), [(4e-4, 1.0, True), (6e-4, 1.493, False)])
def test_planning_is_a_share_of_the_step_with_it(planning_s: float, percent: float, holds: bool) -> None:
    step_s = 0.0396
    ours, theirs = MadeUp(step_s=step_s, planning_s=planning_s), MadeUp(step_s=step_s, planning_s=4.4e-3)
    own_row, bros_row = overhead_rows({cell(): cell_runs(neaptide=ours, bros=theirs)})
    assert (round(own_row.ours, 3), own_row.paper, own_row.holds) == (percent, 9.52, holds)
    assert (bros_row.ours, bros_row.holds) == (pytest.approx(10.0), None)
