"""The experiment of figure 7 of Echo, on made-up results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from neaptide.simulation.measures import OnlineRecord
from neaptide_lab.experiments.echo import slo as experiment
from neaptide_lab.experiments.result import Row

ATTAINMENT = {"both": 0.5, "both_from_arrival": 0.97, "ttft": 1.0, "tpot": 0.5}


@dataclass
class Measured:
    online: dict[str, OnlineRecord]


@dataclass
class Made:
    """What the curves read of a run."""

    measures: Measured


def rows(ours_both: float) -> dict[str, tuple[float, float | None, bool | None]]:
    attainment: Any = dict.fromkeys(experiment.POLICIES, ATTAINMENT) | {
        experiment.OURS: ATTAINMENT | {"both": ours_both}
    }
    curves = {policy: {"ttft_s": np.full(3, 0.4)} for policy in experiment.POLICIES}
    curves[experiment.BASE] = {"ttft_s": np.full(3, 0.1)}
    return {row.case: (round(row.ours, 6), row.paper, row.holds) for row in experiment._rows(attainment, curves)}


def test_attainment_by_both_definitions_and_the_medians_of_ttft_are_its_rows() -> None:
    made = rows(0.9)
    assert made["priority-v0: every token in time from arrival"] == (97.0, None, None)
    assert made["echo: every token in time from arrival"] == (97.0, 90.0, None)
    assert made["echo: both targets"] == (50.0, None, None)
    assert made["neaptide: both targets"] == (90.0, None, True)
    assert made["median TTFT, priority-v0 / bs+e"] == (0.25, None, None)
    assert len(made) == 2 * len(experiment.POLICIES) + 1


def test_a_base_with_the_higher_ttft_is_said_to_disagree_with_the_paper() -> None:
    def notes(ratio: float) -> list[str]:
        return experiment._notes([Row("median TTFT, priority-v0 / bs+e", ratio)])

    assert "against the paper" in notes(1.1)[-1]
    assert not any("against the paper" in note for note in notes(0.9))


def test_ours_below_the_papers_bar_does_not_hold() -> None:
    assert rows(0.89)["neaptide: both targets"][2] is False


def test_curves_are_quantiles_and_a_request_without_a_token_has_waited_until_the_end() -> None:
    done = OnlineRecord(1.0, first_s=1.2, last_s=3.2, tokens=5, is_done=True)
    other = OnlineRecord(2.0, first_s=2.1, last_s=2.1, tokens=1, is_done=True)
    never = OnlineRecord(2.2)
    one: Any = Made(Measured({"a": done, "b": other, "c": never}))
    curves = experiment._curves(one)
    assert curves["ttft_s"][[0, 50, 100]].tolist() == pytest.approx([0.1, 0.2, 1.0])
    assert curves["tpot_s"][[0, 100]].tolist() == [0.5, 0.5]
