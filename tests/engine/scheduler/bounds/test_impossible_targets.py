"""What nobody can be given is nobody's bound."""

import math

import pytest

from tests.engine.harness import Harness, online
from tests.engine.scheduler.bounds.test_worth_bound import Launches, bounds
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S

TTFT_TOKENS = 2000
POSSIBLE, IMPOSSIBLE = 200, 20
"""Tokens' time of a TPOT target; a step of three decodes takes 33."""


def with_streams(*tpot_tokens: float, **fields: object) -> Harness:
    """An engine with streams that have put out one token each."""
    ttft_slo_s = TTFT_TOKENS * TOKEN_S
    harness = Harness(
        num_blocks=500, cost_model=Launches(30.0), delivery_latency_s=0.0, ttft_slo_s=ttft_slo_s, **fields
    )
    for i, tokens in enumerate(tpot_tokens):
        asked = online(str(i), [7 + i], max_tokens=9, tpot_slo_s=tokens * TOKEN_S, ttft_slo_s=ttft_slo_s)
        harness.core.handle(asked)
    harness.step()
    return harness


def test_a_stream_that_cannot_keep_its_pace_takes_nothing_from_those_that_can() -> None:
    alike, one_of_them = with_streams(POSSIBLE, POSSIBLE, POSSIBLE), with_streams(POSSIBLE, IMPOSSIBLE, POSSIBLE)
    assert math.isfinite(bounds(alike).slack_s)
    assert bounds(one_of_them) == bounds(alike)


def test_where_none_can_offline_work_is_not_starved_for_them() -> None:
    assert bounds(with_streams(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE)).slack_s == math.inf


def joined_by(ttft_tokens: float) -> Harness:
    """A stream, by a chat that waits."""
    harness = with_streams(POSSIBLE)
    harness.core.handle(online("new", [9], tpot_slo_s=1.0, ttft_slo_s=ttft_tokens * TOKEN_S))
    return harness


@pytest.mark.parametrize("ttft_tokens", [0.0, 5.0])
def test_a_first_token_sooner_than_any_step_shortens_no_step(ttft_tokens: float) -> None:
    harness = joined_by(ttft_tokens)
    assert bounds(harness) == bounds(joined_by(TTFT_TOKENS))
    harness.run()
    assert harness.reason("new") is not None


def test_one_that_a_step_can_meet_shortens_steps() -> None:
    assert bounds(joined_by(400)).idle_s < bounds(joined_by(TTFT_TOKENS)).idle_s
