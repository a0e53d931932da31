"""How long a step may take, to the token: margins, egress, and the bounds that hold where no stream asks for one.

Times are whole numbers of binary fractions of a second, so that a limit is met exactly or not at all.
"""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.interfaces import Prediction
from neaptide.engine.scheduler.budget import PromptSteps, Reads, StepBudget, largest_within
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


def test_no_online_prompt_makes_a_step_longer_than_five_seconds() -> None:
    harness = Harness(cost_model=PerToken(1 / 8))
    harness.core.handle(online("a", [7] * 100, max_tokens=1, ttft_slo_s=100.0))
    assert harness.step() == {"a": 40}


def test_where_half_of_the_ttft_target_is_more_than_five_seconds_online_prompts_may_take_that() -> None:
    harness = Harness(cost_model=PerToken(1 / 8), ttft_slo_s=20.0)
    harness.core.handle(online("a", [7] * 100, max_tokens=1, ttft_slo_s=100.0))
    assert harness.step() == {"a": 80}


class LaunchesWithMargin(InProportion):
    """A step costs 16 tokens' time whatever is in it."""

    def predict(self, shape: BatchShape) -> Prediction:
        seconds = super().predict(shape).seconds + 16 * TOKEN_S
        return Prediction(seconds, seconds / 4)


def test_an_idle_step_may_take_three_quarters_of_a_token_target_however_tight_the_first_token_is() -> None:
    """Its margin is within that."""
    harness = Harness(cost_model=LaunchesWithMargin(), delivery_latency_s=0.0, ttft_slo_s=TOKEN_S, tpot_slo_s=2.0)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    harness.step()
    last = harness.watch.last
    assert last is not None
    assert 90 * TOKEN_S < last.plan.predicted_s + last.plan.margin_s <= 96 * TOKEN_S


def test_offline_work_beside_a_stream_leaves_room_for_the_margin() -> None:
    harness = Harness(cost_model=LaunchesWithMargin(), delivery_latency_s=0.0, ttft_slo_s=1000 * TOKEN_S)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    harness.core.handle(flex("f", [8] * 100))
    assert harness.step()["f"] > 20
    last = harness.watch.last
    assert last is not None
    assert last.plan.predicted_s + last.plan.margin_s <= 64 * TOKEN_S


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


def test_a_token_behind_more_context_takes_more_of_a_step() -> None:
    (steps,) = PromptSteps.beside(StepBudget(PerContext(), 100), [64 * TOKEN_S], least_tokens=4, longest_tokens=64)
    # 64 tokens without context fill a step, behind 32 tokens 32 do.
    assert steps.of(np.array([32.0, 64.0, 32.0]), np.array([0.0, 0.0, 32.0])).tolist() == [0.75, 2.0, 1.25]


def test_what_is_in_every_step_gets_on_where_nothing_fits() -> None:
    budget = StepBudget(PerToken(), 100)
    budget.add_decodes(64, Reads(64 * 6, 6))
    (steps,) = PromptSteps.beside(budget, [64 * TOKEN_S], least_tokens=4, longest_tokens=8)
    assert (steps.of(np.array([6.0]), np.array([0.0])).tolist(), steps.seconds(1.5)) == ([1.5], (68 + 66) * TOKEN_S)


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
    fields = {"delivery_latency_s": 0.0, "tpot_slo_s": 50.0, "left_out": ("arrivals",), "late_price_s": 1000.0}
    harness = Harness(cost_model=PerToken(), **fields)
    harness.core.handle(online("a", [7] * 16, max_tokens=1, ttft_slo_s=20 * TOKEN_S))
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    tokens = harness.step()
    assert tokens["a"] == 16
    assert 0 < tokens["f"] <= 4


def test_only_the_first_prompt_gets_a_blocks_worth_beside_streams_that_fill_the_bound() -> None:
    harness = Harness(cost_model=PerToken())
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=1.25 * TOKEN_S))
    harness.step()
    for name in ("b", "c"):
        harness.core.handle(online(name, [8] * 12, ttft_slo_s=9.0))
    assert harness.step() == {"a": 1, "b": 4}


@pytest.mark.parametrize(("expected_tokens", "tokens"), [(24, 24), (32, 25)])
def test_the_nearer_of_both_limits_counts_for_decodes_and_for_a_chunk(expected_tokens: int, tokens: int) -> None:
    budget = StepBudget(InProportion(), 100)
    budget.expected_limit_s = expected_tokens * TOKEN_S
    assert budget.most_decodes(np.full(100, 5), 32 * TOKEN_S) == tokens
    assert budget.largest_chunk(100, 0, 32 * TOKEN_S) == tokens


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
