"""A simulated server pretends to be vLLM; what is inferred from its metrics is what was simulated."""

import pytest

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.observation.figures import observed_figures
from neaptide.observation.step_times import EngineLimits, InferredStepTimes, fit_step_times
from neaptide.observation.traffic import InferredTraffic, traffic_of
from tests.observation.pretended import Recorded
from tests.observation.scenes import BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS, device, watched

TOLERANCE = 0.08


@pytest.fixture(scope="module")
def seen() -> Recorded:
    return watched()


@pytest.fixture(scope="module")
def traffic(seen: Recorded) -> InferredTraffic:
    return traffic_of(seen.record, seed=0)


@pytest.fixture(scope="module")
def times(seen: Recorded) -> InferredStepTimes:
    return fit_step_times(seen.record, EngineLimits(STEP_TOKENS, NUM_BLOCKS * BLOCK_SIZE), num_draws=8, seed=0)


@pytest.mark.parametrize(("streams", "prompt_tokens"), [(1, 0), (4, 0), (8, 0), (24, 0), (4, 100), (16, 200)])
def test_a_step_takes_as_long_as_it_did(times: InferredStepTimes, streams: int, prompt_tokens: int) -> None:
    shape = BatchShape()
    shape.add_decodes(streams, streams * 100, 100)
    if prompt_tokens:
        shape.add(prompt_tokens, 0)
    costs = times.step_costs()
    inferred = RooflineModel({regime: costs[regime.value] for regime in Regime})
    true_s = RooflineModel.from_profile(device()).predict(shape).seconds
    assert inferred.predict(shape).seconds == pytest.approx(true_s, rel=TOLERANCE)


def test_parts_that_were_not_seen_are_predicted(times: InferredStepTimes) -> None:
    assert times.error < 0.05


def test_every_chat_that_came_after_the_first_poll_is_there(seen: Recorded, traffic: InferredTraffic) -> None:
    last_s = seen.record.intervals[-1].end_s
    came = [request for request in seen.truth.requests if request.arrival_s <= last_s]
    assert abs(len(traffic.requests) - len(came)) <= 2  # those that wait in no queue at the last poll
    assert traffic.aborted == 0


def test_chats_arrive_when_they_did_give_or_take_some_seconds(seen: Recorded, traffic: InferredTraffic) -> None:
    true_s = [request.arrival_s for request in seen.truth.requests][: len(traffic.requests)]
    found_s = [request.arrival_s for request in traffic.requests][: len(true_s)]
    errors_s = [abs(a - b) for a, b in zip(found_s, true_s, strict=False)]
    assert sum(errors_s) / len(errors_s) < 1.0


def test_tokens_of_those_that_ended_have_the_right_sums(seen: Recorded, traffic: InferredTraffic) -> None:
    totals = seen.record.totals()
    ended = traffic.requests[: round(totals["request_prompt_tokens_count"])]
    assert len(ended) > 80
    mean_prompt = sum(request.input_tokens for request in traffic.requests) / len(traffic.requests)
    assert mean_prompt == pytest.approx(
        totals["request_prompt_tokens_sum"] / totals["request_prompt_tokens_count"], 0.03
    )


def test_lengths_of_a_chat_that_ended_alone_are_exact(seen: Recorded, traffic: InferredTraffic) -> None:
    pairs = {(request.prompt_tokens, request.tokens) for request in seen.truth.requests}
    found = {(request.input_tokens, request.output_tokens) for request in traffic.requests}
    assert len(found & pairs) >= traffic.exact > 20


def test_another_seed_draws_other_traffic_with_as_many_chats(seen: Recorded, traffic: InferredTraffic) -> None:
    other = traffic_of(seen.record, seed=1)
    assert len(other.requests) == len(traffic.requests)
    assert other.requests != traffic.requests
    assert traffic_of(seen.record, seed=0) == traffic


def test_the_figures_are_those_of_the_run(seen: Recorded, traffic: InferredTraffic) -> None:
    found = observed_figures(seen.record, traffic, ttft_slo_s=0.5, tpot_slo_s=0.2)
    last_s = seen.record.intervals[-1].end_s
    begun = [r for r in seen.truth.requests if 0 < r.first_s <= last_s]
    true_ttft_s = sum(r.first_s - r.arrival_s for r in begun) / len(begun)
    assert found.ttft_s == pytest.approx(true_ttft_s, rel=0.02)
    in_time = sum(r.first_s - r.arrival_s <= 0.5 for r in begun) / len(begun)
    assert found.in_ttft is not None
    assert found.in_ttft.low == pytest.approx(in_time, abs=0.02)
    waits_s = [max(r.taken_s - r.arrival_s, 0.0) for r in begun]
    assert found.overhead_s == pytest.approx(sum(waits_s) / len(waits_s), rel=0.05)
    assert found.overhead_s > 0.05
    assert (found.restarts, found.failed_polls, found.polls) == (0, 0, len(seen.record.intervals) + 1)
