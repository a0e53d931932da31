"""Cases as data, and the loads that they stand for."""

import math
import random
from dataclasses import replace

import pytest

from lab.tests.adversary.cases import CASE
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide_lab.adversary.case import PROFILES, Chats, Rows, WrongCost, from_json, load_of, to_json
from neaptide_lab.adversary.drawing import (
    MAX_DURATION_S,
    MAX_REQUESTS,
    machine_of,
    mutated,
    random_case,
    tidy,
    tightened,
)


@pytest.mark.parametrize("seed", range(20))
def test_a_case_survives_json(seed: int) -> None:
    draw = random.Random(seed)
    case = random_case(draw, PROFILES)
    case = mutated(case, random_case(draw, PROFILES), draw, PROFILES)
    assert from_json(to_json(case)) == case


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_case_is_small_however_often_it_is_changed(seed: int) -> None:
    draw = random.Random(seed)
    case = random_case(draw, PROFILES)
    for _ in range(10):
        case = mutated(case, case, draw, PROFILES)
    assert case.num_requests <= MAX_REQUESTS
    assert case.duration_s <= MAX_DURATION_S


def test_requests_that_do_not_fit_into_the_memory_are_left_out() -> None:
    case = replace(CASE, kv_blocks=100, chats=(Chats(2, 1.0, 700, 10, turns=3),), rows=(Rows(2, 1600, 1),))
    load = load_of(case, "neaptide")
    assert [request.input_tokens for request in load.scenario.online] == [700, 1410] * 2
    assert [len(job.requests) for job in load.scenario.offline] == [0]


def test_tidying_twice_changes_nothing() -> None:
    draw = random.Random(3)
    for _ in range(20):
        case = random_case(draw, PROFILES)
        assert tidy(case) == case


def test_tightened_targets_are_a_little_above_what_is_reached() -> None:
    tight = tightened(CASE, (0.2, 0.5), random.Random(1))
    assert 0.2 < tight.ttft_s < 0.55
    assert 0.025 < tight.tpot_s < 0.07
    assert tightened(CASE, (0.2, 0.0), random.Random(1)).tpot_s == CASE.tpot_s


def test_a_turn_begins_with_the_turns_before_it_and_conversations_share_the_prefix_alone() -> None:
    case = replace(CASE, chats=(Chats(2, 1.0, 100, 10, prefix_tokens=64, turns=2, think_s=1.5),), rows=())
    first, second, again, later = load_of(case, "neaptide").scenario.online
    assert [r.arrival_s for r in (first, second, again, later)] == [0.0, 1.0, 1.5, 2.5]
    assert again.segments[:2] == first.segments
    assert [tokens for _, tokens in again.segments] == [64, 100, 10, 100]
    assert first.segments[0] == second.segments[0]
    assert not {content for content, _ in first.segments[1:]} & {content for content, _ in later.segments[1:]}


def test_bursts_keep_the_mean_rate() -> None:
    case = replace(CASE, chats=(Chats(6, 0.2, 100, 10, burst=3),), rows=())
    arrivals_s = [request.arrival_s for request in load_of(case, "neaptide").scenario.online]
    assert arrivals_s == pytest.approx([0.0] * 3 + [0.6] * 3)


def test_arrivals_after_the_duration_are_left_out() -> None:
    case = replace(CASE, duration_s=1.0)
    assert len(load_of(case, "neaptide").scenario.online) == 4


def test_rows_share_prefixes_in_groups() -> None:
    case = replace(CASE, rows=(Rows(4, 100, 10, prefix_tokens=50, prefix_rows=2),))
    rows = load_of(case, "neaptide").scenario.offline[0].requests
    prefixes = [row.segments[0] for row in rows]
    assert prefixes[0] == prefixes[1] != prefixes[2] == prefixes[3]


def test_a_sibling_has_other_lengths_of_the_same_mean() -> None:
    case = replace(CASE, chats=(Chats(8, 0.1, 500, 10, spread=0.5),))
    lengths = [[r.input_tokens for r in load_of(case.sibling(k), "neaptide").scenario.online] for k in (0, 1)]
    assert lengths[0] != lengths[1]
    assert lengths[0] == [r.input_tokens for r in load_of(case, "neaptide").scenario.online]


def test_a_wrong_cost_model_scales_and_lengthens_some_steps() -> None:
    base, shape = ConstantCostModel(0.01), BatchShape()
    exact = WrongCost(base, replace(CASE, scale=1.3))
    assert exact.predict(shape).seconds == pytest.approx(0.013)
    rare = WrongCost(base, replace(CASE, rare_every=10, rare_factor=12.0))
    seconds = [rare.predict(shape).seconds for _ in range(1000)]
    assert {round(s, 9) for s in seconds} == {0.01, 0.12}
    assert 50 < sum(s > 0.1 for s in seconds) < 200


def test_machines_differ_as_their_profiles_do() -> None:
    slow, fast = machine_of("cpu-111m"), machine_of("h100-80g-llama-3.1-8b")
    assert slow.token_s > fast.token_s
    assert slow.step_s > fast.step_s
    assert math.isfinite(fast.request_s(1000, 100))
