"""Expectations from recent online traffic, to the token."""

import numpy as np
import pytest

from neaptide.engine.scheduler.traffic import FIRST_ANSWER_TOKENS, RECENT, WINDOW_S, RecentPrompts, RecentTraffic
from tests.engine.scheduler.judging import request_of, traffic_of
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, PerToken

MODEL = PerToken()


def prompts_of(traffic: RecentTraffic) -> RecentPrompts:
    traffic.begin()
    prompts = traffic.prompts
    assert prompts is not None
    return prompts


# ---- arrivals ----


@pytest.mark.parametrize(
    ("arrivals_s", "now_s", "rate"),
    [
        ((), 5.0, 0.0),
        ((0.0,), 0.25, 2.0),  # never counted over less than a second
        ((0.0, 1.0, 2.0), 4.0, 1.0),
        ((0.0, 30.0, 40.0), 45.0, 3 / WINDOW_S),
    ],
)
def test_the_rate_counts_one_request_more_than_came_in_the_window(
    arrivals_s: tuple[float, ...], now_s: float, rate: float
) -> None:
    traffic = traffic_of(MODEL)
    for index, at_s in enumerate(arrivals_s):
        traffic.observe_arrival(request_of(str(index), 4, at_s=at_s))
    assert traffic.rate(now_s) == rate


def test_prompts_have_their_mean_spread_longest_and_tightest_target() -> None:
    traffic = traffic_of(MODEL)
    for num_tokens, ttft_slo_s in ((2, 3.0), (6, 0.5)):
        traffic.observe_arrival(request_of(str(num_tokens), num_tokens, ttft_slo_s=ttft_slo_s))
    prompts = prompts_of(traffic)
    assert (prompts.tokens.tolist(), prompts.ttft_slo_s.tolist()) == ([2, 6], [3.0, 0.5])
    assert (prompts.mean_tokens, prompts.spread) == (4.0, 20 / 16)
    assert (prompts.longest_tokens, prompts.tightest_ttft_s) == (6, 0.5)


def test_a_prompt_counts_with_what_the_cache_lacked_once_it_is_admitted() -> None:
    traffic, request = traffic_of(MODEL), request_of("a", 100)
    traffic.observe_arrival(request)
    assert prompts_of(traffic).tokens.tolist() == [100]
    traffic.observe_admission(request, 20)
    assert prompts_of(traffic).tokens.tolist() == [20]
    assert (prompts_of(traffic).mean_tokens, prompts_of(traffic).longest_tokens) == (20.0, 20)
    traffic.observe_admission(request, 1)  # again, after it was pushed out
    assert prompts_of(traffic).tokens.tolist() == [20]


def test_only_the_last_hundred_prompts_count() -> None:
    traffic = traffic_of(MODEL)
    for index in range(RECENT + 3):
        traffic.observe_arrival(request_of(str(index), 1 + index))
    assert prompts_of(traffic).tokens.tolist() == list(range(4, RECENT + 4))


@pytest.mark.parametrize(("asked_s", "counted_s"), [(0.0, 2.0), (TOKEN_S, 2.0), (2 * TOKEN_S, 2 * TOKEN_S), (3.0, 3.0)])
def test_a_target_that_no_step_can_meet_counts_as_the_default(asked_s: float, counted_s: float) -> None:
    traffic = traffic_of(MODEL, ttft_slo_s=2.0)
    traffic.observe_arrival(request_of("a", 4, ttft_slo_s=asked_s))
    assert prompts_of(traffic).tightest_ttft_s == counted_s


def test_where_the_default_itself_cannot_be_met_a_longer_target_is_taken_as_it_is() -> None:
    traffic = traffic_of(MODEL, ttft_slo_s=TOKEN_S / 4)
    traffic.observe_arrival(request_of("a", 4, ttft_slo_s=TOKEN_S / 2))
    assert prompts_of(traffic).tightest_ttft_s == TOKEN_S / 2


# ---- answers ----


def left(answers: tuple[int, ...], *num_output: int) -> list[float]:
    """Without the length that stands for all answers before the first: it is the oldest of a hundred."""
    padding = (FIRST_ANSWER_TOKENS,) if not answers else ()
    traffic = traffic_of(MODEL, padding + answers * (RECENT // max(len(answers), 1)))
    return list(traffic.tokens_left(np.array(num_output)).tolist())


def test_before_any_answer_has_ended_one_of_32_tokens_is_expected() -> None:
    assert traffic_of(MODEL).tokens_left(np.array([1, 31])).tolist() == [31, 1]


@pytest.mark.parametrize(
    ("answers", "num_output", "expected"),
    [
        ((10, 20), 1, 14.0),  # (9 + 19) / 2
        ((10, 20), 9, 6.0),  # (1 + 11) / 2
        ((10, 20), 10, 10.0),  # only those that are longer
        ((2, 2, 2, 100), 1, 25.5),
        ((2, 2, 2, 100), 2, 98.0),
        ((5,), 4, 1.0),
    ],
)
def test_a_stream_has_left_what_longer_answers_had_left(
    answers: tuple[int, ...], num_output: int, expected: float
) -> None:
    assert left(answers, num_output) == [expected]


def test_a_stream_longer_than_any_answer_is_expected_to_double() -> None:
    assert left((10, 20), 20, 300) == [20, 300]


def more(answers: tuple[int, ...], num_output: int, *num_more: float) -> list[float]:
    traffic = traffic_of(MODEL, answers * (RECENT // len(answers)))
    return list(traffic.chance_of_more(np.full(len(num_more), num_output), np.array(num_more)).tolist())


def test_of_the_longer_answers_a_share_has_so_many_more_tokens() -> None:
    assert more((10, 20, 40, 80), 12, -5.0, 1.0, 8.0, 8.5, 28.0, 29.0, 68.0, 69.0) == pytest.approx(
        [1.0, 1.0, 1.0, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0.0]
    )


def test_a_stream_longer_than_any_answer_doubles_with_an_even_chance() -> None:
    assert more((10, 20), 30, 30.0, 90.0) == [0.5, 0.25]


def test_answers_of_a_single_token_have_no_pace_and_do_not_count() -> None:
    assert traffic_of(MODEL, [1, 0, 1]).tokens_left(np.array([1])).tolist() == [31]


def test_only_the_last_hundred_answers_count() -> None:
    assert traffic_of(MODEL, [500] * RECENT + [11] * RECENT).tokens_left(np.array([1])).tolist() == [10]
