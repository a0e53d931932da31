"""The experiment beside figure 14 of BROS, on results that are made up."""

from dataclasses import dataclass
from typing import Any

import pytest

from neaptide.experiments.bros.overhead import overhead_rows
from tests.experiments.bros.runs import cell, cell_runs


@dataclass
class Result:
    scheduler_ms: dict[str, float | None]


@dataclass
class Planned:
    """What the rows read of an ``Outcome``."""

    result: Result
    step_s: float


def planned(mean_ms: float | None, step_s: float) -> Any:
    return Planned(Result({"mean": mean_ms, "p99": mean_ms}), step_s)


@pytest.mark.parametrize(("mean_ms", "percent", "holds"), [(0.4, 1.0, True), (0.6, 1.493, False), (None, 0.0, True)])
def test_planning_is_a_share_of_the_step_with_it(mean_ms: float | None, percent: float, holds: bool) -> None:
    step_s = 0.0396
    runs = {cell(): cell_runs(neaptide=planned(mean_ms, step_s), bros=planned(4.4, step_s))}
    ours, bros = overhead_rows(runs)
    assert (round(ours.ours, 3), ours.paper, ours.holds) == (percent, 9.52, holds)
    assert (bros.ours, bros.holds) == (pytest.approx(10.0), None)
