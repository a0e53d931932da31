"""``slidingserve``: its search, its knapsack and its steps by hand. Blocks have 4 tokens."""

import math
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tests.policies.chats import add_chat
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide_lab.policies.slidingserve import Slack, SlidingServe, knapsack, ternary_search
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch


class SquareCost:
    """10 ms and n * n / 100 ms for n tokens."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction((10 + shape.num_tokens**2 / 100) / 1000, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass


def sliding(cost_model: CostModel | None = None, **fields: object) -> Harness:
    values: dict[str, object] = {"policy": "slidingserve", "num_blocks": 9000}
    return Harness(cost_model=cost_model or PerTokenCost(), **(values | fields))  # type: ignore[arg-type]


def scheduler_of(harness: Harness) -> SlidingServe:
    assert isinstance(harness.core.scheduler, SlidingServe)
    return harness.core.scheduler


# ---- the parts ----


@given(st.integers(0, 40), st.integers(0, 60))
def test_the_search_finds_the_peak(peak: int, high: int) -> None:
    assert ternary_search(0, high, lambda x: -abs(x - peak)) == min(peak, high)


def test_of_equal_values_the_search_takes_the_largest_argument() -> None:
    assert ternary_search(0, 50, lambda _: 1.0) == 50


def test_the_knapsack_takes_the_most_items_and_the_earlier_ones_of_equal_sets() -> None:
    assert knapsack([5, 3, 2, 2], 7) == [1, 2, 3]
    assert knapsack([3, 3, 3], 6) == [0, 1]
    assert knapsack([9], 8) == []


@given(st.lists(st.integers(1, 12), max_size=7), st.integers(0, 30))
def test_no_other_set_that_fits_has_more_items(weights: list[int], capacity: int) -> None:
    chosen = knapsack(weights, capacity)
    assert sum(weights[index] for index in chosen) <= capacity
    larger = combinations(range(len(weights)), len(chosen) + 1)
    assert all(sum(weights[index] for index in some) > capacity for some in larger)


def test_slack_is_that_of_the_tightest_stream_that_can_be_in_time() -> None:
    assert Slack.of([0.3, 0.2, 0.01], [0.1, 0.3, 0.1], alone_s=0.02) == Slack(0.2, pytest.approx(0.4))
    assert Slack.of([-1.0, 0.01], [0.1, 0.05], alone_s=0.02) == Slack(0.05, 0.1)
    assert Slack.of([], [], alone_s=0.02) == Slack(math.inf, math.inf)


def decodes(count: int) -> BatchShape:
    shape = BatchShape()
    shape.add_decodes(count, 10 * count, 10)
    return shape


def test_the_chunks_share_what_two_greedy_steps_would_take_in_the_least_time() -> None:
    """A step of n tokens takes 10 + n * n / 100 ms. Greedily 112 tokens now, as 120.4 fit into 155 ms with a decode.

    Then 66 in the 55.3 ms that are left of 193: 192 ms. Halves of about 89 take 13 ms less.
    """
    scheduler, cost = scheduler_of(sliding(SquareCost())), SquareCost()
    chunks = scheduler.best_chunks(decodes(1), 1000, 1000, Slack(0.155, 0.193))
    assert chunks == (96, 82)

    def seconds(now: int) -> float:
        return sum(cost.predict(decodes(1).plus(n, 0)).seconds for n in (now, 178 - now))

    assert seconds(96) == min(seconds(now) for now in range(16, 113, 16))


def test_the_greedy_chunk_stays_where_no_division_saves_time() -> None:
    """Every token takes as long as any other: 4 decodes leave 66 tokens of 80 ms, in units of 16 64."""
    scheduler = scheduler_of(sliding())
    assert scheduler.best_chunks(decodes(4), 200, 200, Slack(0.08, 0.14)) == (64, 48)


def test_what_waits_is_computed_at_once_where_nothing_bounds_it() -> None:
    scheduler = scheduler_of(sliding())
    assert scheduler.best_chunks(BatchShape(), 300, 2048, Slack(math.inf, math.inf)) == (300, 0)


def test_no_chunk_fits_into_no_slack() -> None:
    assert scheduler_of(sliding()).best_chunks(decodes(4), 200, 200, Slack(0.02, 0.05)) == (0, 0)


# ---- steps ----


def test_protected_prompts_come_first_then_urgent_ones_then_the_shortest() -> None:
    """A token takes 1.01 ms."""
    harness = sliding(max_num_batched_tokens=1000)
    add_chat(harness, "lost", 300, 0.2)  # takes 303 of 200 ms
    add_chat(harness, "urgent", 190, 0.35)  # 192 of 350 ms
    add_chat(harness, "tiny", 21, 0.31)  # 21 of 310 ms
    add_chat(harness, "long", 300, 3.1)  # 303 of 3,100 ms
    draft = harness.core.scheduler.draft(harness.clock.now())
    assert [request.request_id for request, _ in draft.parts()] == ["urgent", "tiny", "long", "lost"]


def test_streams_that_are_late_anyway_do_not_bound_the_chunk() -> None:
    harness = sliding()
    add_chat(harness, "stream", 8, 0.001, max_tokens=20, tpot_slo_s=0.1)
    harness.step()
    harness.clock.sleep_until(5.0)
    add_chat(harness, "long", 3000, 30.0)
    assert harness.step() == {"stream": 1, "long": 80}  # 100 ms, as the TPOT target; 89 tokens in whole units


def test_where_a_first_token_would_be_late_the_knapsack_drops_the_fewest() -> None:
    """A full step takes 1.01 s for 1,000 tokens. `first` takes 303 of its 400 ms, `second` 202 of 300.

    In the sorter's order `second` is late behind `first`. One of them can be in time; `third` is not asked about.
    """
    harness = sliding(max_num_batched_tokens=1000)
    add_chat(harness, "first", 300, 0.4)
    add_chat(harness, "second", 200, 0.3)
    add_chat(harness, "third", 50, 5.0)
    draft = harness.core.scheduler.draft(harness.clock.now())
    # ceil(303 / 2.34) = 130 of 128 units: `first` alone is too long for the time that `second` has.
    assert [request.request_id for request, _ in draft.parts()] == ["second", "third", "first"]


def test_the_step_is_greedy_where_a_first_token_would_be_late() -> None:
    """Two of three equal prompts are in time. A step of n tokens takes 10 + n * n / 100 ms."""
    harness = sliding(SquareCost())
    add_chat(harness, "stream", 8, 0.1, max_tokens=20, tpot_slo_s=0.1)
    harness.step()  # ends at 11 ms; the second token is due at 200 ms
    for name in ("a", "bb", "ccc"):
        add_chat(harness, name, 100, 0.4)
    # 128 tokens take 176 ms of 189, 144 take 220; so 100 tokens take 138 ms each.
    assert harness.step() == {"stream": 1, "a": 100, "bb": 28}


def test_offline_work_has_what_is_left_of_the_chunk(tmp_path: Path) -> None:
    harness = sliding()
    add_chat(harness, "stream", 8, 0.1, max_tokens=20, tpot_slo_s=0.4)
    harness.step()
    harness.core.handle(batch(tmp_path, "job", [[9] * 3000]))
    add_chat(harness, "short", 100, 30.0)
    # 482 ms are left: 471 tokens, and 464 in whole units.
    assert harness.step() == {"stream": 1, "short": 100, "job:0": 364}


def test_alone_offline_work_has_whole_steps(tmp_path: Path) -> None:
    harness = sliding()
    harness.core.handle(batch(tmp_path, "job", [[9] * 3000]))
    assert harness.step() == {"job:0": 2048}
