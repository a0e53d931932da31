"""BROS's Algorithm 1 by hand. Times in comments are milliseconds; B is the batch size, T a step of 10 + tokens."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.config import CacheConfig, SchedulerConfig
from neaptide.engine.kv.draft import NO_HIT
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.messages import SetOffline
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.table import RequestTable
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide_lab.policies.bros import AdaptiveBatchSize, BrosNotes, BrosScheduler
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch, online


def bros(initial: int, most: int, **fields: object) -> Harness:
    harness = Harness(**({"policy": "bros", "cost_model": PerTokenCost()} | fields))  # type: ignore[arg-type]
    scheduler_of(harness).batch_size = AdaptiveBatchSize(initial, most)
    return harness


def scheduler_of(harness: Harness) -> BrosScheduler:
    assert isinstance(harness.core.scheduler, BrosScheduler)
    return harness.core.scheduler


def prompt(num_tokens: int) -> list[int]:
    return list(range(6, 6 + num_tokens))


def add_online(harness: Harness, request_id: str, num_tokens: int, max_tokens: int, ttft: float, tpot: float) -> None:
    harness.core.handle(
        online(
            request_id,
            prompt(num_tokens),
            max_tokens,
            arrival_s=harness.clock.now(),
            ttft_slo_s=ttft,
            tpot_slo_s=tpot,
        )
    )


def test_rt_waits_while_its_slack_lasts_then_urgency_and_the_early_return_decide(tmp_path: Path) -> None:
    harness = bros(initial=2, most=8)
    harness.core.handle(batch(tmp_path, "be", [prompt(10)] * 3, max_tokens=3))
    add_online(harness, "a", 20, 4, ttft=0.1, tpot=0.05)
    # t=0, B=2. Step 1: a (T 30 <= its slack 100). Step 2: be:0 fits (T 40). be:1 finds the batch full and replaces a,
    # which can wait: 30, and 30 again for lack of a mean, <= 100. For be:2 no request is left to replace.
    assert harness.step() == {"be:0": 10, "be:1": 10}
    # t=30, B=3, mean 30. a has 70 left. be:0, be:1 decode beside it; be:2 replaces it: T 22 + mean 30 <= 70.
    assert harness.step() == {"be:0": 1, "be:1": 1, "be:2": 10}
    # t=52, B=4, mean 29.2. a has 48 left; all four fit: T 33.
    assert harness.step() == {"a": 20, "be:0": 1, "be:1": 1, "be:2": 1}
    # t=85, B=5. be:0 and be:1 ended. a's token came at 85, the next is due at 135.
    assert harness.step() == {"a": 1, "be:2": 1}
    add_online(harness, "b", 45, 2, ttft=0.02, tpot=0.05)
    # t=97, B=6. b, due at 117, is first although it is lost: alone it takes 55. The tightest slack is a's, 147 - 97 =
    # 50. An empty batch would help no request, so b is taken; it outlasts a's slack: early return, B back to 2.
    assert harness.step() == {"b": 45}
    assert scheduler_of(harness).batch_size.limit == 2
    # t=152. a is late by 5, b is due at 202: both fit into b's slack.
    assert harness.step() == {"a": 1, "b": 1}
    # t=164, B=3. b has ended.
    assert harness.step() == {"a": 1}
    assert harness.step() == {}


def test_rt_that_cannot_wait_another_step_is_not_replaced(tmp_path: Path) -> None:
    harness = bros(initial=1, most=1)
    harness.core.handle(batch(tmp_path, "be", [prompt(10)], max_tokens=9))
    add_online(harness, "a", 10, 2, ttft=0.06, tpot=0.03)
    # t=0, B=1 for good. be:0 replaces a: T 20, and 20 again for lack of a mean, <= 60.
    assert harness.step() == {"be:0": 10}
    # t=20. a has 40 left: T 11 + mean 20 = 31 <= 40.
    assert harness.step() == {"be:0": 1}
    # t=31. a has 29 left: T 11 + mean 19.1 = 30.1 > 29: it stays.
    assert harness.step() == {"a": 10}
    # t=51. a has 30 left: T 11 + mean 19.19 = 30.19 > 30: it stays, and ends.
    assert harness.step() == {"a": 1}
    assert harness.step() == {"be:0": 1}


def test_a_late_request_does_not_stop_others_but_goes_first() -> None:
    harness = bros(initial=8, most=8)
    add_online(harness, "a", 4, 9, ttft=1.0, tpot=0.1)
    harness.step()
    harness.clock.sleep_until(0.05)
    harness.core.handle(online("b", prompt(6), 2, arrival_s=0.0, ttft_slo_s=0.01, tpot_slo_s=0.1))
    # b was due at 10, a at 114: both are taken, within a's slack.
    assert list(harness.step()) == ["b", "a"]


def test_a_step_within_the_slack_of_late_requests_only_is_not_bounded(tmp_path: Path) -> None:
    harness = bros(initial=8, most=8)
    harness.core.handle(batch(tmp_path, "be", [prompt(50)], max_tokens=2))
    harness.clock.sleep_until(1.0)
    harness.core.handle(online("late", prompt(6), 2, arrival_s=0.0, ttft_slo_s=0.01, tpot_slo_s=0.1))
    assert harness.step() == {"late": 6, "be:0": 50}


def test_offline_work_is_bounded_by_the_tightest_slack(tmp_path: Path) -> None:
    harness = bros(initial=8, most=8)
    add_online(harness, "a", 4, 9, ttft=1.0, tpot=0.04)
    harness.step()
    harness.core.handle(batch(tmp_path, "be", [prompt(40), prompt(4)], max_tokens=2))
    # a's slack is 40. With be:0 the step would take 51, and instead of a 50: it waits, and be:1 behind it.
    assert harness.step() == {"a": 1}


def test_paused_offline_work_takes_no_part(tmp_path: Path) -> None:
    harness = bros(initial=8, most=8)
    harness.core.handle(batch(tmp_path, "be", [prompt(4)], max_tokens=4))
    harness.step()
    harness.core.handle(SetOffline(True))
    add_online(harness, "a", 4, 1, ttft=1.0, tpot=0.1)
    assert harness.step() == {"a": 4}
    assert harness.step() == {}
    harness.core.handle(SetOffline(False))
    assert harness.step() == {"be:0": 1}


# ---- memory: blocks of 4 tokens ----


def test_rt_drops_the_youngest_be_request_which_is_computed_again(tmp_path: Path) -> None:
    harness = bros(initial=4, most=4, num_blocks=6)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)] * 2, max_tokens=4))
    # Both take 2 of 6 blocks.
    assert harness.step() == {"be:0": 8, "be:1": 8}
    # t=26. a lacks 3 blocks, 2 are free: be:1 is dropped. be:0 grows into a third one.
    add_online(harness, "a", 10, 2, ttft=0.06, tpot=0.05)
    assert harness.step() == {"a": 10, "be:0": 1}
    # be:1 would need 3 blocks for its 9 tokens; none is free.
    assert harness.step() == {"a": 1, "be:0": 1}
    # a has ended, its 3 blocks are free.
    assert harness.step() == {"be:0": 1, "be:1": 9}
    assert [harness.step(), harness.step(), harness.step()] == [{"be:1": 1}, {"be:1": 1}, {}]
    assert harness.ends["be:1"][0].num_preemptions == 1


def test_resident_rt_drops_the_rt_request_with_most_time_left_to_grow() -> None:
    harness = bros(initial=4, most=4, num_blocks=6)
    for request_id, tpot in (("soon", 0.1), ("latest", 0.9), ("later", 0.5)):
        add_online(harness, request_id, 8, 4, ttft=1.0, tpot=tpot)
    # All six blocks.
    assert harness.step() == {"soon": 8, "latest": 8, "later": 8}
    # t=34. All three must grow. soon, due at 134, drops latest, due at 934: two blocks for soon and later.
    assert harness.step() == {"soon": 1, "later": 1}
    # latest was dropped in that step, and needs three blocks for its 9 tokens now.
    assert harness.step() == {"soon": 1, "later": 1}


def test_waiting_rt_drops_no_rt_request_however_urgent_and_resident_ones_go_on() -> None:
    harness = bros(initial=4, most=4, num_blocks=6)
    add_online(harness, "a", 7, 9, ttft=1.0, tpot=0.9)
    add_online(harness, "b", 7, 9, ttft=1.0, tpot=0.9)
    assert harness.step() == {"a": 7, "b": 7}
    # t=24. urgent lacks 3 blocks, 2 are free. small, behind it, would fit, but memory goes by urgency.
    add_online(harness, "urgent", 9, 2, ttft=0.08, tpot=0.5)
    add_online(harness, "small", 2, 2, ttft=0.2, tpot=0.5)
    assert harness.step() == {"a": 1, "b": 1}


def test_resident_be_drops_a_younger_one_to_grow(tmp_path: Path) -> None:
    harness = bros(initial=4, most=4, num_blocks=4)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)] * 2, max_tokens=3))
    assert harness.step() == {"be:0": 8, "be:1": 8}
    # be:0 needs a third block: be:1 gives its two away, and is not admitted again in the same step.
    assert harness.step() == {"be:0": 1}
    assert harness.step() == {"be:0": 1}
    assert harness.step() == {"be:1": 9}


def test_seats_are_taken_from_offline_work(tmp_path: Path) -> None:
    harness = bros(initial=4, most=4, max_num_seqs=2)
    harness.core.handle(batch(tmp_path, "be", [prompt(4)] * 2, max_tokens=9))
    assert harness.step() == {"be:0": 4, "be:1": 4}
    add_online(harness, "a", 4, 1, ttft=0.02, tpot=0.1)
    assert harness.step() == {"a": 4, "be:0": 1}


# ---- the adaptive batch size, B8 ----


def test_batch_size_grows_by_one_and_falls_back_to_the_initial_one() -> None:
    size = AdaptiveBatchSize(initial=16, most=19)
    trace = [size.limit]
    for returned_early in (False, False, False, False, True, False, True):
        size.observe(returned_early)
        trace.append(size.limit)
    assert trace == [16, 17, 18, 19, 19, 16, 17, 16]


def test_batch_size_is_never_larger_than_the_seats() -> None:
    assert AdaptiveBatchSize(initial=16, most=4).limit == 4


# ---- pulling, B7 ----


@st.composite
def rt_requests(draw: st.DrawFn) -> list[tuple[float, float, float, bool, float | None]]:
    """(arrival, TTFT, TPOT, is resident, when its last token came)."""
    times = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])
    return draw(
        st.lists(st.tuples(times, times, times, st.booleans(), st.one_of(st.none(), times)), min_size=1, max_size=20)
    )


@given(rt_requests(), st.sampled_from([0.0, 0.3, 0.9]))
def test_pulling_gives_the_order_of_a_full_sort(
    states: list[tuple[float, float, float, bool, float | None]], now_s: float
) -> None:
    kv = KVCacheManager(1000, RequestTable(20, 16, 4), enable_prefix_cache=False)
    scheduler = BrosScheduler(SchedulerConfig(), kv, ConstantCostModel(0.2), FixedHeadroom(1000, 0.0))
    requests, last_s = [], {}
    for index, (arrival_s, ttft_s, tpot_s, is_resident, returned_s) in enumerate(states):
        request = Request(f"r{index:02}", [7] * 5, SamplingParams(), Tier.DEFAULT, arrival_s, ttft_s, tpot_s)
        if returned_s is not None:
            request._output_token_ids.append(8)
            last_s[request] = returned_s
        scheduler.queues.add_online(request)
        if is_resident:
            scheduler.queues.start(request)
            kv.admit(request, NO_HIT)
            kv.grow(request, request.num_tokens)
        requests.append(request)
    draft = Draft(1, now_s, scheduler.queues, StepBudget(scheduler.cost_model, 4096))
    draft.notes = BrosNotes(last_s)
    urgency = scheduler.urgency(draft)
    by_deadline = sorted(requests, key=urgency)
    slacks = [urgency(request)[0] - now_s for request in by_deadline]
    assert list(scheduler.pull(draft)) == by_deadline
    assert scheduler.tightest_slack_s(draft) == min((slack for slack in slacks if slack >= 0.2), default=math.inf)


def test_bros_differs_from_fcfs_and_from_round_robin(tmp_path: Path) -> None:
    """Offline work that came first does not hold up a request that is urgent."""
    steps = {}
    for policy in ("bros", "fcfs", "round-robin"):
        cache = CacheConfig(block_size=4, enable_prefix_cache=False)
        harness = Harness(policy=policy, cost_model=PerTokenCost(), cache=cache, max_num_batched_tokens=64)
        harness.core.handle(batch(tmp_path, policy, [prompt(40)] * 3, max_tokens=4))
        harness.clock.sleep_until(0.001)
        add_online(harness, "a", 30, 2, ttft=0.05, tpot=0.02)
        steps[policy] = [harness.step(), harness.step()]
    assert steps == {
        "bros": [{"a": 30}, {"a": 1}],
        "fcfs": [{"fcfs:0": 40, "fcfs:1": 24}, {"fcfs:0": 1, "fcfs:1": 16, "fcfs:2": 40, "a": 7}],
        "round-robin": [{"a": 30}, {"round-robin:0": 40, "round-robin:1": 40, "round-robin:2": 40}],
    }


@pytest.mark.parametrize("max_num_batched_tokens", [16, 4096])
def test_prompts_are_never_cut(max_num_batched_tokens: int, tmp_path: Path) -> None:
    harness = bros(initial=2, most=2, num_blocks=600, max_num_batched_tokens=max_num_batched_tokens)
    harness.core.handle(batch(tmp_path, "be", [prompt(1000)], max_tokens=1))
    assert harness.step() == {"be:0": 1000}
