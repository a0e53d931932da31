"""Beside streams a step is no longer than brings offline work something, to the token."""

import math

import pytest
from neaptide.engine.scheduler.slack import StepBounds

from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, flex, online
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, InProportion, PerToken, Prediction, Weights

TTFT_TOKENS, TPOT_TOKENS = 500, 200
"""A fifth of the first is 100 tokens' time; what a stream can spare after its first token is 180."""


class Launches(PerToken):
    """A step costs so many tokens' time whatever is in it."""

    def __init__(self, num_tokens: float) -> None:
        super().__init__()
        self._each_s = num_tokens * TOKEN_S

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(super().predict(shape).seconds + self._each_s, 0.0)


class InTiles(Launches):
    """Tokens are computed by 128; a prompt of its own takes whole ones."""

    def predict(self, shape: BatchShape) -> Prediction:
        if shape.decode_requests or shape.num_tokens < 128:
            return super().predict(shape)
        return Prediction(TOKEN_S * 128 * -(-shape.num_tokens // 128) + self._each_s, 0.0)


class Counting(PerToken):
    """Notes which steps of prompts alone it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts_alone: list[int] = []

    def predict(self, shape: BatchShape) -> Prediction:
        if shape.prefill_requests and not shape.decode_requests:
            self.prompts_alone.append(shape.prefill_tokens)
        return super().predict(shape)


def beside_stream(cost_model: PerToken, ttft_tokens: float = TTFT_TOKENS, **fields: object) -> Harness:
    """An engine with a stream that has put out one token, and a long row of a batch beside it."""
    ttft_slo_s = ttft_tokens * TOKEN_S
    harness = Harness(num_blocks=500, cost_model=cost_model, delivery_latency_s=0.0, ttft_slo_s=ttft_slo_s, **fields)
    tpot_slo_s = TPOT_TOKENS * TOKEN_S
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s))
    harness.step()
    harness.core.handle(flex("f", [8] * 1000, max_tokens=1))
    return harness


def bounds(harness: Harness) -> StepBounds:
    scheduler = harness.core.scheduler
    found: StepBounds = scheduler.slack.bounds(scheduler.draft(harness.clock.now()))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("cost_model", "tokens"),
    [
        (PerToken(), 100),  # a fifth of the TTFT target, for no step costs anything of its own
        (Launches(2.0), 98),  # of 87 tokens' time its own two are 2.3%: the fifth is more
        (Launches(3.6), 152),  # of 156 its own 3.6 are
        (Launches(9.0), 171),  # of 391: what the stream can spare is less
        (InTiles(3.6), 152),
        (Weights(32), 100),  # no part of a step of half the tokens
        (Weights(60), 120),  # as much again as the stream takes
        (InProportion(), 100),  # on what is expected; with its margin it is 125
    ],
    ids=["no cost", "the fifth", "the cost", "the stream", "tiles", "weights", "twice the stream", "margin"],
)
def test_how_long_offline_work_makes_a_step_beside_a_stream(cost_model: PerToken, tokens: int) -> None:
    assert beside_stream(cost_model).step() == {"a": 1, "f": tokens - 1}


def test_steps_of_whole_tiles_are_compared() -> None:
    # Two of 550 tokens would take 128 more than one of 1,100, and that is no cost of a step.
    assert beside_stream(InTiles(3.6), max_num_batched_tokens=1100).step() == {"a": 1, "f": 151}


def test_no_step_of_more_tokens_than_it_may_have_is_asked_about() -> None:
    counting = Counting()
    assert math.isfinite(bounds(beside_stream(counting, max_num_batched_tokens=1500)).worth_s)
    assert counting.prompts_alone[-2:] == [512, 1024]


def test_least_tokens_of_all() -> None:
    assert bounds(beside_stream(PerToken(), max_num_batched_tokens=1)).worth_s == 100 * TOKEN_S


def test_nothing_is_asked_where_targets_are_short() -> None:
    counting = Counting()
    harness = beside_stream(counting, ttft_tokens=5 * 190)
    counting.prompts_alone.clear()
    assert bounds(harness).worth_s == math.inf
    assert max(counting.prompts_alone, default=0) <= 1  # the typical prompt
    assert harness.step() == {"a": 1, "f": 179}
    last = harness.watch.last
    assert last is not None
    assert "worth" not in last.draft.bounds_s


def test_what_other_bounds_leave_no_room_for_is_none() -> None:
    assert bounds(beside_stream(Launches(9.0))).worth_s == math.inf


def test_a_step_without_a_stream_is_as_long_as_who_comes_may_wait() -> None:
    harness = Harness(num_blocks=500, cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=TTFT_TOKENS * TOKEN_S)
    harness.core.handle(flex("f", [8] * 1000, max_tokens=1))
    assert bounds(harness).worth_s == math.inf
    assert harness.step() == {"f": 250}


def test_online_prompts_are_not_bounded_by_it() -> None:
    harness = beside_stream(PerToken())
    now_s = harness.clock.now()
    harness.core.handle(online("p", [9] * 150, ttft_slo_s=TTFT_TOKENS * TOKEN_S, tpot_slo_s=9.0, arrival_s=now_s))
    assert harness.step() == {"a": 1, "p": 150}


def test_streams_that_cannot_keep_their_pace_are_not_protected_by_it() -> None:
    assert bounds(beside_stream(Weights(TPOT_TOKENS))).worth_s == math.inf


def test_it_is_among_the_bounds_that_a_step_is_explained_by_with_a_margin() -> None:
    harness = beside_stream(InProportion())
    harness.step()
    last = harness.watch.last
    assert last is not None
    assert last.draft.bounds_s["worth"] == min(last.draft.bounds_s.values()) == 125 * TOKEN_S
    assert last.plan.budget_s == 125 * TOKEN_S


def test_the_controllers_factor_is_on_it() -> None:
    harness = beside_stream(PerToken())
    harness.core.scheduler.controller.factor = 0.75  # type: ignore[attr-defined]
    assert harness.step() == {"a": 1, "f": 74}


def test_the_tightest_target_of_late_counts() -> None:
    harness = beside_stream(PerToken())
    tight = online("b", [7], max_tokens=9, tpot_slo_s=9.0, ttft_slo_s=400 * TOKEN_S, arrival_s=harness.clock.now())
    harness.core.handle(tight)
    assert bounds(harness).worth_s == 80 * TOKEN_S
