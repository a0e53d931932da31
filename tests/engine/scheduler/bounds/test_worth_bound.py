"""How long a step may be without making anybody late, and what a step's own cost makes it worth."""

from typing import NamedTuple

import numpy as np
import pytest

from neaptide.engine.arrays import FloatArray
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, flex, online
from tests.engine.scheduler.judging import judged
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, PerToken, Prediction, Weights

TTFT_TOKENS, TPOT_TOKENS = 500, 200
NEGLIGIBLE = 1e-3
"""Expected late requests."""


class Launches(PerToken):
    """A step costs so many tokens' time whatever is in it."""

    def __init__(self, num_tokens: float) -> None:
        super().__init__()
        self._each_s = num_tokens * TOKEN_S

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(super().predict(shape).seconds + self._each_s, 0.0)


class Bounds(NamedTuple):
    """The longest steps that are expected to make nobody late, in seconds; infinite if none does."""

    slack_s: float
    """For the streams' sake."""
    idle_s: float
    """For that of requests that arrive during it."""


def bounds(harness: Harness) -> Bounds:
    found = judged(harness)
    lengths_s = np.arange(0.0, 100.0, TOKEN_S / 4)

    def longest_s(late: FloatArray) -> float:
        in_time = late <= NEGLIGIBLE
        return float("inf") if in_time.all() else float(lengths_s[in_time][-1])

    slack_s = float("inf")
    if found.has_streams:
        left_s = found._slack_s - lengths_s[:, None]
        slack_s = longest_s(found.late_streams(left_s, left_s, 1.0, np.zeros((len(lengths_s), 1))))
    return Bounds(slack_s, longest_s(found.late_arrivals(lengths_s)))


def beside_stream(cost_model: PerToken, **fields: object) -> Harness:
    """An engine with a stream that has put out one token, and a long row of a batch beside it."""
    ttft_slo_s = TTFT_TOKENS * TOKEN_S
    harness = Harness(num_blocks=500, cost_model=cost_model, delivery_latency_s=0.0, ttft_slo_s=ttft_slo_s, **fields)
    tpot_slo_s = TPOT_TOKENS * TOKEN_S
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=tpot_slo_s, ttft_slo_s=ttft_slo_s))
    harness.step()
    harness.core.handle(flex("f", [8] * 1000, max_tokens=1))
    return harness


def test_a_stream_bounds_a_step_by_its_slack() -> None:
    slack_s = bounds(beside_stream(PerToken())).slack_s
    assert slack_s == pytest.approx(TPOT_TOKENS * TOKEN_S, abs=TOKEN_S / 4)


def test_an_arrival_bounds_it_by_what_its_own_prompt_leaves_of_its_target() -> None:
    """Two a second of a token each, so a 32nd of the time is theirs; the stream's decode takes a token of 200."""
    rho = (2 * TOKEN_S) / (1.0 - 1.0 / TPOT_TOKENS)
    waits_s = (TTFT_TOKENS - 1 - 1) * TOKEN_S / (1.0 + rho)
    assert bounds(beside_stream(PerToken())).idle_s == pytest.approx(waits_s, abs=TOKEN_S / 4)


@pytest.mark.parametrize("launch", [30.0, 60.0])
def test_where_a_step_costs_something_of_its_own_offline_work_makes_it_longer(launch: float) -> None:
    cheap = beside_stream(PerToken()).step()["f"]
    assert cheap < beside_stream(Launches(launch)).step()["f"] <= TPOT_TOKENS - int(launch) - 1


def test_streams_that_cannot_keep_their_pace_are_not_protected() -> None:
    assert bounds(beside_stream(Weights(TPOT_TOKENS))).slack_s == float("inf")
