"""Quotes from a record: what is learnt, what is answered, and why something is refused."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.messages import EngineReady
from neaptide.server.quotes.fluid import DAY_PERIODS, PoolBatch
from neaptide.server.quotes.periods import PERIOD_S, Period, Saturated
from neaptide.server.quotes.quote import Quote, QuoteInputs, arithmetic, outlook, quote
from neaptide.server.quotes.work import (
    PRIOR_CHAT_FACTOR,
    PRIOR_EFFICIENCY,
    BatchSize,
    BatchWork,
    KnownBatch,
    chat_loads,
    chats_lag_s,
    drawn_answers,
    learnt_efficiency,
)

DAY_S = 86_400
INFO = EngineReady("m", "cpu", "float32", 256, 1024, 16, 64, [0], token_s=1e-3, kv_token_s=0.0)
SIZE = BatchSize(num_lines=100, num_rows=100, prompt_tokens=500_000, new_tokens=500_000, limits=(100,))
KNOWN = [KnownBatch(50.0, 100, 0.0)] * 20
"""Enough for answers of 50 tokens."""


def device(work: BatchWork) -> float:
    """A device that takes a millisecond per token that it computes."""
    return 1e-3 * (work.new_tokens + work.answer_tokens)


def period(start_s: int, load: float, **fields: object) -> Period:
    tokens = round(load * PERIOD_S / INFO.token_s)
    return Period(start_s=start_s, seconds=float(PERIOD_S), online_tokens=tokens, **fields)  # type: ignore[arg-type]


def days(load: float, count: int = 3) -> list[Period]:
    """Whole days with a constant load."""
    return [period(k * PERIOD_S, load) for k in range(count * DAY_PERIODS)]


def question(
    periods: Sequence[Period], pool: Sequence[PoolBatch] = (), known: Sequence[KnownBatch] = KNOWN
) -> QuoteInputs:
    now_s = float(periods[-1].start_s + PERIOD_S) if periods else 0.0
    return QuoteInputs(now_s, periods, INFO, device, pool, "a", known, {})


def windows_of(found: Quote) -> list[tuple[float, str]]:
    return [(one.window_s, outlook(one)) for one in found.windows]


def test_a_steady_load_gives_a_steady_quote() -> None:
    found = quote(SIZE, question(days(0.5)), (3600.0,))
    (window,) = found.windows
    wanted_s = 505.0 / ((1.0 - 0.5 * PRIOR_CHAT_FACTOR) * PRIOR_EFFICIENCY)
    assert found.work_s[0] == pytest.approx(505.0, rel=0.01)
    assert window.p50_s == pytest.approx(wanted_s, rel=0.03)
    assert wanted_s < window.p90_s < 1.4 * wanted_s
    assert windows_of(found) == [(3600.0, "on_time")]
    assert found.has_days


def test_what_cannot_be_done_is_refused_with_its_arithmetic() -> None:
    found = quote(SIZE, question(days(0.5), [PoolBatch("a", 300.0, 100.0)]), (120.0, 1800.0, DAY_S))
    assert [name for _, name in windows_of(found)] == ["infeasible", "at_risk", "on_time"]
    assert arithmetic(found, found.windows[0]).startswith("It needs 8 min of the device, and 5 min of other batches")
    assert "chats leave at most" in arithmetic(found, found.windows[0])


def test_times_of_day_are_learnt() -> None:
    """Nights are idle, days are full: at noon, nothing is done before the evening."""
    every = [period(k * PERIOD_S, 1.2 if k % DAY_PERIODS >= 72 else 0.0) for k in range(4 * DAY_PERIODS + 72)]
    (window,) = quote(SIZE, question(every), (DAY_S,)).windows
    assert window.p50_s == pytest.approx(12 * 3600 + 505.0 / PRIOR_EFFICIENCY, rel=0.02)


def test_the_unfinished_period_counts_and_its_rest_is_still_ahead() -> None:
    every = days(0.0)
    found = quote(SIZE, replace(question(every), now_s=every[-1].start_s + 500.0), (3600.0,))
    assert found.windows[0].p50_s == pytest.approx(505.0 / PRIOR_EFFICIENCY, rel=0.03)


def test_a_gap_in_the_record_is_no_idle_time() -> None:
    every = [one for one in days(0.5) if not 30 <= one.start_s // PERIOD_S < 50]
    loads, first_s = chat_loads(every, INFO)
    assert (len(loads), first_s) == (3 * DAY_PERIODS, 0)
    assert np.isnan(loads[30:50]).all()
    assert np.nanmean(loads) == pytest.approx(0.5)
    wanted_s = 505.0 / ((1.0 - 0.5 * PRIOR_CHAT_FACTOR) * PRIOR_EFFICIENCY)
    assert quote(SIZE, question(every), (3600.0,)).windows[0].p50_s == pytest.approx(wanted_s, rel=0.05)


def saturated(load: float, chat_factor: float, efficiency: float) -> Saturated:
    """A period in which lines waited: so much of it are the least times of chats, the rest batch work."""
    work_s = PERIOD_S * (1.0 - chat_factor * load) * efficiency
    return Saturated(
        seconds=float(PERIOD_S),
        steps=1000,
        online_tokens=round(load * PERIOD_S / INFO.token_s),
        prefill_tokens=round(work_s / 1e-3),
        row_steps=1000,
        kv_tokens=50_000_000,
    )


def test_what_chats_and_batch_work_get_is_learnt_where_lines_waited() -> None:
    record = days(0.5)
    for one in record[::2]:
        load = 0.1 * (one.start_s // PERIOD_S % 7)
        one.saturated = saturated(load, chat_factor=1.3, efficiency=0.8)
    found = learnt_efficiency(record, INFO, device)
    assert found.seconds == PERIOD_S * len(record[::2])
    assert found.mean == pytest.approx(0.8, rel=0.01)
    assert found.chat_factor == pytest.approx(1.3, rel=0.02)


def test_one_load_does_not_tell_chats_from_batch_work() -> None:
    """Both factors then move from their priors, by as much as explains the time."""
    record = [period(0, 0.5, saturated=saturated(0.4, chat_factor=1.3, efficiency=0.8)) for _ in range(100)]
    found = learnt_efficiency(record, INFO, device)
    assert found.chat_factor > PRIOR_CHAT_FACTOR
    assert 0.8 < found.mean < PRIOR_EFFICIENCY
    assert found.mean * (1.0 - 0.4 * found.chat_factor) == pytest.approx(0.8 * (1.0 - 0.4 * 1.3), rel=0.02)


@pytest.mark.parametrize("swing", [0.0, 0.02, 0.3])
def test_uneven_batch_work_does_not_pass_for_chats(swing: float) -> None:
    """Two weeks. Ten minutes with longer prompts get more work done than the mean of their day says, others less."""
    record, rng = days(0.5, count=14), np.random.default_rng(0)
    for one in record:
        load = 0.4 + swing * math.sin(2 * math.pi * (one.start_s // PERIOD_S) / DAY_PERIODS)
        one.saturated = saturated(load, chat_factor=1.1, efficiency=0.96)
        one.saturated.prefill_tokens = round(one.saturated.prefill_tokens * rng.uniform(0.7, 1.3))
    found = learnt_efficiency(record, INFO, device)
    assert found.mean == pytest.approx(0.96, rel=0.05)
    assert found.chat_factor == pytest.approx(1.1, rel=0.05)


@pytest.mark.parametrize(
    "parts",
    [
        [(600.0, 600_000 * k, 100_000 * k) for k in range(7)],  # More batch work beside more chats.
        [(0.1, 0, 10_000_000), (600.0, 0, 1)],
        [(0.1, 10_000_000, 10_000_000)],
        [(600.0, 10_000_000, 1)],
        [(0.0, 600_000, 600_000)],
    ],
)
def test_a_record_of_nonsense_leaves_factors_that_can_be_used(parts: list[tuple[float, int, int]]) -> None:
    record = [
        period(0, 0.0, saturated=Saturated(seconds=seconds, online_tokens=chats, prefill_tokens=lines, row_steps=1))
        for seconds, chats, lines in parts * 100
    ]
    found = learnt_efficiency(record, INFO, device)
    assert 0.01 <= found.mean <= 10.0
    assert 0.1 <= found.chat_factor < 100.0


BESIDE = Saturated(seconds=40.0, steps=1000)
"""Steps of 40 ms."""


def lagging(**changes: object) -> Period:
    """Steps of 10 ms without batch work; equal prompts and answers of about 112 tokens."""
    fields: dict[str, object] = {
        "steps": 3000,
        "step_s": 60.0,
        "saturated": BESIDE,
        "prompt_tokens": {22: 50},
        "answer_tokens": {22: 50},
    }
    return period(0, 0.5, **{**fields, **changes})


def test_chats_fall_behind_by_what_longer_steps_put_off() -> None:
    """Half of an answer is left on average, and half of a chat's work is its answer."""
    middle = 1.25**21.5
    assert chats_lag_s([lagging()], INFO) == pytest.approx(0.030 * middle / 2 / 2)


def test_long_answers_are_behind_by_most() -> None:
    """One of eight times the length stands for eight of them, each with eight times as much left."""
    found = chats_lag_s([lagging(prompt_tokens={0: 1}, answer_tokens={10: 8, 20: 1})], INFO)
    lengths = np.array([1.25**9.5] * 8 + [1.25**19.5])
    decodes = lengths.mean() / (1.0 + lengths.mean())
    assert found == pytest.approx(0.030 * (lengths**2).sum() / (2 * lengths.sum()) * decodes)


def test_time_between_steps_does_not_make_chats_lag_by_more_than_a_step() -> None:
    """The 1,000 batch steps take 40 s on the clock and 20 s of the device: less than nothing is left for ten others."""
    found = chats_lag_s([lagging(steps=1010, step_s=20.1)], INFO)
    assert found == pytest.approx(0.040 * 1.25**21.5 / 2 / 2)


@pytest.mark.parametrize(
    "unseen",
    [
        {"saturated": Saturated()},
        {"steps": 1000, "step_s": 40.0},
        {"answer_tokens": {}},
        {"prompt_tokens": {}},
        {"step_s": 140.0},
    ],
    ids=["no batch work", "never without it", "no answer", "no prompt", "steps as long"],
)
def test_chats_that_nobody_has_seen_fall_behind_are_not_behind(unseen: dict[str, object]) -> None:
    assert chats_lag_s([lagging(**unseen)], INFO) == 0.0


def test_a_batch_behind_others_finds_the_chats_behind_already() -> None:
    record = days(0.5)
    record[0] = lagging(saturated=Saturated(seconds=4000.0, steps=1000), step_s=4020.0)
    alone, others = quote(SIZE, question(record), (3600.0,)), [PoolBatch("b", 1e-9, 100.0)]
    beside = quote(SIZE, question(record, others), (3600.0,))
    assert alone.windows[0].p50_s < beside.windows[0].p50_s - 50.0


def test_nothing_recorded_leaves_the_priors() -> None:
    found = learnt_efficiency(days(0.5), INFO, device)
    assert found == pytest.approx((PRIOR_EFFICIENCY, PRIOR_CHAT_FACTOR, 0.0))


def test_unknown_answers_widen_the_quote_and_limits_cut_them() -> None:
    long = replace(SIZE, limits=(100_000,))
    spreads = []
    for known in ([], [KnownBatch(256.0, 100, 0.0)], [KnownBatch(256.0, 100, 0.0)] * 20):
        drawn = drawn_answers(known, np.random.default_rng(1), 400)
        spreads.append(float(np.log(drawn).std()))
        (window,) = quote(long, question(days(0.0), known=known), (DAY_S,)).windows
        assert window.p50_s < window.p90_s
    assert spreads == sorted(spreads, reverse=True)
    assert quote(SIZE, question(days(0.0), known=[]), (DAY_S,)).answer_tokens[1] == 100 * 100


def test_equal_questions_get_equal_quotes() -> None:
    assert quote(SIZE, question(days(0.3)), (3600.0,)) == quote(SIZE, question(days(0.3)), (3600.0,))


WORK = st.integers(1, 20_000)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lines=WORK,
    more=st.integers(0, 20_000),
    load=st.floats(0.0, 1.2),
    window_s=st.floats(60.0, 80_000.0),
    longer_s=st.floats(0.0, 80_000.0),
    pool_s=st.floats(0.0, 10_000.0),
)
def test_more_lines_are_never_sooner_and_a_longer_window_is_never_refused_later(
    lines: int, more: int, load: float, window_s: float, longer_s: float, pool_s: float
) -> None:
    def asked(num_lines: int) -> Quote:
        size = BatchSize(num_lines, num_lines, 100 * num_lines, 100 * num_lines, (100,))
        pool = [PoolBatch("b", pool_s, 1.0)]
        return quote(size, question(days(load, 2), pool), (window_s, window_s + longer_s))

    fewer, bigger = asked(lines), asked(lines + more)
    for one, other in zip(fewer.windows, bigger.windows, strict=True):
        assert one.p50_s <= one.p90_s
        assert one.p50_s <= other.p50_s + 1e-6
        assert one.p90_s <= other.p90_s + 1e-6
        assert one.can_end or not other.can_end
    short, long = fewer.windows
    assert long.can_end or not short.can_end
    assert long.left_s >= short.left_s - 1e-6
