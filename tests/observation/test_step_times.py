"""Step times from sums whose costs are known."""

import math

import numpy as np
import pytest

from neaptide.observation.record import Header, PollInterval, RecordError, ServerRecord
from neaptide.observation.step_times import COSTS, EngineLimits, _fit, _FitRow, fit_step_times

CONTEXT = 300.0
KV_TOKENS = 100_000


def interval(start_s: float, streams: int, steps: int) -> PollInterval:
    """Streams alone, none of which begins or ends."""
    step_s = 0.02 + streams * (6e-4 + 2e-6 * CONTEXT)
    rises = {
        "iteration_tokens_total_count": float(steps),
        "iteration_tokens_total_sum": float(steps * streams),
        "inter_token_latency_seconds_count": float(steps * streams),
        "inter_token_latency_seconds_sum": steps * streams * step_s,
        "generation_tokens_total": float(steps * streams),
    }
    gauges = {"num_requests_running": float(streams), "kv_cache_usage_perc": streams * CONTEXT / KV_TOKENS}
    return PollInterval(start_s, start_s + steps * step_s, rises, gauges, gauges)


def record(count: int = 60) -> ServerRecord:
    numbers = np.random.default_rng(3).integers(1, 24, size=count).tolist()
    return ServerRecord(
        Header(server="http://a", started=0.0, every_s=1.0),
        [interval(30.0 * k, n, 25) for k, n in enumerate(numbers)],
        0,
    )


def test_the_time_of_steps_of_streams_is_recovered_exactly() -> None:
    found = fit_step_times(record(), EngineLimits(2048, KV_TOKENS), num_draws=3, seed=0)
    for streams in (1, 8, 23, 100):
        fitted_s = found.costs["fixed_s"] + streams * (found.costs["stream_s"] + CONTEXT * found.costs["kv_token_s"])
        assert fitted_s == pytest.approx(0.02 + streams * (6e-4 + 2e-6 * CONTEXT), rel=1e-3)
    assert found.error < 1e-3
    assert found.most_streams == pytest.approx(21.0)  # one row in ten has 22 or 23


def test_every_interval_holds_its_value() -> None:
    found = fit_step_times(record(), EngineLimits(2048, KV_TOKENS), num_draws=4, seed=0)
    assert len(found.draws) == 4
    for name in COSTS:
        low, high = found.spread[name]
        assert 0.0 <= low <= found.costs[name] <= high


def test_a_restart_and_what_came_before_it_in_a_joined_row_are_left_out() -> None:
    whole = record()
    broken = PollInterval(0.0, 1.0, {"inter_token_latency_seconds_sum": 1e9}, {}, {}, restarted=True)
    with_restart = ServerRecord(whole.header, [broken, *whole.intervals], 0)
    shape = EngineLimits(2048, KV_TOKENS)
    assert fit_step_times(with_restart, shape, 0, 0).costs == fit_step_times(whole, shape, 0, 0).costs


def test_prompts_of_a_poll_that_counted_no_step_are_taken_as_one_step() -> None:
    whole = record()
    ended = {"request_prefill_time_seconds": 0.5, "time_to_first_token_seconds": 0.5, "request_prompt_tokens": 200.0}
    rises = {
        f"{name}_{part}": value for name, total in ended.items() for part, value in (("count", 1.0), ("sum", total))
    }
    lone = PollInterval(5000.0, 5001.0, rises | {"prompt_tokens_total": 200.0}, {}, {})
    with_lone = ServerRecord(whole.header, [*whole.intervals, lone], 0)
    assert math.isfinite(fit_step_times(with_lone, EngineLimits(2048, KV_TOKENS), 0, 0).error)


def test_too_few_steps_are_said_to_be_too_few() -> None:
    with pytest.raises(RecordError, match="too few steps"):
        fit_step_times(record(5), EngineLimits(2048, None), 0, 0)


def test_without_the_size_of_the_cache_contexts_follow_from_lengths() -> None:
    found = fit_step_times(record(), EngineLimits(2048, None), 0, 0)
    assert math.isfinite(found.error)
    assert found.costs["fixed_s"] == pytest.approx(0.02, rel=1e-2)


def rows(contexts: list[float], stream_s: float, kv_token_s: float) -> list[_FitRow]:
    """Steps of 1 to 8 streams, and of prompts whose tokens take 2 ms each."""
    found = []
    for number, context in enumerate(contexts):
        streams = float(1 + number % 8)
        seconds = 0.05 + streams * (stream_s + context * kv_token_s)
        found.append(_FitRow(float(number), (1.0, 0.0, 0.0, streams, streams * context, 0.0), seconds, streams))
        tokens = 40.0 + 10.0 * (number % 9)
        found.append(_FitRow(float(number), (0.0, 1.0, tokens, 0.0, 0.0, 0.0), 0.05 + 2e-3 * tokens))
    return found


def test_what_streams_of_equal_contexts_cost_beyond_a_prompts_token_is_partly_their_contexts() -> None:
    found = _fit(rows([200.0] * 40, stream_s=5e-3, kv_token_s=0.0))
    assert found["kv_token_s"] == pytest.approx(0.6 * 3e-3 / 200, rel=0.05)
    assert found["stream_s"] == pytest.approx(0.6 * 2e-3 + 0.4 * 5e-3, rel=0.02)
    assert found["token_s"] == pytest.approx(2e-3, rel=0.05)


def test_contexts_of_other_lengths_say_what_they_cost() -> None:
    contexts = np.random.default_rng(0).uniform(50.0, 3000.0, size=40).tolist()
    found = _fit(rows(contexts, stream_s=1e-3, kv_token_s=1e-5))
    assert found["kv_token_s"] == pytest.approx(1e-5, rel=0.02)
    assert found["stream_s"] == pytest.approx(1e-3, rel=0.05)
