"""What online work leaves, and the pace of prompts beside decodes."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.offline.planned import Ends
from neaptide.engine.offline.planning.work_left import StepMeans, WorkLeft
from neaptide.engine.scheduler.residual import (
    LEAST_LEFT,
    LEAST_PACED_TOKENS,
    Residual,
    in_whole_tiles,
    num_paced,
    paced_tokens,
    usual_step,
)
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.steps.step import Step

ENDS = Ends(
    held_tokens=np.ones(4),
    lasting_steps=np.ones(4),
    densities=[4.0, 3.0, 2.0, 1.0],
    window_memory_s=[1.0] * 4,
    root_density=2.0,
    token_s=1e-3,
    kv_token_s=1e-6,
    turns=np.arange(4),
)


def step(online_tokens: int, online_context: int) -> Step:
    """Of an online and an offline request."""
    plan = SimpleNamespace(num_tokens=np.array([online_tokens, 900]), num_computed=np.array([online_context, 10**6]))
    return cast(Step, SimpleNamespace(plan=plan, is_online=np.array([True, False])))


def residual(*steps: tuple[int, int], seconds: float = 1.0) -> Residual:
    found = Residual()
    for tokens, context in steps:
        found.observe(step(tokens, context), seconds, ENDS)
    return found


def test_before_any_step_the_plans_own_density_is_aimed_at() -> None:
    assert Residual().density(1.4) == 1.4


@pytest.mark.parametrize("root", [0.3, 1.0, 2.5])
def test_a_steady_residual_leaves_the_plans_own_density(root: float) -> None:
    assert residual(*[(200, 100_000)] * 5).density(root) == root


def test_offline_requests_do_not_count() -> None:
    found = residual((0, 0))
    assert found._compute_s == found._memory_s == [1.0, 1.0]


def test_prompts_that_take_compute_for_the_moment_lower_the_density_of_a_pool_that_wants_memory() -> None:
    found = residual(*[(0, 0)] * 2000, *[(800, 0)] * 200)
    # Half a minute knows nothing of what lies minutes back: 0.2 s of compute for 1 s of memory.
    assert found.density(0.7) == pytest.approx(0.2, rel=0.01)
    # In the long run more is left than a pool of 0.1 wants.
    assert found.density(0.1) == 0.1


def test_streams_that_take_bandwidth_for_the_moment_raise_the_density_of_a_pool_that_wants_compute() -> None:
    found = residual(*[(0, 0)] * 2000, *[(0, 750_000)] * 200)
    assert found.density(4.5) == 4.5
    assert found.density(2.5) == pytest.approx(4.0, rel=0.01)


def test_something_is_always_left() -> None:
    assert residual((5000, 0)).density(0.9) == pytest.approx(max(0.9, LEAST_LEFT))


def test_the_pace_gives_a_step_the_density() -> None:
    # 2 s of compute for each that is read: 4e6 tokens read take 4 s, 8,000 tokens 8 s, of which 100 are the decodes'.
    assert paced_tokens(ENDS, 2.0, 100, 4_000_000) == 7_900


def test_a_few_decodes_do_not_stop_prompts() -> None:
    assert paced_tokens(ENDS, 2.0, 100, 1000) == LEAST_PACED_TOKENS


@pytest.mark.parametrize("read_tokens", [0, 1_000_000, 4_000_000])
def test_prompts_follow_what_is_read_weights_included(read_tokens: int) -> None:
    """Weights take 1 s, full memory 4 s: a mix of 2 s of compute for each of KV has 8 s for 5 s, at every fill."""
    shape = BatchShape()
    shape.add_decodes(10, read_tokens, read_tokens)
    usual = StepMeans(held=4_000_000, read=4_000_000)
    paced = num_paced(ENDS, 2.0, BatchShape(), shape, least_s=1.0, usual=usual)
    assert paced + 10 == pytest.approx(1000 * 1.6 * (1.0 + 1e-6 * read_tokens), abs=1)


def test_decodes_of_online_requests_bring_no_prompts() -> None:
    before = BatchShape()
    before.add_decodes(20, 3_000_000, 200_000)
    after = before.copy()
    after.add_decodes(10, 1_000_000, 100_000)
    assert num_paced(ENDS, 2.0, before, after, least_s=0.0, usual=StepMeans(held=1.0, read=1.0)) == 2000 - 10


def test_what_only_prompts_hold_is_no_reading_of_decodes() -> None:
    """Half of what the density counts is held by prompts in their own step: the decodes stand for all of it."""
    shape = BatchShape()
    shape.add_decodes(10, 1_000_000, 100_000)
    usual = StepMeans(held=4_000_000, read=2_000_000)
    assert num_paced(ENDS, 2.0, BatchShape(), shape, least_s=0.0, usual=usual) == 2 * 2000 - 10


def test_steps_to_come_are_those_that_memory_needs_and_those_in_which_it_runs_dry() -> None:
    """10,000 tokens held for 40 steps fill a memory of 4,000 for 100, and the longest answer costs 0.3 x 50 more."""
    left = WorkLeft(density=2.0, held_tokens=400_000, read_tokens=200_000, longest_steps=50)
    assert usual_step(left, 4000) == pytest.approx((400_000 / 115, 200_000 / 115))


def test_where_nothing_is_left_to_hold_a_step_has_nothing() -> None:
    assert usual_step(WorkLeft(2.0, 0.0, 0.0, 0.0), 4000) == (0.0, 0.0)
    assert usual_step(WorkLeft(2.0, 400_000.0, 200_000.0, 0.0), 0) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("num_paced_tokens", "num_others", "expected"),
    [
        (500, 140, 500),  # 640 are five tiles
        (563, 140, 500),  # 703: five are nearer than six
        (564, 140, 628),  # 704 is halfway: six
        (128, 100, 156),  # a short step has two and not one
        (10, 128, 128),  # some tokens there are always
    ],
)
def test_a_step_has_whole_tiles(num_paced_tokens: int, num_others: int, expected: int) -> None:
    assert in_whole_tiles(num_paced_tokens, num_others, tile_tokens=128) == expected


@given(st.integers(LEAST_PACED_TOKENS, 10_000), st.integers(0, 3000), st.sampled_from([1, 16, 64, 128, 256]))
def test_whole_tiles_are_the_nearest_ones(num_paced_tokens: int, num_others: int, tile_tokens: int) -> None:
    found = in_whole_tiles(num_paced_tokens, num_others, tile_tokens)
    assert (found + num_others) % tile_tokens == 0
    assert found > 0
    assert abs(found - num_paced_tokens) <= tile_tokens // 2 or found <= tile_tokens
