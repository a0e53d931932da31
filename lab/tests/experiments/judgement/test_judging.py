"""Tables, best caps and verdicts from figures made by hand."""

import pytest

from lab.tests.experiments.judgement.runs_by_hand import cell, figures
from neaptide_lab.experiments.judgement.caps import best_caps
from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.compare import Pair, Summary
from neaptide_lab.experiments.judgement.runs import Failed
from neaptide_lab.experiments.judgement.table import cells_table, named_lines, summary_table
from neaptide_lab.experiments.judgement.verdicts import Judged, verdicts
from neaptide_lab.experiments.judgement.worker import Figures

BEFORE = "before:neaptide"


def judged(cells: list[Cell], figures_by_title: dict[str, Figures], caps: dict[str, str] | None = None) -> Judged:
    """Every cell has the same figures."""
    found = {(one.name, title): of for one in cells for title, of in figures_by_title.items()}
    return Judged(cells, found, BEFORE, caps or {})


def failing(one: Judged) -> list[str]:
    return [verdict.claim for verdict in verdicts(one) if not verdict.holds]


def test_a_line_says_what_a_cell_gave_under_a_policy() -> None:
    lines = cells_table([cell()], {"a": {"neaptide": figures(), "bros": Failed("no progress")}}).splitlines()
    assert " ".join(lines[1].split()) == "a neaptide 100 90.0 95.0 92.0 1,000 100/900 50.0 70/120 50.0 2.0 10.0"
    assert lines[2].split(maxsplit=1) == ["bros", "FAILED: no progress"]


def test_a_pool_that_ran_out_is_marked() -> None:
    assert "1,000 dry" in cells_table([cell()], {"a": {"neaptide": figures(valid=False)}})


def test_a_summary_says_mean_interval_requests_offline_work_and_the_verdict() -> None:
    equal, worse = Pair("a", figures(), figures()), Pair("b", figures(attained=0.85), figures())
    lines = summary_table({"x": Summary((equal,)), "y": Summary((equal, worse))}).splitlines()
    assert " ".join(lines[1].split()) == "x 1 100 90.0 90.0 +0.00 [+0.00, +0.00] +0 1.000 +0.0 holds"
    assert lines[2].split()[-1] == "BELOW"
    assert named_lines(Summary((equal, worse))) == ["b: -5.0 points (-5 of 100; longest +0.0), offline 1.000"]


def test_the_best_cap_attains_most_and_then_does_most_offline_work() -> None:
    cells = [cell(name, "constant", case="code") for name in "ab"]
    caps = {"neaptide@512": (0.9, 800.0), "neaptide@1024": (0.9, 900.0), "neaptide@2048": (0.8, 2000.0)}
    found = {
        (one.name, title): figures(attained=attained, offline_tokens_per_s=offline)
        for one in cells
        for title, (attained, offline) in caps.items()
    }
    assert best_caps(cells, found, list(caps)) == {("code", cells[0].profile): "neaptide@1024"}
    del found["a", "neaptide@512"], found["b", "neaptide@2048"]
    assert best_caps(cells, found, list(caps)) == {}


def test_a_constant_that_attains_more_fails_its_trace_and_the_mean() -> None:
    cells = [cell("a", "constant")]
    runs = {"neaptide": figures(), "neaptide@512": figures(attained=0.92)}
    assert len(failing(judged(cells, runs, {"a": "neaptide@512"}))) == 2
    assert failing(judged(cells, {"neaptide": figures(), "neaptide@512": figures()}, {"a": "neaptide@512"})) == []


def test_half_a_point_below_before_is_allowed_and_more_is_not() -> None:
    cells = [cell("a", "overload", case="2000/150 alone")]
    for lost, count in ((0.005, 0), (0.006, 1)):
        runs = {"neaptide": figures(attained=0.9 - lost), BEFORE: figures()}
        assert len(failing(judged(cells, runs))) == count


def test_bros_needs_its_cut_its_work_and_its_gaps() -> None:
    cells = [cell("a", "bros")]
    rivals = {"before:fcfs-v0": figures(latency_s=0.3), "before:fcfs": figures(work=0.82), BEFORE: figures()}
    assert failing(judged(cells, {"neaptide": figures(), **rivals})) == []
    worse = figures(latency_s=0.1, work=0.7, gap_p99_s=0.08)
    assert len(failing(judged(cells, {"neaptide": worse, **rivals}))) == 3


def test_echo_is_matched_in_file_order_and_planned_near_alone() -> None:
    cells = [cell("echo alone", "echo"), cell("echo b", "echo", offline="loogle-qa-short")]
    runs = {
        "neaptide": figures(),
        "neaptide+plan": figures(attained=0.88),
        "echo": figures(offline_tokens_per_s=1001.0),
    }
    assert len(failing(judged(cells, runs))) == 3


def test_long_contexts_lose_a_point_at_most_and_keep_their_hits() -> None:
    alone, beside = cell("a", "long", case="x"), cell("b", "long", case="x", offline="sharegpt_lengths")
    found = {("a", "neaptide"): figures(), ("b", "neaptide"): figures(attained=0.888, online_hits=0.079)}
    assert len(failing(Judged([alone, beside], found))) == 2


@pytest.mark.parametrize(("attained", "num_failing"), [(0.89, 1), (0.88, 0)])
def test_a_rival_counts_where_it_attains_as_much_less_a_point(attained: float, num_failing: int) -> None:
    runs = {"neaptide": figures(), "priority@512x128": figures(attained=attained, offline_tokens_per_s=1010.0)}
    assert len(failing(judged([cell("a", "rivals")], runs))) == num_failing


def test_with_a_wrong_model_a_point_may_be_lost() -> None:
    cells = [cell("a", "wrong")]
    assert failing(judged(cells, {"neaptide": figures(attained=0.89), BEFORE: figures()})) == []
    assert len(failing(judged(cells, {"neaptide": figures(attained=0.88), BEFORE: figures()}))) == 1
