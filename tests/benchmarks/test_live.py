"""The arithmetic of ``benchmarks.live_coserving``, without servers."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import same_kernels
from benchmarks.live.curve import (
    AS_SLOW,
    Curve,
    Point,
    mean_points,
    point_of,
    rival_ratios,
    slower_than_ours_ms,
    standing,
)
from benchmarks.live.engines import PolicyRival
from benchmarks.live.findings import ALONE as ALONE_RUN
from benchmarks.live.findings import BOTH, curves, from_json, jsonable, mean_of, ratios_of, share_of
from benchmarks.live.latency import percentile_of_all
from benchmarks.live.measure import environment
from benchmarks.live.picture import apart, draw_picture, edge_of, place_of_note
from benchmarks.live.plan import Case, Plan, Targets, Window
from benchmarks.live.plot import RIVAL_COLOURS, draw
from benchmarks.live.run import with_unfinished
from benchmarks.live.tables import summary
from benchmarks.live_coserving import BURSTY, experiment_of, main, parsed, plan_of
from neaptide.loadgen.client.recorder import ChatRecord

INF = math.inf


def point(tpot_ms: float, offline: float, name: str = "ours", over_alone: float | None = 1.0) -> Point:
    return Point(name, offline, tpot_ms, 2 * tpot_ms, 5 * tpot_ms, 10 * tpot_ms, 1.0, over_alone)


ALONE = point(10.0, 0.0, "online alone")
OURS = [point(20.0, 100.0), point(40.0, 300.0)]


def record(arrival_s: float, ttft_s: float | None, tpot_s: float = 0.01) -> ChatRecord:
    if ttft_s is None:
        return ChatRecord(0.0, arrival_s=arrival_s, error="unfinished")
    return ChatRecord(0.0, arrival_s=arrival_s, token_times_s=[ttft_s, ttft_s + tpot_s], num_output_tokens=2)


# ---- the curve -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency_ms", "tokens_per_s"),
    [(9.9, 0.0), (10.0, 0.0), (15.0, 50.0), (20.0, 100.0), (30.0, 200.0), (40.0, 300.0), (1e6, 300.0), (INF, 300.0)],
)
def test_the_curve_is_straight_between_points_from_online_alone_on(latency_ms: float, tokens_per_s: float) -> None:
    assert Curve.through(OURS, ALONE, "tpot_p50_ms").at(latency_ms) == pytest.approx(tokens_per_s)


def test_a_laxer_target_that_did_less_does_not_lower_the_curve() -> None:
    curve = Curve.through([*OURS, point(60.0, 250.0)], ALONE, "tpot_p50_ms")
    assert curve.at(60.0) == curve.at(50.0) == 300.0


def test_our_points_without_a_latency_are_on_no_curve() -> None:
    assert Curve.through([point(20.0, 100.0), point(INF, 900.0)], ALONE, "tpot_p50_ms").at(1e9) == 100.0


@given(st.lists(st.tuples(st.floats(10.0, 100.0), st.floats(0.0, 1e4)), min_size=1, max_size=6))
def test_the_curve_never_falls_and_stands_below_no_point_of_ours(pairs: list[tuple[float, float]]) -> None:
    ours = [point(tpot_ms, offline) for tpot_ms, offline in pairs]
    curve = Curve.through(ours, ALONE, "tpot_p50_ms")
    heights = [curve.at(float(x)) for x in range(0, 120, 3)]
    assert heights == sorted(heights)
    assert all(curve.at(p.tpot_p50_ms + 1e-9) >= p.offline_tokens_per_s - 1e-3 for p in ours if p.tpot_p50_ms > 10.0)


def test_a_rival_is_above_where_it_does_more_than_the_curve_at_its_own_latency() -> None:
    rivals = [point(30.0, 201.0, "better", None), point(30.0, 199.0, "worse", None), point(9.0, 1.0, "faster", None)]
    stands = standing(OURS, rivals, ALONE)
    assert {name: by["tpot_p50_ms"]["is_above"] for name, by in stands.items()} == {
        "better": True,
        "worse": False,
        "faster": True,
    }
    assert stands["better"]["ttft_p99_ms"] == {
        "curve_tokens_per_s": 200.0,
        "rival_tokens_per_s": 201.0,
        "is_above": True,
    }


def test_a_rival_whose_chats_never_end_is_above_only_if_it_does_more_than_our_most() -> None:
    below, above = point(INF, 300.0, "a", None), point(INF, 301.0, "b", None)
    assert [by["tpot_p50_ms"]["is_above"] for by in standing(OURS, [below, above], ALONE).values()] == [False, True]


def test_a_rival_that_answers_no_chats_is_compared_with_offline_work_alone() -> None:
    starving, slow = point(INF, 450.0, "a", None), point(50.0, 450.0, "b", None)
    stands = standing(OURS, [starving, slow], ALONE, ceiling_tokens_per_s=500.0)
    assert stands["a"]["tpot_p50_ms"] == {
        "curve_tokens_per_s": 500.0,
        "rival_tokens_per_s": 450.0,
        "is_above": False,
    }
    assert stands["b"]["tpot_p50_ms"]["is_above"]  # it answers them, so the ceiling is nothing to compare with


def test_a_rival_beyond_our_curve_sets_a_target_of_its_own() -> None:
    slow, slower, starving = (point(ms, 1.0, str(ms), None) for ms in (41.0, 60.0, INF))
    assert slower_than_ours_ms(OURS, [slow, slower, starving]) == 60.0
    assert slower_than_ours_ms([*OURS, point(60.0, 9.0)], [slow, slower, starving]) is None
    assert slower_than_ours_ms(OURS, [starving]) is None


def test_ratios_to_rivals_compare_with_those_that_are_as_good_to_chats() -> None:
    rivals = [point(15.0, 80.0, "a", None), point(20.0, 50.0, "b", None), point(30.0, 900.0, "c", None)]
    assert rival_ratios(OURS[0], rivals) == {"ttft_p99_vs_rival": round(200 / 150, 4), "offline_vs_rival": 1.25}


def test_without_a_rival_as_good_there_is_no_ratio() -> None:
    assert rival_ratios(OURS[0], []) == {"ttft_p99_vs_rival": None, "offline_vs_rival": None}
    hopeless = rival_ratios(OURS[0], [point(INF, 900.0, "c", None)])
    assert hopeless == {"ttft_p99_vs_rival": None, "offline_vs_rival": None}


# ---- points ----------------------------------------------------------------------------------------------


def test_requests_that_never_ended_are_worse_than_all_others() -> None:
    assert percentile_of_all([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile_of_all([1.0, 2.0, INF], 0.5) == 2.0
    assert percentile_of_all([1.0, 2.0, 3.0, 5.0], 0.5) == 2.5
    assert percentile_of_all([1.0, INF, INF], 0.5) == INF
    assert percentile_of_all([3.0, 1.0, INF], 0.25) == 2.0
    assert math.isnan(percentile_of_all([], 0.5))


def test_a_point_counts_what_failed_as_the_slowest() -> None:
    window = Window(offline_tokens_per_s=7.0, records=[record(0.0, 0.1), record(1.0, 0.3), record(2.0, None)])
    found = point_of("a", window, Targets(0.2, 0.05))
    assert (found.ttft_p50_ms, found.tpot_p50_ms) == (pytest.approx(300.0), pytest.approx(10.0))
    assert (found.ttft_p99_ms, found.attainment, found.is_rival) == (INF, pytest.approx(1 / 3), True)


def test_our_own_bar_counts_chats_that_got_no_answer() -> None:
    """As a rival's point does. Every chat that was answered took a tenth of a second to its first token."""
    targets = Targets(0.2, 0.05)
    alone, hung = [record(float(k), 0.1) for k in range(200)], [record(200.0 + k, None) for k in range(9)]
    for records, ratio in (([*alone, hung[0]], 1.0), ([*alone, *hung], None)):
        windows = {ALONE_RUN: Window(records=alone), BOTH: Window(records=records)}
        assert ratios_of(windows, targets)["ttft_p99_vs_alone"] == ratio
        windows = {same_kernels.ALONE: Window(records=alone), same_kernels.OURS: Window(records=records)}
        assert same_kernels.bars(windows, [], targets)["ttft_p99_vs_alone"] == ratio


def test_a_run_is_shown_with_the_chats_that_got_no_answer() -> None:
    answered, hung = record(0.0, 0.1), record(1.0, None)
    shown = [summary("", Window(records=records), 1.0, 1.0)["ttft_ms"] for records in ([answered] * 20, [hung], [])]
    assert shown == [[100.0, 100.0, 100.0], None, None]
    rare = summary("both", Window(records=[answered] * 60 + [hung]), 1.0, 1.0)
    assert rare["ttft_ms"] == [100.0, 100.0, None]


def test_an_arrival_without_a_record_has_failed() -> None:
    found = with_unfinished([record(1.0, 0.1)], [1.0, 2.5])
    assert [(r.arrival_s, r.error) for r in found] == [(1.0, None), (2.5, "unfinished")]


def test_repeats_of_a_configuration_are_averaged() -> None:
    (mean,) = mean_points([[point(10.0, 100.0)], [point(30.0, 200.0)]])
    assert (mean.tpot_p50_ms, mean.offline_tokens_per_s, mean.over_alone) == (20.0, 150.0, 1.0)


def test_infinity_is_null_in_json() -> None:
    text = json.dumps(jsonable({"points": [point(INF, 1.0)]}), allow_nan=False)
    assert json.loads(text)["points"][0]["tpot_p99_ms"] is None


# ---- shares, loads, forms --------------------------------------------------------------------------------


def test_a_share_is_of_what_the_ceiling_leaves_beside_online_work() -> None:
    assert share_of(1000.0, Window(online_tokens_per_s=200.0, offline_tokens_per_s=600.0)) == 0.75
    assert share_of(100.0, Window(online_tokens_per_s=200.0, offline_tokens_per_s=600.0)) is None


def test_a_mean_of_something_unknown_is_unknown() -> None:
    assert mean_of([0.5, 1.0]) == 0.75
    assert mean_of([0.5, None]) is None


def test_bursts_have_the_mean_rate_and_pauses() -> None:
    plan = Plan(3000.0, (0.0, 3000.0), Path(), 0, rate_rps=1.0, shape="on-off")
    arrivals = plan.arrivals_s()
    assert len(arrivals) == pytest.approx(3000, rel=0.1)
    assert all(at_s % 30.0 < 10.0 for at_s in arrivals)


def test_a_rival_names_its_policy_and_limits() -> None:
    assert PolicyRival.parse("priority").flags == ("--policy", "priority")
    flags = ("--policy", "priority", "--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    assert PolicyRival.parse("priority@256/16").flags == flags
    assert PolicyRival.parse("priority@256/16+host-cache-gib=1").flags == (*flags, "--host-cache-gib", "1")


@pytest.mark.parametrize("text", ["nobody", "priority@x", "priority/0", "", "priority+x", "priority+x="])
def test_a_rival_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rival '{text}'")):
        PolicyRival.parse(text)


def test_the_quick_form_measures_the_headline_alone() -> None:
    args = parsed(["--quick"])
    experiment = experiment_of(args)
    assert (experiment.cases, experiment.repeats, experiment.has_curve) == ((Case(0.2),), 1, False)
    plan = plan_of(args, Path())
    assert (plan.duration_s, plan.window_s) == (60.0, (10.0, 55.0))


def test_the_medium_form_has_a_curve_and_two_rivals() -> None:
    experiment = experiment_of(parsed(["--medium"]))
    assert (experiment.cases, experiment.repeats, experiment.over_alone) == ((Case(0.2),), 1, (1.2, 2.4, 4.8))
    assert [rival.name for rival in experiment.engines[0].rivals] == ["priority", "fcfs"]


def test_the_whole_form_has_every_load_and_target() -> None:
    experiment = experiment_of(parsed([]))
    assert experiment.cases == (Case(0.2), Case(0.1), Case(0.4), BURSTY)
    assert (experiment.repeats, experiment.over_alone) == (2, (1.2, 1.8, 2.4, 3.6, 4.8))


def test_another_length_keeps_the_parts_of_the_window() -> None:
    plan = plan_of(parsed(["--medium", "--duration-s", "15"]), Path())
    assert (plan.duration_s, plan.window_s) == (15.0, (2.0, 14.5))


def test_a_plot_of_no_known_format_is_refused_before_the_hours(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parsed(["--plot", str(tmp_path / "live.txt")])


def test_an_engines_environment_ends_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVE_A", "before")
    monkeypatch.delenv("LIVE_B", raising=False)
    with environment({"LIVE_A": "in", "LIVE_B": "in"}):
        assert (os.environ["LIVE_A"], os.environ["LIVE_B"]) == ("in", "in")
    assert os.environ["LIVE_A"] == "before"
    assert "LIVE_B" not in os.environ


# ---- the picture -----------------------------------------------------------------------------------------


def case_result(load: float, offline: float) -> dict[str, object]:
    runs = [
        {"run": "offline, capped", "offline_tokens_per_s": 400.0},
        {"run": "offline", "offline_tokens_per_s": 500.0},
    ]
    rival, lost = point(30.0, 50.0, "priority", None), point(INF, 200.0, "fcfs", None)
    ours = [replace(p, name=f"target {p.tpot_p50_ms}", offline_tokens_per_s=offline) for p in OURS]
    points = [*ours, rival, lost]
    return {
        "engine": "neaptide", "load": load, "arrivals": "poisson", "points": points, "alone": ALONE, "runs": runs,
    }  # fmt: skip


def test_curves_are_of_every_load_over_its_repeats() -> None:
    found = curves([case_result(0.2, 100.0), case_result(0.2, 300.0), case_result(0.1, 50.0)])
    assert [(c["name"], c["points"][0].offline_tokens_per_s) for c in found] == [("0.20", 200.0), ("0.10", 50.0)]
    assert found[0]["rivals"]["priority"]["tpot_p50_ms"]["is_above"] is False
    assert found[0]["capped_tokens_per_s"] == 400.0


def test_every_point_is_in_the_picture(tmp_path: Path) -> None:
    draw(curves([case_result(0.2, 100.0), case_result(0.1, 50.0)]), tmp_path / "live.svg")
    text = (tmp_path / "live.svg").read_text()
    for label in ("priority", "fcfs", "load 0.20", "load 0.10", "TPOT p50, ms", "TTFT p99, ms"):
        assert f"<!-- {label}" in text or label in text


def test_rivals_of_two_engines_have_colours_of_their_own(tmp_path: Path) -> None:
    other = case_result(0.2, 100.0) | {"engine": "neaptide over vLLM"}
    other["points"] = [*OURS, point(30.0, 50.0, "vllm priority", None)]
    draw(curves([case_result(0.2, 100.0), other]), tmp_path / "live.svg")
    text = (tmp_path / "live.svg").read_text()
    assert all(colour in text for colour in RIVAL_COLOURS[:3])
    assert RIVAL_COLOURS[3] not in text


def test_the_picture_has_the_headlines_load_and_names_every_point(tmp_path: Path) -> None:
    draw_picture(curves([case_result(0.2, 100.0), case_result(0.1, 50.0)]), tmp_path / "small.svg")
    text = (tmp_path / "small.svg").read_text()
    for label in ("priority", "fcfs", "chats at 20% load", "chat alone", "batch alone", "never ends"):
        assert f"<!-- {label}" in text or label in text
    assert "chats at 10% load" not in text


def test_the_name_of_a_point_at_the_foot_does_not_lie_on_the_axis() -> None:
    assert [place_of_note(height)[1] > 0 for height in (0.02, 0.07, 0.5, 1.0)] == [True, True, False, False]


def test_names_of_rivals_at_the_edge_keep_apart_and_in_order() -> None:
    assert apart([900.0, 870.0], 80.0) == pytest.approx([925.0, 845.0])
    assert apart([100.0, 500.0, 900.0], 80.0) == [100.0, 500.0, 900.0]
    assert apart([], 80.0) == []


def test_a_rival_far_behind_stands_at_the_edge_with_its_figure() -> None:
    alone, ours = ALONE, [point(20.0, 100.0), point(40.0, 300.0)]
    near, far = point(100.0, 50.0, "near", None), point(101.0, 50.0, "far", None)
    edges = [
        edge_of({"alone": alone, "points": [*ours, rival]}, "tpot_p50_ms")
        for rival in (near, far, point(INF, 50.0, "never", None))
    ]
    assert edges == [pytest.approx(108.0), 100.0, 100.0]


def test_our_point_at_a_rivals_pace_does_not_stretch_the_axis(tmp_path: Path) -> None:
    rival = point(300.0, 50.0, "priority", None)
    curve = case_result(0.2, 100.0) | {"points": [*OURS, point(299.0, 400.0, AS_SLOW, 29.9), rival]}
    assert edge_of(curve, "tpot_p50_ms") == 100.0
    draw_picture(curves([curve]), tmp_path / "small.svg")
    text = (tmp_path / "small.svg").read_text()
    assert all(f"<!-- {ms} ms" in text for ms in (299, 300))


def test_a_stored_line_is_drawn_again(tmp_path: Path) -> None:
    figures = {"curves": curves([case_result(0.2, 100.0)])}
    stored = tmp_path / "live.json"
    stored.write_text(json.dumps(jsonable(figures)))
    assert from_json(json.loads(stored.read_text())) == figures
    flags = ["--from", str(stored), "--plot", str(tmp_path / "a.svg"), "--picture", str(tmp_path / "b.svg")]
    assert main(flags) == 0
    assert all("priority" in (tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
