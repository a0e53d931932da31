"""Sizes worked out by hand: see the scenes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from neaptide.cluster.capacity import planner
from neaptide.cluster.capacity.measure import MeasuredSize, Size
from neaptide.cluster.capacity.planner import plan, within_context
from neaptide.cluster.capacity.stretch import Stretch, samples
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress
from tests.cluster.capacity.scenes import NUM_REQUESTS, every_so_often, one_slot, question
from tests.simulation.scenes import constant, offline, online, profile

ALL = {"ttft": 1.0, "tpot": 1.0, "both": 1.0}


# ---- replicas ----


def test_two_replicas_are_needed_where_requests_come_twice_as_fast_as_one_serves() -> None:
    found = plan(question())
    assert found.answer is not None
    assert (found.answer.replicas, found.answer.holds, found.answer.attainment) == (2, True, ALL)
    assert found.one_smaller is not None
    assert (found.one_smaller.replicas, found.one_smaller.holds) == (1, False)
    # Only the first finds the seat free: request k waits k x 0.2 s.
    assert found.one_smaller.attainment == {"ttft": 1 / NUM_REQUESTS, "tpot": 1.0, "both": 1 / NUM_REQUESTS}


def test_one_replica_is_enough_where_no_more_is_asked_for_and_nothing_is_smaller() -> None:
    found = plan(question(attainment=1 / NUM_REQUESTS))
    assert found.answer is not None
    assert found.answer.replicas == 1
    assert found.one_smaller is None


def test_more_than_may_be_tried_is_no_answer() -> None:
    found = plan(question(max_replicas=1, offline=[offline((0, 4, 4))]))
    assert found.answer is None
    assert found.one_smaller is None
    assert [point.replicas for point in found.tried] == [1]
    assert found.offline is None
    assert found.cost is None


def test_replicas_stand_behind_a_router_that_knows_which_is_free() -> None:
    """Every second request takes 0.8 s, the others 0.1: work for 1.8 replicas. By turns the first of two would get all
    the long ones, one every 0.5 s, and serve the first of them in time."""
    trace = [replace(r, output_tokens=1 if k % 2 else 8) for k, r in enumerate(every_so_often())]
    found = plan(question(trace=trace, max_replicas=2))
    by_turns = (1 + NUM_REQUESTS // 2) / NUM_REQUESTS
    assert found.tried[-1].attainment["both"] > by_turns


def test_a_size_above_the_answer_is_tried_and_may_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(
        base: Scenario, stretch: Stretch, size: Size, offline: Sequence[OfflineSet] = (), on_progress: object = None
    ) -> MeasuredSize:
        return MeasuredSize(dict.fromkeys(ALL, held[size.replicas]), 0, 0.0, True)

    monkeypatch.setattr(planner, "measure", measure)
    held = {1: 0.2, 2: 0.95, 3: 0.95}
    found = plan(question())
    assert [point.replicas for point in found.tried] == [1, 2, 3]
    assert found.is_monotone
    held[3] = 0.8
    found = plan(question())
    assert found.answer is not None
    assert found.answer.replicas == 2
    assert not found.is_monotone


# ---- the peak ----


def test_a_size_must_hold_in_the_peak_only_and_what_is_around_it_is_load() -> None:
    """A request every 0.5 s, and eight from 6.0 to 8.1. The one at 5.4 is done by then."""
    calm_s = [*(0.5 * k - 0.1 for k in range(1, 12)), *(8.5 + 0.5 * k for k in range(12))]
    trace = online(*((each_s, 4, 5) for each_s in sorted(calm_s + [6.0 + 0.3 * k for k in range(8)])))
    found = plan(question(trace=trace, peak_s=2.11))
    assert (found.peak.start_s, found.peak.end_s, found.peak.requests) == (6.0, pytest.approx(8.1), 8)
    assert found.one_smaller is not None
    assert found.one_smaller.attainment["both"] == 1 / 8


def test_the_margin_before_the_peak_leaves_an_engine_that_is_busy() -> None:
    """The long request at 0 holds the seat until 2.0; the peak, of eight longer prompts, begins at 1.0."""
    trace = online((0.0, 4, 20), *((1.0 + 0.5 * k, 40, 5) for k in range(8)))
    idle, busy = (plan(question(trace=trace, peak_s=3.5, margin_s=margin_s)).tried[0] for margin_s in (0.5, 1.0))
    assert (idle.replicas, idle.attainment["both"]) == (1, 1.0)
    assert (busy.replicas, busy.attainment["both"]) == (1, 0.0)


def test_the_peak_is_the_work_of_the_device_and_not_a_count() -> None:
    trace = online(*((0.1 * k, 4, 1) for k in range(9)), (50.0, 200, 1))
    assert plan(question(trace=trace, base=one_slot(profile=profile(256)), peak_s=5.0)).peak.start_s == 50.0


# ---- memory ----


def test_the_smallest_memory_is_the_one_that_holds_every_request_whole() -> None:
    """Four prompts of 39 tokens with an answer of one need ten blocks of 4, a fifth needs three. The steps are single
    blocks here, for the profile has 16."""
    base = constant(profile=profile(16), policy="fcfs", ttft_slo_s=0.15)
    trace = online(*((k, 39, 1) for k in range(4)), (4.0, 8, 1))
    found = plan(question(base=base, trace=trace, find="kv"))
    assert found.answer is not None
    assert (found.answer.kv_blocks, found.answer.attainment) == (10, ALL)
    assert found.answer.kv_gib == 10 * 4 / (1 << 30)
    assert found.one_smaller is not None
    assert (found.one_smaller.kv_blocks, found.one_smaller.too_large) == (9, 4)
    assert found.one_smaller.attainment == dict.fromkeys(ALL, 0.2)


def test_memory_is_looked_for_on_a_given_number_of_replicas() -> None:
    assert plan(question(find="kv")).answer is None
    found = plan(question(find="kv", replicas=2))
    assert found.answer is not None
    assert found.answer.replicas == 2


# ---- offline work ----


def test_offline_work_is_measured_beside_the_answer_on_all_its_replicas() -> None:
    """Two seats a replica, so that the online work leaves one at least; a row takes it for four steps of 0.1 s."""
    base = one_slot()
    found = plan(question(base=replace(base, max_num_seqs=2), offline=[offline(*[(0, 4, 4)] * 6)], attainment=1.0))
    assert found.answer is not None
    assert found.answer.beside is not None
    assert found.offline is not None
    rate = found.answer.beside.tokens_per_s
    assert found.offline.whole == found.answer.beside, "the peak is the whole trace here"
    assert (found.offline.rows, found.offline.tokens) == (6, 6 * 8)
    assert found.offline.tokens_per_day == pytest.approx(86_400 * rate)
    assert found.offline.finish_s == pytest.approx((48 / rate, 48 / rate))
    # A seat gives 8 tokens in 0.4 s: between one and both of two seats.
    assert 20.0 <= rate / found.answer.replicas <= 40.0


def test_the_interval_lies_between_the_rates_beside_the_whole_trace_and_beside_the_peak() -> None:
    """Three seats, of which the peak's requests hold two for most of it; then a late one leaves all of them."""
    trace = [*every_so_often(8), *online((10.0, 4, 1))]
    base = constant(max_num_seqs=3, policy="priority")
    found = plan(question(base=base, trace=trace, peak_s=2.25, offline=[offline(*[(0, 4, 4)] * 60)]))
    assert found.answer is not None
    assert found.answer.beside is not None
    assert found.offline is not None
    slow, fast = found.answer.beside.tokens_per_s, found.offline.whole.tokens_per_s
    assert 0 < slow < fast
    assert found.offline.finish_s == pytest.approx((480 / fast, 480 / slow))
    assert (found.offline.whole.start_s, found.offline.whole.end_s) == (1.0, 10.0)


def test_of_a_trace_of_more_than_four_peaks_four_samples_are_simulated_with_offline_work() -> None:
    simulated: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        simulated.append(name)
        yield

    trace = online(*((float(second), 4, 1) for second in range(100)))
    found = plan(question(trace=trace, peak_s=2.0, offline=[offline(*[(0, 4, 4)] * 6)]), watch)
    assert found.offline is not None
    whole = found.offline.whole
    assert [name.partition(": ")[2] for name in simulated if "whole" in name] == [
        f"sample {k} of 4 of the whole trace, with offline work" for k in range(1, 5)
    ]
    assert (whole.samples, whole.start_s, whole.end_s) == (4, 0.0, 99.0)
    assert whole.valid
    at_peak = found.answer.beside if found.answer else None
    assert at_peak is not None
    assert whole.tokens_per_s == pytest.approx(at_peak.tokens_per_s, rel=0.35), "the load is the same everywhere"


def test_samples_begin_at_arrivals_and_span_the_trace() -> None:
    trace = online(*((time_s, 4, 1) for time_s in (0.0, 1.0, 5.0, 40.0, 41.0, 60.0, 90.0, 99.0, 100.0)))
    parts = samples(trace, 10.0, 4, 2.0)
    assert [part.start_s for part in parts] == [0.0, 5.0, 60.0, 90.0]
    assert [part.num_inside for part in parts] == [3, 1, 1, 3]
    assert [part.window_s for part in parts] == [(2.0, 12.0)] * 4


def test_beside_what_is_simulated_once_the_answer_and_for_a_plot_every_size() -> None:
    sets = [offline(*[(0, 4, 4)] * 6)]
    found = plan(question(offline=sets, max_replicas=3))
    assert [point.beside is not None for point in found.tried] == [False, True, False]
    found = plan(question(offline=sets, max_replicas=3, offline_at_every_size=True))
    assert [point.beside is not None for point in found.tried] == [True, True, True]


def test_a_pool_that_runs_dry_makes_the_rate_invalid() -> None:
    base = one_slot(refill=False)
    found = plan(question(base=replace(base, max_num_seqs=2), offline=[offline((0, 4, 4))]))
    assert found.offline is not None
    assert not found.offline.whole.valid


def test_a_peak_without_length_has_no_offline_rate() -> None:
    trace = online((0.0, 4, 1), (9.0, 4, 1))
    with pytest.raises(ValueError, match="use a longer peak"):
        plan(question(trace=trace, peak_s=1.0, offline=[offline((0, 4, 4))]))


# ---- the rest ----


def test_what_the_model_cannot_serve_is_left_out_and_cut_before() -> None:
    trace = online((0.0, 99, 1), (1.0, 98, 9), (2.0, 50, 60), (3.0, 4, 9), (4.0, 100, 1))
    kept = within_context(trace, constant(max_model_len=100))
    assert [(r.input_tokens, r.output_tokens) for r in kept.requests] == [(99, 1), (98, 2), (50, 50), (4, 9)]
    assert (kept.num_left_out, kept.num_cut) == (1, 2)
    asked = within_context(trace, constant(max_model_len=100, max_output_tokens=8))
    assert [r.output_tokens for r in asked.requests] == [1, 2, 8, 8]


def test_every_simulation_is_told_and_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    seen: list[tuple[float, float]] = []

    def watch(name: str) -> nullcontext[OnProgress]:
        names.append(name)
        return nullcontext(lambda done, total: seen.append((done, total)))

    monkeypatch.setattr("neaptide.simulation.simulator.PROGRESS_STEPS", 10)
    monkeypatch.setattr("neaptide.cluster.simulation.cluster.PROGRESS_TURNS", 10)
    plan(question(offline=[offline(*[(0, 4, 4)] * 6)], max_replicas=2), watch)
    assert names == [
        "scene, 1 replica: the peak",
        "scene, 2 replicas: the peak",
        "scene, 2 replicas: the peak, with offline work",
        "scene, 1 replica: offline work alone",
    ]
    assert len(seen) > 10
    assert all(0.0 < done <= total for done, total in seen)


def test_the_cost_is_devices_or_money() -> None:
    found = plan(question())
    assert found.cost == 2
    found = plan(question(price_per_hour=1.5))
    assert found.cost == 3.0
