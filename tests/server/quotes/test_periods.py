"""The traffic record in periods of ten minutes."""

import pytest

from neaptide.engine.messages import StepStats
from neaptide.server.quotes.periods import (
    MAX_KEYS,
    OTHER,
    PERIOD_S,
    Period,
    PeriodRecorder,
    length_bucket,
    length_quantile,
    length_sums,
    period_decoder,
    period_encoder,
)
from tests.server.fake_engine import some_stats

START_S = 1_800_000_000 // PERIOD_S * PERIOD_S


def recorder() -> PeriodRecorder:
    found = PeriodRecorder(block_size=16)
    found.tick(START_S, is_up=True, is_paused=False)
    return found


def step(now_s: float, **changes: float) -> StepStats:
    return some_stats(now_s=now_s, **changes)


def current(of: PeriodRecorder) -> Period:
    assert of.current is not None
    return of.current


def test_observed_and_paused_time_is_counted_and_gaps_are_not() -> None:
    record = recorder()
    record.tick(START_S + 1.0, is_up=True, is_paused=False)
    record.tick(START_S + 2.0, is_up=True, is_paused=True)
    record.tick(START_S + 3.0, is_up=False, is_paused=False)
    record.tick(START_S + 300.0, is_up=True, is_paused=False)  # the machine slept
    record.tick(START_S + 299.0, is_up=True, is_paused=False)  # the clock was set back
    assert (current(record).seconds, current(record).paused_s) == (2.0, 1.0)


def test_a_period_is_handed_out_when_the_next_begins() -> None:
    record = recorder()
    assert record.tick(START_S + PERIOD_S - 1, is_up=True, is_paused=False) is None
    ended = record.tick(START_S + PERIOD_S, is_up=True, is_paused=False)
    assert ended is not None
    assert (ended.start_s, current(record).start_s) == (START_S, START_S + PERIOD_S)


def test_only_time_in_which_lines_waited_is_saturated() -> None:
    record = recorder()
    record.on_step(step(10.0, offline_prefill_tokens=7, waiting_offline=0))
    record.on_step(step(10.5, online_decode_tokens=2, waiting_offline=3))
    record.on_step(
        step(11.0, offline_prefill_tokens=100, offline_decode_tokens=8, running_offline=8, waiting_offline=2)
    )
    record.on_step(step(11.5, online_decode_tokens=3, online_prefill_tokens=5, waiting_offline=0, blocks_offline=2))
    record.on_step(step(12.0, offline_decode_tokens=8, waiting_offline=0))
    part = current(record).saturated
    assert (part.seconds, part.steps, part.prefill_tokens, part.decode_tokens) == (1.0, 2, 100, 8)
    assert (part.online_tokens, part.online_kv_tokens, part.row_steps, part.kv_tokens) == (8, 4 * 16, 8, 2 * 16)
    whole = current(record)
    assert (whole.steps, whole.online_tokens, whole.online_kv_tokens, whole.offline_tokens) == (5, 10, 8 * 16, 123)


def test_requests_are_counted_by_tier_key_and_length() -> None:
    record = recorder()
    for number in range(MAX_KEYS + 5):
        record.on_request("default", f"key{number}", 1000, 10)
    record.on_request("priority", None, 5, 0)
    whole = current(record)
    assert whole.requests == {"default": MAX_KEYS + 5, "priority": 1}
    assert (len(whole.keys), whole.keys[OTHER]) == (MAX_KEYS + 1, 5)
    assert length_quantile(whole.answer_tokens, 0.5) in range(10, 13)
    assert length_quantile(whole.prompt_tokens, 0.99) in range(1000, 1251)


def test_buckets_hold_their_lengths() -> None:
    for length in (0, 1, 2, 3, 10, 999, 1000, 131_072):
        found = length_quantile({length_bucket(length): 1}, 0.5)
        assert found is not None
        assert length <= found + 1
        assert found <= max(1.25 * length + 1, 1)


def test_parts_of_a_period_add_up_after_a_restart() -> None:
    parts = []
    for _ in range(2):
        record = recorder()
        record.tick(START_S + 4.0, is_up=True, is_paused=False)
        record.on_request("default", "k", 100, 10)
        record.on_step(step(1.0, waiting_offline=1, online_decode_tokens=1))
        record.on_step(step(2.0, waiting_offline=1, online_decode_tokens=1))
        taken = record.take()
        assert taken is not None
        parts.append(period_decoder.decode(period_encoder.encode(taken)))
    whole = parts[0]
    whole.add(parts[1])
    assert (whole.seconds, whole.requests, whole.keys, whole.steps) == (8.0, {"default": 2}, {"k": 2}, 4)
    assert (whole.saturated.seconds, whole.most_online_blocks) == (2.0, 4)


def test_sums_of_lengths_take_the_middles_of_their_buckets() -> None:
    assert length_sums({0: 3}) == (3, 3.0, 3.0)
    assert length_sums({0: 1, 10: 2}) == pytest.approx((3, 1.0 + 2 * 1.25**9.5, 1.0 + 2 * 1.25**19))
    assert length_sums({}) == (0, 0.0, 0.0)
