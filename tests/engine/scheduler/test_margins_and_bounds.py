"""How long a step may take, to the token: margins, egress, and the bounds that hold where no stream asks for one.

Times are whole numbers of binary fractions of a second, so that a limit is met exactly or not at all.
"""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from neaptide.engine.scheduler.slack import SlackTracker, prefill_seconds

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import PromptSteps, Reads, StepBudget, largest_within
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, flex, online

TOKEN_S = 1 / 64


class PerToken:
    """Implements ``CostModel``: a time for each token, and a margin on every step."""

    def __init__(self, token_s: float = TOKEN_S, margin_s: float = 0.0) -> None:
        self._token_s = token_s
        self._margin_s = margin_s

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._token_s * shape.num_tokens, self._margin_s)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


class InProportion(PerToken):
    """A margin of a quarter of every step."""

    def predict(self, shape: BatchShape) -> Prediction:
        seconds = super().predict(shape).seconds
        return Prediction(seconds, seconds / 4)


class NoisyDecodes(InProportion):
    """A step of decodes alone may take twice as long as predicted."""

    def predict(self, shape: BatchShape) -> Prediction:
        seconds, margin_s = super().predict(shape)
        return Prediction(seconds, margin_s if shape.prefill_requests else seconds)


class PerPrompt(PerToken):
    """As much for every chunk of a prompt as for so many tokens more."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._prompt_s = num_tokens * TOKEN_S

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(super().predict(shape).seconds + self._prompt_s * shape.prefill_requests, 0.0)


class Weights(PerToken):
    """A step takes at least as long as so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._least_s = num_tokens * TOKEN_S

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(max(super().predict(shape).seconds, self._least_s), 0.0)


class PerContext(PerToken):
    """As much for every token of the context behind which a chunk comes as for one that is computed."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(super().predict(shape).seconds + self._token_s * shape.prefill_context_tokens, 0.0)


class CostModelThatCounts(PerToken):
    """How often it is asked; every feature of a step counts."""

    num_asked = 0

    def predict(self, shape: BatchShape) -> Prediction:
        self.num_asked += 1
        return self.seen(shape)

    def seen(self, shape: BatchShape) -> Prediction:
        return Prediction(float(sum(astuple(shape))), 1.0)


WITH_MARGIN = PerToken(margin_s=8 * TOKEN_S)


# ---- the margin counts ----


def test_a_chunk_leaves_room_for_the_margin() -> None:
    assert StepBudget(WITH_MARGIN, 100).largest_chunk(100, 0, 32 * TOKEN_S) == 24


def test_decodes_leave_room_for_the_margin() -> None:
    assert StepBudget(WITH_MARGIN, 100).most_decodes(np.full(100, 5), 32 * TOKEN_S) == 24


def test_all_decodes_fit_with_the_margin_or_some_are_left_out() -> None:
    budget = StepBudget(WITH_MARGIN, 100)
    assert [budget.most_decodes(np.full(10, 5), limit * TOKEN_S) for limit in (18, 17)] == [10, 9]


def test_the_time_of_a_prompt_has_the_margin_in_it() -> None:
    assert prefill_seconds(WITH_MARGIN, 16, 0) == 24 * TOKEN_S


def test_a_step_beside_a_stream_leaves_room_for_the_margin() -> None:
    harness = Harness(cost_model=WITH_MARGIN, delivery_latency_s=0.0, ttft_slo_s=50.0)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()  # its second token is due a target after the first, of which it keeps a tenth: 57.6 tokens are left
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": 57 - 8 - 1}


class LongestDecode(PerToken):
    """A step takes as long as its longest decode."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._token_s * shape.longest_decode_tokens, 0.0)


def test_the_longest_of_the_decodes_counts() -> None:
    budget = StepBudget(LongestDecode(), 100)
    assert budget.most_decodes(np.array([4, 8, 29, 4]), 10 * TOKEN_S) == 2


def test_what_the_step_takes_is_asked_again_once_it_has_changed() -> None:
    model = CostModelThatCounts()
    budget = StepBudget(model, 100)
    budget.add(8, 0)
    assert budget.most_decodes(np.array([9, 11, 7]), 1000.0) == 3
    budget.add_decodes(3, Reads.of(np.array([9, 11, 7])))
    assert budget.prediction == model.seen(budget.shape)  # just that was asked
    assert model.num_asked == 1
    for change in (lambda: budget.add(1, 5), lambda: setattr(budget.shape, "swapped_blocks", 2)):
        change()
        assert budget.prediction == budget.predict_with(0) == model.seen(budget.shape)
    assert model.num_asked == 3
    assert budget.most_decodes(np.array([9]), 1000.0) == 1
    assert budget.prediction == model.seen(budget.shape)  # not that with the decode


def test_what_decodes_read_is_what_they_have_computed_and_their_own_token() -> None:
    budget, one_by_one, contexts = StepBudget(PerToken(), 100), BatchShape(), np.array([4, 9, 1])
    budget.add_decodes(3, Reads.of(contexts))
    for context in contexts.tolist():
        one_by_one.add(1, context)
    assert (budget.shape, budget.tokens_left) == (one_by_one, 97)


# ---- looking for the limit ----


@given(
    times=st.lists(st.integers(0, 1000), min_size=2, max_size=60).map(sorted),
    limit=st.integers(-1, 1001),
    none_s=st.integers(0, 1000),
)
def test_the_largest_that_fits_is_found_whatever_the_times(times: list[int], limit: int, none_s: int) -> None:
    """``times[n - 1]`` is for n; the last one is too long."""
    most_s = max(times[-1], limit + 1)
    fitting = [n for n in range(1, len(times)) if times[n - 1] <= limit]
    found = largest_within(limit, lambda n: times[n - 1], none_s, len(times), most_s)
    assert found == max(fitting, default=0)


@pytest.mark.parametrize("limit_s", [0.012, 0.025, 0.04])
def test_a_chunk_takes_a_few_predictions(limit_s: float) -> None:
    """Eleven by halving. Attention that grows with the square, and a bend as of a profile."""
    asked: list[int] = []

    def seconds(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 0.01 + 1e-5 * num_tokens + 1e-5 * max(num_tokens - 700, 0) + 2e-9 * num_tokens**2

    most_s = seconds(2048)
    found = largest_within(limit_s, seconds, 0.008, 2048, most_s)
    assert seconds(found) <= limit_s < seconds(found + 1)
    assert len(asked) - 3 <= 8


# ---- the bounds ----


@pytest.mark.parametrize(("num_output", "tokens"), [(1, 89), (5, 64), (10, 32), (12, 32)])
def test_a_stream_gains_its_cushion_over_its_first_ten_tokens(num_output: int, tokens: int) -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0)
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    for _ in range(num_output):
        harness.step()
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s = harness.clock.now() + (1.5 - num_output) * 64 * TOKEN_S  # its next one is due in 96 tokens
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": tokens - 1}


@pytest.mark.parametrize(("answer", "tokens"), [(30, 32), (120, 80)])
def test_streams_gain_their_cushion_slowly_where_answers_are_long(answer: int, tokens: int) -> None:
    """A stream of 10 tokens has all of its cushion of 64 tokens' time, or a quarter; its next one is due in 96."""
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0)
    harness.core.handle(online("before", [7], max_tokens=answer, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.run()
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    for _ in range(10):
        harness.step()
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s = harness.clock.now() + (1.5 - 10) * 64 * TOKEN_S
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": tokens - 1}


def busy_harness(num_prompts: int, ago_s: float = 0.0, ttft_tokens: int = 3200, num_short: int = 0) -> Harness:
    """A stream with a target of 64 tokens' time, when so many prompts have just come and gone: the first ``num_short``
    of 20 tokens, the others of 200."""
    harness = Harness(256, PerToken(), delivery_latency_s=0.0, ttft_slo_s=ttft_tokens * TOKEN_S)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0, arrival_s=-20.0))
    harness.step()
    gone = [f"gone{k}" for k in range(num_prompts)]
    for k, request_id in enumerate(gone):
        prompt, came_s = [9] * (20 if k < num_short else 200), harness.clock.now() - ago_s
        harness.core.handle(online(request_id, prompt, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S, arrival_s=came_s))
    harness.core.handle(AbortRequest(gone))
    return harness


@pytest.mark.parametrize(("banked_tokens", "tokens"), [(-1, 57), (0.25, 73), (1, 121), (2, 160)])
def test_where_many_come_an_online_prompt_takes_what_the_streams_can_spare(banked_tokens: float, tokens: int) -> None:
    harness = busy_harness(40)
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s += banked_tokens * 64 * TOKEN_S
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    # Nine tenths of a token's time at least, two and a half at most.
    assert harness.step() == {"a": 1, "b": tokens - 1}


@pytest.mark.parametrize(("ttft_tokens", "tokens"), [(400, 201), (540, 142), (700, 90)])
def test_where_few_come_a_prompt_is_not_cut_if_pieces_take_long(ttft_tokens: int, tokens: int) -> None:
    """One of 200 tokens takes 202 tokens' time in steps of 96 beside a stream, half of it and one of 191, the mean of
    all, 197: more than 45% of the target; 36.6%, so 43.8% of the way from 96 to 201; and less than 30%, where it is
    itself 13.5% of a crowd."""
    harness = busy_harness(20, 20.0, ttft_tokens)
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": tokens - 1}


@pytest.mark.parametrize(("num_short", "tokens"), [(0, 201), (17, 90)])
def test_long_prompts_among_short_ones_are_cut(num_short: int, tokens: int) -> None:
    """One of 200 tokens takes 47.0% of the target in pieces; half of it and one of 52, the mean, 29.6%."""
    harness = busy_harness(20, 20.0, 430, num_short)
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": tokens - 1}


@pytest.mark.parametrize(
    ("ttft_tokens", "target_tokens", "in_hand"),
    [(400, 64, 0.1 * 200 / 64), (540, 64, 0.1 * 0.438 * 200 / 64), (700, 64, 0.1), (400, 20, 0.4)],
)
def test_where_prompts_are_not_cut_streams_keep_what_the_next_one_will_cost(
    ttft_tokens: int, target_tokens: int, in_hand: float
) -> None:
    """One of 200 tokens, in TPOT targets; a stream gains a tenth of it with its first token, at most 0.4."""
    harness = busy_harness(20, 20.0, ttft_tokens)
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.tpot_slo_s = target_tokens * TOKEN_S
    harness.core.scheduler.queues.table.tpot_slo_s[stream.slot] = stream.tpot_slo_s
    stream.first_token_s = harness.clock.now() + 0.1 * target_tokens * TOKEN_S
    harness.core.handle(flex("f", [8] * 200, max_tokens=1))
    assert harness.step() == {"a": 1, "f": int((1.1 - in_hand) * target_tokens) - 1}


@pytest.mark.parametrize(("target_tokens", "in_hand"), [(20, 10), (16, 11.5), (12, 24 - 200 / 12), (8, 1)])
def test_streams_keep_twelve_targets_for_the_next_prompt_at_most(target_tokens: int, in_hand: float) -> None:
    """It will cost 10, 12.5, 16.7 and 25: what streams will not have is not kept, for it would be cut all the same. The
    stream's next token is due a target after all of that."""
    harness = busy_harness(20, 20.0, 400)
    harness.core.handle(AbortRequest(["a"]))
    harness.core.handle(online("b", [7], max_tokens=60, ttft_slo_s=50.0, tpot_slo_s=target_tokens * TOKEN_S))
    for _ in range(40):
        harness.step()
    stream = harness.core.scheduler.queues.running_online["b"]
    stream.first_token_s = harness.clock.now() + (in_hand + 1 - 40) * target_tokens * TOKEN_S
    harness.core.handle(flex("f", [8] * 200, max_tokens=1))
    assert harness.step() == {"b": 1, "f": target_tokens - 1}


def test_a_prompt_that_is_longer_than_most_is_cut_where_most_would_end() -> None:
    harness = busy_harness(20, 20.0, 400)
    harness.core.handle(online("b", [8] * 300, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 200}


def test_a_short_prompt_may_stall_the_streams_up_to_the_bound_on_a_gap() -> None:
    harness = busy_harness(0)
    harness.core.handle(online("b", [8] * 100, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 95}


@pytest.mark.parametrize(("behind", "tokens"), [(5, 201), (6, 64 - 6 * 64 + 8 * 63), (8, 96)])
def test_a_stall_puts_no_stream_further_behind_than_it_makes_good_with_eight_tokens(behind: int, tokens: int) -> None:
    harness = busy_harness(20, 20.0, 400)
    harness.core.scheduler.queues.running_online["a"].first_token_s -= behind * 64 * TOKEN_S
    harness.core.handle(online("b", [8] * 300, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": tokens - 1}


def test_between_few_and_many_the_bound_falls_evenly() -> None:
    """321 tokens of prompts in the time of 640, of which the stream leaves 630: 51%, so 52% of the way from 96 to 57.6
    tokens, the stream's own included."""
    harness = busy_harness(1)
    harness.core.handle(online("b", [8] * 120, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 75}


def test_where_prompts_are_not_cut_it_falls_from_half_of_the_time_on() -> None:
    """392 tokens in the time of 640, of which the stream leaves 630: 62.2%, so 48.9% of the way from 193 to 57.6."""
    harness = busy_harness(1, ttft_tokens=300)
    harness.core.handle(online("b", [8] * 192, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 125}


@pytest.mark.parametrize(("num_waiting", "tokens"), [(1, 201), (2, 139), (3, 57)])
def test_prompts_that_wait_from_before_are_a_crowd_although_nobody_comes(num_waiting: int, tokens: int) -> None:
    """Two of 191 tokens, the mean of all, are 60.6% of 630, so 42.5% of the way to 57.6; three are more than 75%."""
    harness = busy_harness(20, 20.0, 400)
    for k in range(num_waiting):
        harness.core.handle(online(f"b{k}", [8 + k] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S, arrival_s=-20.0))
    assert harness.step() == {"a": 1, "b0": tokens - 1}


def test_a_prompt_that_is_late_is_not_cut_either() -> None:
    harness = busy_harness(20, 20.0, 400)
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=TOKEN_S, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 200}


def test_no_online_prompt_makes_a_step_longer_than_five_seconds() -> None:
    harness = Harness(cost_model=PerToken(1 / 8))
    harness.core.handle(online("a", [7] * 100, max_tokens=1, ttft_slo_s=100.0))
    assert harness.step() == {"a": 40}


def test_where_half_of_the_ttft_target_is_more_than_five_seconds_online_prompts_may_take_that() -> None:
    harness = Harness(cost_model=PerToken(1 / 8), ttft_slo_s=20.0)
    harness.core.handle(online("a", [7] * 100, max_tokens=1, ttft_slo_s=100.0))
    assert harness.step() == {"a": 80}


def test_an_idle_step_may_take_three_quarters_of_a_token_target_however_tight_the_first_token_is() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=TOKEN_S, tpot_slo_s=64 * TOKEN_S)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": 48}


@pytest.mark.parametrize(("depth", "tokens"), [(0, 32), (1, 16)])
def test_an_arrival_may_wait_for_as_many_steps_as_are_in_flight(depth: int, tokens: int) -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=64 * TOKEN_S, overlap_depth=depth)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": tokens}


def test_an_idle_step_leaves_time_for_egress() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=8 * TOKEN_S, ttft_slo_s=64 * TOKEN_S)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": 28}  # half of what is left: an arrival needs as much again for its chunks


def test_a_step_beside_streams_leaves_time_for_the_next_prompt_beside_their_decodes() -> None:
    """Prompts of 50 tokens with targets of 200 tokens' time: beside 32 decodes of 64 they take 100, and seven tenths of
    what is left are for the step."""
    targets = {"ttft_slo_s": 200 * TOKEN_S, "tpot_slo_s": 64 * TOKEN_S}
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, left_out=("worth-bound",), **targets)
    for k in range(32):
        harness.core.handle(online(f"stream{k}", [7], max_tokens=50, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    for stream in harness.core.scheduler.queues.running_online.values():
        stream.first_token_s += 64 * TOKEN_S
    gone = [f"gone{k}" for k in range(100)]
    for request_id in gone:
        harness.core.handle(online(request_id, [9] * 50, ttft_slo_s=200 * TOKEN_S, arrival_s=harness.clock.now()))
    harness.core.handle(AbortRequest(gone))
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step()["f"] == 70 - 32


@pytest.mark.parametrize(("egress_tokens", "tokens"), [(4, 53), (8, 51), (40, 51)])
def test_a_step_beside_a_stream_leaves_time_for_egress_a_tenth_at_most(egress_tokens: int, tokens: int) -> None:
    """Its second token is due a target after the first, in 64 tokens' time, of which 6.4 are its cushion."""
    harness = Harness(cost_model=PerToken(), delivery_latency_s=egress_tokens * TOKEN_S, ttft_slo_s=50.0)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": tokens - 1}


# ---- prompts that wait ----


def test_a_prompt_that_the_streams_decodes_would_make_late_goes_behind_one_that_can_be_in_time() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0)
    for k in range(32):  # half of every target of 64 tokens goes to their decodes
        harness.core.handle(online(f"stream{k}", [7], max_tokens=50, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    now_s = harness.clock.now()
    # Alone it takes 100 tokens' time, beside the streams 200.
    harness.core.handle(online("late", [8] * 100, ttft_slo_s=150 * TOKEN_S, arrival_s=now_s))
    harness.core.handle(online("in time", [9] * 100, ttft_slo_s=50.0, arrival_s=now_s))
    tokens = harness.step()
    assert tokens["in time"] > tokens.get("late", 0)


EGRESS_S = 8 * TOKEN_S


def waiting(name: str, num_tokens: int, ttft_slo_s: float) -> Request:
    return Request(name, [7] * num_tokens, SamplingParams(max_tokens=1), Tier.DEFAULT, 0.0, ttft_slo_s, 1.0)


@pytest.fixture
def tracker() -> SlackTracker:
    return SlackTracker(SchedulerConfig(delivery_latency_s=EGRESS_S), WITH_MARGIN)


@pytest.fixture
def draft() -> Draft:
    """Of an engine that has nothing to do, at time 0."""
    return Harness(cost_model=WITH_MARGIN).core.scheduler.draft(0.0)


def test_a_waiting_prompt_leaves_what_its_prefill_and_egress_do_not_need(tracker: SlackTracker, draft: Draft) -> None:
    assert tracker.prefill_slack_s(draft, [waiting("a", 16, 64 * TOKEN_S)]) == (64 - 8 - 24) * TOKEN_S


def test_a_waiting_prompt_waits_for_those_before_it(tracker: SlackTracker, draft: Draft) -> None:
    prompts = [waiting("a", 16, 64 * TOKEN_S), waiting("b", 8, 66 * TOKEN_S), waiting("c", 8, 200 * TOKEN_S)]
    assert tracker.prefill_slack_s(draft, prompts) == (66 - 8 - 16 - 24) * TOKEN_S


def test_a_prompt_that_is_late_anyhow_is_ahead_of_none(tracker: SlackTracker, draft: Draft) -> None:
    prompts = [waiting("late", 16, 32 * TOKEN_S), waiting("b", 8, 66 * TOKEN_S)]
    assert tracker.prefill_slack_s(draft, prompts) == (66 - 8 - 16) * TOKEN_S


PACE_S = (64 + 8) * TOKEN_S
"""A step of 64 tokens, and its margin."""


def test_a_prompt_can_be_in_time_if_margin_and_egress_fit_as_well(tracker: SlackTracker, draft: Draft) -> None:
    targets = [(16 + 8 + 8 + missing) * TOKEN_S for missing in (0, -1)]
    prompts = [[waiting("a", 16, target_s)] for target_s in targets]
    assert [list(tracker.feasible(draft, each, PACE_S)) for each in prompts] == [[True], [False]]


def test_a_prompt_waits_for_those_before_it_that_can_be_in_time(tracker: SlackTracker, draft: Draft) -> None:
    first_s, second_s = (16 + 8 + 8) * TOKEN_S, (16 + 16 + 8 + 8) * TOKEN_S
    late = waiting("late", 16, first_s - TOKEN_S)
    in_time = [waiting("a", 16, first_s), waiting("b", 16, second_s)]
    assert list(tracker.feasible(draft, [late, *in_time], PACE_S)) == [False, True, True]
    assert list(tracker.feasible(draft, [late, in_time[0], waiting("c", 16, second_s - TOKEN_S)], PACE_S))[2] is False


def test_a_prompt_is_computed_in_steps_with_decodes_in_them(tracker: SlackTracker, draft: Draft) -> None:
    # They leave 32 tokens of a step, so 128 take four, with twice the margin of one.
    draft.budget.add_decodes(32, Reads(32 * 6, 6))
    targets = [(4 * 64 + 2 * 8 + 8 + missing) * TOKEN_S for missing in (0, -1)]
    prompts = [[waiting("a", 128, target_s)] for target_s in targets]
    assert [list(tracker.feasible(draft, each, PACE_S)) for each in prompts] == [[True], [False]]


def test_what_decodes_have_paid_for_a_prompt_has_free(tracker: SlackTracker) -> None:
    # The weights are read once, whatever is computed: alone two decodes take half of the step that 62 tokens fill.
    draft = Harness(cost_model=Weights(32)).core.scheduler.draft(0.0)
    draft.budget.add_decodes(2, Reads(2 * 6, 6))
    targets = [(2 + 62 + 8 + missing) * TOKEN_S for missing in (0, -1)]
    prompts = [[waiting("a", 62, target_s)] for target_s in targets]
    assert [list(tracker.feasible(draft, each, 64 * TOKEN_S)) for each in prompts] == [[True], [False]]


def test_a_token_behind_more_context_takes_more_of_a_step() -> None:
    steps = PromptSteps.beside(StepBudget(PerContext(), 100), 64 * TOKEN_S, least_tokens=4, longest_tokens=64)
    # 64 tokens without context fill a step, behind 32 tokens 32 do.
    assert [steps.of(*chunk) for chunk in ((32, 0), (64, 0), (32, 32))] == [0.75, 2.0, 1.25]


def test_what_is_in_every_step_gets_on_where_nothing_fits() -> None:
    budget = StepBudget(PerToken(), 100)
    budget.add_decodes(64, Reads(64 * 6, 6))
    steps = PromptSteps.beside(budget, 64 * TOKEN_S, least_tokens=4, longest_tokens=8)
    assert (steps.of(6, 0), steps.seconds(1.5)) == (1.5, (68 + 66) * TOKEN_S)


def test_a_begun_prompt_goes_on_without_the_margin_that_it_needed_to_begin() -> None:
    harness = Harness(cost_model=WITH_MARGIN, delivery_latency_s=0.0, max_num_batched_tokens=16)
    harness.core.handle(online("a", [7] * 32, max_tokens=1, ttft_slo_s=(32 + 8) * TOKEN_S))
    assert harness.step() == {"a": 16}
    harness.clock.sleep_until(harness.clock.now() + 8 * TOKEN_S)
    harness.core.handle(online("b", [8] * 32, max_tokens=1, ttft_slo_s=9.0))
    assert harness.step() == {"a": 16}


@pytest.mark.parametrize(("target_tokens", "step"), [(20, {"a": 16, "b": 4}), (15, {"b": 100, "a": 16})])
def test_what_comes_behind_a_prompt_that_ends_does_not_make_it_late(target_tokens: int, step: dict[str, int]) -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0)
    harness.core.handle(online("a", [7] * 16, max_tokens=1, ttft_slo_s=target_tokens * TOKEN_S))
    harness.core.handle(online("b", [8] * 100, max_tokens=1, ttft_slo_s=9.0))
    assert harness.step() == step


@pytest.mark.parametrize(("waited_tokens", "step"), [(0, {"a": 16}), (34, {"a": 16}), (36, {"a": 16, "late": 4})])
def test_the_block_of_a_late_prompt_does_not_make_it_late_either(waited_tokens: int, step: dict[str, int]) -> None:
    """Until it has waited for twice its target: then it gets on whatever that costs others."""
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0)
    harness.clock.sleep_until(100 * TOKEN_S)
    late_arrived_s = harness.clock.now() - waited_tokens * TOKEN_S
    harness.core.handle(online("late", [8] * 20, max_tokens=1, ttft_slo_s=17.5 * TOKEN_S, arrival_s=late_arrived_s))
    harness.core.handle(online("a", [7] * 16, max_tokens=1, ttft_slo_s=16.5 * TOKEN_S, arrival_s=harness.clock.now()))
    assert harness.step() == step


@pytest.mark.parametrize(("target_tokens", "step"), [(17, {"a": 16}), (15, {"a": 16, "b": 16})])
def test_of_two_prompts_that_would_be_in_time_without_the_margin_one_alone_has_its_chance(
    target_tokens: int, step: dict[str, int]
) -> None:
    harness = Harness(cost_model=WITH_MARGIN, delivery_latency_s=0.0)
    for token, name in enumerate(("a", "b")):
        harness.core.handle(online(name, [token] * 16, max_tokens=1, ttft_slo_s=target_tokens * TOKEN_S))
    assert harness.step() == step


def test_a_prompt_that_is_late_anyhow_ends_no_step() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0)
    for token, name in enumerate(("a", "b")):
        harness.core.handle(online(name, [token] * 16, max_tokens=1, ttft_slo_s=15 * TOKEN_S))
    assert harness.step() == {"a": 16, "b": 16}


def test_neither_does_offline_work() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, tpot_slo_s=50.0)
    harness.core.handle(online("a", [7] * 16, max_tokens=1, ttft_slo_s=20 * TOKEN_S))
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 16, "f": 4}


@pytest.mark.parametrize(("target_tokens", "chunk"), [(6400, 160 - 1), (1, 57 - 1)])
def test_what_streams_can_spare_is_for_prompts_that_can_be_in_time(target_tokens: int, chunk: int) -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0)
    harness.core.handle(online("a", [7], max_tokens=30, tpot_slo_s=64 * TOKEN_S))
    for _ in range(10):  # a step of one token each: it is far ahead
        harness.step()
    now_s = harness.clock.now()
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=target_tokens * TOKEN_S, arrival_s=now_s))
    assert harness.step() == {"a": 1, "b": chunk}


@pytest.mark.parametrize(
    ("target_s", "waited_s", "chunk"), [(7.0, 0.0, 96 - 1), (7.0, 8.0, 57 - 1), (1.5, 8.0, 96 - 1)]
)
def test_a_late_prompt_stalls_streams_only_where_prompts_are_not_cut(
    target_s: float, waited_s: float, chunk: int
) -> None:
    """Few come, so one may make a step 1.5 targets long: if it can be in time, or if a typical prompt and one of mean
    length, 20 and 70 tokens of time, take half of 1.5 s, so that pieces would make others late."""
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0)
    harness.core.handle(online("a", [7] * 20, max_tokens=30, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.clock.sleep_until(20.0)
    harness.step()
    arrival_s = harness.clock.now() - waited_s
    harness.core.handle(online("b", [8] * 120, ttft_slo_s=target_s, arrival_s=arrival_s))
    assert harness.step() == {"a": 1, "b": chunk}


def test_only_the_first_prompt_gets_a_blocks_worth_beside_streams_that_fill_the_bound() -> None:
    harness = Harness(cost_model=PerToken())
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=1.25 * TOKEN_S))
    harness.step()
    for name in ("b", "c"):
        harness.core.handle(online(name, [8] * 12, ttft_slo_s=9.0))
    assert harness.step() == {"a": 1, "b": 4}


def test_the_bound_for_requests_to_come_is_on_what_a_step_is_expected_to_take() -> None:
    harness = Harness(cost_model=InProportion(), delivery_latency_s=0.0, ttft_slo_s=64 * TOKEN_S)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": 32}


def test_a_step_of_prompts_is_not_longer_for_what_steps_of_decodes_scatter_by() -> None:
    harness = Harness(cost_model=NoisyDecodes(), delivery_latency_s=0.0, ttft_slo_s=64 * TOKEN_S)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    draft = harness.core.scheduler.draft(0.0)
    assert draft.budget.shape.num_tokens == 32
    # It overruns if it takes longer than the margin of its own kind allows.
    assert draft.whole_limit_s == draft.bounds_s["next arrival"] == 40 * TOKEN_S


@pytest.mark.parametrize(("expected_tokens", "tokens"), [(24, 24), (32, 25)])
def test_the_nearer_of_both_limits_counts_for_decodes_and_for_a_chunk(expected_tokens: int, tokens: int) -> None:
    budget = StepBudget(InProportion(), 100)
    budget.expected_limit_s = expected_tokens * TOKEN_S
    assert budget.most_decodes(np.full(100, 5), 32 * TOKEN_S) == tokens
    assert budget.largest_chunk(100, 0, 32 * TOKEN_S) == tokens


def test_the_slack_of_a_stream_has_to_hold_the_margin_too() -> None:
    harness = Harness(cost_model=InProportion(), delivery_latency_s=0.0, ttft_slo_s=1000 * TOKEN_S)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=40 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    harness.core.handle(flex("f", [8] * 100))
    assert harness.step() == {"a": 1, "f": 27}  # 28 and a quarter of them within 40, less a cushion of 4


def test_the_controllers_factor_is_on_the_limit_of_the_step() -> None:
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=64 * TOKEN_S)
    scheduler = harness.core.scheduler
    assert isinstance(scheduler, NeaptideScheduler)
    scheduler.controller.factor = 0.75
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": 24}


def test_the_controllers_factor_is_on_what_a_stream_can_spare() -> None:
    harness = Harness(cost_model=InProportion(), delivery_latency_s=0.0, ttft_slo_s=1000 * TOKEN_S)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=40 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    scheduler = harness.core.scheduler
    assert isinstance(scheduler, NeaptideScheduler)
    scheduler.controller.factor = 0.75
    harness.core.handle(flex("f", [8] * 100))
    assert harness.step() == {"a": 1, "f": 20}  # of 36 tokens' time 27, which 21 and their margin fill


@pytest.mark.parametrize(
    ("cost_model", "tokens_of_time", "chunk"), [(PerToken(), 12, 11), (PerPrompt(8), 20, 11), (PerPrompt(32), 41, 0)]
)
def test_a_small_chunk_is_taken_if_its_tokens_cost_little_more_than_those_of_a_usual_one(
    cost_model: PerToken, tokens_of_time: int, chunk: int
) -> None:
    harness = Harness(
        cost_model=cost_model, delivery_latency_s=0.0, ttft_slo_s=2 * tokens_of_time * TOKEN_S, tpot_slo_s=TOKEN_S
    )
    harness.core.handle(flex("f", [8], max_tokens=30))
    harness.step()
    harness.core.handle(flex("g", [9] * 100))
    assert harness.step() == {"f": 1} | ({"g": chunk} if chunk else {})


def test_tokens_that_a_large_prompt_leaves_of_a_step_are_too_few_for_another() -> None:
    harness = Harness(cost_model=PerToken(), max_num_batched_tokens=40, ttft_slo_s=100.0, tpot_slo_s=100.0)
    harness.core.handle(flex("f", [8] * 30))
    harness.core.handle(flex("g", [9] * 30))
    assert harness.step() == {"f": 30}


# ---- memory ----


def test_an_offline_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=32)
    harness.core.handle(flex("f", [8] * 16, max_tokens=20))
    harness.core.handle(flex("g", [9] * 40))
    assert harness.step() == {"f": 16}  # 8 blocks are left: enough for a chunk of 16 tokens, not for 40


def test_an_online_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=32)
    harness.core.handle(online("a", [8] * 16, max_tokens=20))
    harness.core.handle(online("b", [9] * 40))
    assert harness.step() == {"a": 16}


@pytest.mark.parametrize("another_waits", [False, True])
def test_the_only_offline_request_takes_the_headroom_unless_an_online_one_waits(another_waits: bool) -> None:
    harness = Harness(num_blocks=12, headroom_ratio=0.9)
    harness.core.handle(online("a", [7] * 30, max_tokens=3, tpot_slo_s=1.0))
    harness.step()
    harness.step()
    if another_waits:
        harness.core.handle(online("b", [9] * 30))
    harness.core.handle(flex("f", [8] * 12))
    assert harness.step() == ({"a": 1} if another_waits else {"a": 1, "f": 12})
