"""Sums over cells, and the table's file."""

from pathlib import Path

import pytest

from lab.tests.experiments.judgement.runs_by_hand import cell, figures
from neaptide_lab.gym.score import score
from neaptide_lab.gym.table import GymTable

BOUND = figures(attained=0.8)


def test_a_score_is_the_mean_of_cells_and_its_waits_are_the_longest() -> None:
    one = figures(
        attained=0.8,
        offline_tokens_per_s=600.0,
        offline_bound_tokens_per_s=1000.0,
        wait_max_s=1.0,
        preempted_online=1,
        preempted_offline=2,
        steps=100,
        plan_mean_ms=1.0,
        plan_p99_ms=4.0,
    )
    other = figures(
        attained=0.4,
        offline_tokens_per_s=200.0,
        offline_bound_tokens_per_s=1000.0,
        wait_max_s=9.0,
        preempted_online=3,
        preempted_offline=4,
        steps=300,
        plan_mean_ms=2.0,
        plan_p99_ms=3.0,
        valid=False,
    )
    found = score([(cell(offline="x"), one, BOUND), (cell(offline="x"), other, BOUND)])
    assert (found.cells, found.dry) == (2, 1)
    assert found.attained == pytest.approx(0.6)
    assert found.attained_of_bound == pytest.approx(0.75)
    assert (found.offline_tokens_per_s, found.offline_of_bound) == (400.0, pytest.approx(0.4))
    assert found.longest_wait_s == 9.0
    assert (found.preempted_online, found.preempted_offline) == (4, 6)
    assert (found.planning_mean_ms, found.planning_p99_ms) == (1.75, 4.0)
    assert found.texts() == ["60.0", "75.0", "400*", "40.0", "9.0", "4/6", "1.75/4.00"]


def test_what_cannot_be_measured_is_left_blank() -> None:
    nothing = figures(attained=None, wait_max_s=None, offline_tokens_per_s=0.0, steps=0, plan_p99_ms=None)
    assert score([(cell(), nothing, BOUND)]).texts() == ["", "", "", "", "", "0/0", ""]
    assert score([]).texts() == ["", "", "", "", "", "0/0", ""]


def test_the_table_gives_back_what_was_put_and_knows_its_code(tmp_path: Path) -> None:
    table = GymTable(tmp_path / "table.json")
    table.put("bound", cell(), "code", BOUND)
    table.put("fcfs", cell(), "code", figures(attained=0.4))
    table.save()
    again = GymTable(tmp_path / "table.json")
    assert again.figures("fcfs", cell()) == figures(attained=0.4)
    assert again.has("fcfs", cell(), "code")
    assert not again.has("fcfs", cell(), "other code")
    assert not again.has("priority", cell(), "code")
    assert again.score("fcfs", [cell(), cell("b")]).attained_of_bound == 0.5


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"table\.json is no table of the gym"):
        GymTable(tmp_path / "table.json")
