"""The reductions of a simulation's measures, on runs of two requests or two steps made by hand."""

import math

import pytest

from neaptide.engine.messages import StepOutputs, StepStats
from neaptide.executors.simulated.trace_executor import StepTally
from neaptide.simulation.measures import Measures, OnlineRecord
from neaptide.simulation.result import kv_result, offline_result, online_result, prediction_result, preemption_result

WINDOW_S = (0.0, 10.0)
SLOS_S = (1.0, 0.05)


def add_step(measures: Measures, tally: StepTally | None = None, swapped_blocks: int = 0, **fields: float) -> None:
    values = dict.fromkeys(StepStats.__struct_fields__, 0) | fields
    measures.step(StepOutputs([], [StepStats(**values)]), tally or StepTally(), swapped_blocks, 0.0)


def answered(arrival_s: float, ttft_s: float, tpot_s: float, tokens: int = 11) -> OnlineRecord:
    first_s = arrival_s + ttft_s
    last_s = first_s + (tokens - 1) * tpot_s
    lag_s = max(ttft_s, last_s - arrival_s - (tokens - 1) * SLOS_S[1])
    return OnlineRecord(arrival_s, first_s, last_s, tokens, is_done=True, lag_s=lag_s)


def test_goodput_counts_requests_that_meet_both_targets() -> None:
    measures = Measures()
    measures.online = {
        "both": answered(1.0, 0.5, 0.01),
        "ttft only": answered(2.0, 0.5, 0.09),
        "tpot only": answered(3.0, 2.0, 0.01),
        "after the window": answered(11.0, 0.5, 0.01),
    }
    result = online_result(measures, WINDOW_S, 20.0, SLOS_S)
    assert result.requests == 3
    assert result.attainment == {"ttft": 2 / 3, "tpot": 2 / 3, "both": 1 / 3, "both_from_arrival": 2 / 3}
    assert result.goodput_rps == 1 / 10


def test_a_request_without_an_end_meets_nothing_and_has_waited_until_the_end() -> None:
    measures = Measures()
    measures.online = {"waits": OnlineRecord(4.0)}
    result = online_result(measures, WINDOW_S, 20.0, (100.0, 100.0))
    assert result.attainment == {"ttft": 0.0, "tpot": 0.0, "both": 0.0, "both_from_arrival": 0.0}
    assert result.ttft_s["p50"] == 16.0
    assert result.normalized_latency_s is None


def test_a_request_that_began_in_time_and_has_no_end_meets_nothing() -> None:
    measures = Measures()
    measures.online = {"cut": OnlineRecord(1.0, 1.5, 1.6, 2)}
    result = online_result(measures, WINDOW_S, 20.0, (1.0, 1.0))
    assert result.attainment == {"ttft": 0.0, "tpot": 0.0, "both": 0.0, "both_from_arrival": 0.0}


def test_offline_tokens_are_prompt_tokens_cached_or_computed_and_outputs() -> None:
    measures = Measures()
    tally = StepTally(offline_prompt_tokens=100, offline_output_tokens=20, offline_prefill_tokens=40)
    add_step(measures, tally, now_s=5.0, duration_s=1.0, offline_prefill_tokens=40, offline_decode_tokens=19)
    add_step(measures, tally, now_s=11.0, duration_s=1.0, offline_prefill_tokens=40)
    result = offline_result(measures, WINDOW_S, None, None, 0, {})
    assert result.tokens_per_s == 12.0
    assert result.output_tokens_per_s == 2.0
    assert result.computed_tokens_per_s == 5.9


def test_offline_requests_count_where_they_end() -> None:
    measures = Measures()
    for end_s in (0.0, 0.1, 10.0, 10.1):
        measures.offline_ended(end_s)
    assert offline_result(measures, WINDOW_S, None, None, 0, {}).requests_completed == 2


def test_coverage_is_of_prediction_plus_margin() -> None:
    measures = Measures()
    add_step(measures, now_s=1.0, duration_s=1.0, predicted_s=0.95, margin_s=0.1)
    add_step(measures, now_s=2.0, duration_s=2.0, predicted_s=1.5, margin_s=0.1)
    result = prediction_result(measures, WINDOW_S)
    assert result["coverage"] == 0.5
    assert result["mape"] == pytest.approx((0.05 + 0.25) / 2)


def test_what_the_cache_saved_is_told_by_tokens_of_the_window() -> None:
    measures = Measures()
    tally = StepTally(offline_prompt_tokens=100, offline_prefill_tokens=40)
    add_step(
        measures,
        tally,
        now_s=1.0,
        duration_s=1.0,
        cached_tokens=70,
        online_cached_tokens=10,
        admitted_prompt_tokens=150,
        online_admitted_prompt_tokens=50,
        blocks_free=6,
        blocks_online=2,
    )
    add_step(measures, now_s=2.0, duration_s=3.0, blocks_offline=8)
    result = kv_result(measures, WINDOW_S, None)
    assert result.hit_ratio == 0.6
    assert result.online_hit_ratio == 0.2
    assert result.saving_ratio == 0.6
    assert result.occupancy_by_class == {"online": 2 / 32, "offline": 24 / 32, "cached": 0.0, "free": 6 / 32}
    nothing = kv_result(measures, (math.inf, math.inf), None)
    assert nothing.hit_ratio is None
    assert nothing.online_hit_ratio is None


def test_preemptions_are_counted_by_class() -> None:
    measures = Measures()
    add_step(measures, swapped_blocks=3, now_s=1.0, duration_s=1.0, preempted_online=2, preempted_offline=3)
    add_step(measures, swapped_blocks=2, now_s=50.0, duration_s=1.0, preempted_offline=4)
    result = preemption_result(measures)
    assert result.count_by_class == {"online": 2, "offline": 7}
    assert result.count_by_kind == {"recompute": 9}
    assert result.swapped_blocks == 5
