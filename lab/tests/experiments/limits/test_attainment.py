"""The clairvoyant bound on attainment: exact where it is tight, and never below what a policy does."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.limits.attainment import (
    Job,
    attainment_bound,
    jobs_of,
    most_by_work,
    most_in_time,
    most_jobs,
)
from tests.simulation.scenes import constant, offline, online, profile

TTFT_S = 10.0


def most_of_all_subsets(arrivals_s: list[float], prefills_s: list[float]) -> int:
    """The size of the largest set that first come, first served has in time."""

    def is_in_time(chosen: tuple[int, ...]) -> bool:
        free_s = 0.0
        for index in chosen:
            free_s = max(free_s, arrivals_s[index]) + prefills_s[index]
            if free_s > arrivals_s[index] + TTFT_S + 1e-9:
                return False
        return True

    indices = range(len(arrivals_s))
    return max(size for size in range(len(arrivals_s) + 1) if any(map(is_in_time, combinations(indices, size))))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 10)), max_size=8))
def test_the_most_prompts_in_time_are_those_of_the_best_subset(prompts: list[tuple[int, int]]) -> None:
    arrivals_s = sorted(float(arrival) for arrival, _ in prompts)
    prefills_s = [float(prefill) for _, prefill in prompts]
    counts = most_in_time(arrivals_s, prefills_s, TTFT_S)
    assert counts == [most_of_all_subsets(arrivals_s[:k], prefills_s[:k]) for k in range(1, len(prompts) + 1)]


def test_the_longest_prompt_is_dropped_not_the_last() -> None:
    assert most_in_time([0.0, 0.0, 0.0, 0.0], [9.0, 3.0, 3.0, 3.0], TTFT_S) == [1, 1, 2, 3]


def test_a_prompt_before_a_pause_cannot_make_room_for_one_after_it() -> None:
    assert most_in_time([0.0, 20.0, 20.0], [10.0, 6.0, 6.0], TTFT_S) == [1, 2, 2]


def job(arrival_s: float, prefill_s: float, num_decodes: int = 0, decode_s: float = 0.0, step_s: float = 0.01) -> Job:
    return Job(arrival_s, prefill_s, decode_s, num_decodes, 0.001, step_s)


def test_decodes_count_as_work_where_they_must_be_done() -> None:
    """Each has 0.1 s of prompt and 100 decodes of 10 ms; the last of them is due 5 s after the first token."""
    jobs = [job(0.0, 0.1, 100, 0.01) for _ in range(20)]
    # 6 s until the end of all: 5 requests of 1.1 s.
    assert most_by_work(jobs, ttft_slo_s=1.0, tpot_slo_s=0.05) == 5
    assert most_by_work(jobs, ttft_slo_s=1.0, tpot_slo_s=0.05, num_devices=2) == 10


def test_decodes_that_fit_until_their_deadline_are_left_out() -> None:
    """Within 1 s 900 of 1,000 decodes can wait for the 9 s after it, one in 10 ms."""
    jobs = [job(0.0, 0.0, 1000, 0.009) for _ in range(3)]
    assert most_by_work(jobs, ttft_slo_s=1.0, tpot_slo_s=0.009) == 1


def test_requests_that_cannot_be_in_time_alone_do_not_count() -> None:
    jobs = [job(0.0, 1.1), job(0.0, 0.1, 10, step_s=0.06), job(0.0, 0.1, 0, step_s=0.06), job(0.0, 0.1, 10)]
    assert most_jobs(jobs, ttft_slo_s=1.0, tpot_slo_s=0.05) == 2


def test_groups_add_up() -> None:
    """Two bursts of which one request each is late; over both bursts there would be time for all."""
    burst = [job(0.0, 0.6), job(0.0, 0.6)]
    later = [replace(each, arrival_s=100.0) for each in burst]
    assert most_jobs([*burst, *later], ttft_slo_s=1.0, tpot_slo_s=0.05) == 2


# ---- of scenarios ----


def scene(requests: list[TraceRequest], **fields: object) -> Scenario:
    """Steps of 4 ms and 0.1 ms a token; the profile's own times."""
    values: dict[str, object] = {
        "profile": profile(num_blocks=4000),
        "online": requests,
        "block_size": 4,
        "ttft_slo_s": 0.11,
        "tpot_slo_s": 0.02,
        "headroom": "fixed",
    }
    return Scenario(**(values | fields))  # type: ignore[arg-type]


def test_the_bound_is_reached_where_it_is_tight() -> None:
    """A prompt of 400 tokens takes 48 ms and the step's 4.2: two of three are done in 110 ms, in any order."""
    three = scene(online((0.0, 400, 1), (0.0, 400, 1), (0.0, 400, 1)), policy="qoserve", max_num_batched_tokens=400)
    assert attainment_bound(three) == pytest.approx(2 / 3)
    assert simulate(three).result.attained == pytest.approx(2 / 3)


def test_what_others_share_is_not_counted() -> None:
    alone = TraceRequest(0.0, ((1, 400),), 1)
    shared = TraceRequest(0.0, ((1, 200), (2, 200)), 1)
    first, second = jobs_of(scene([alone, shared]), [alone, shared])
    assert second.prefill_s < 0.6 * first.prefill_s
    (beside,) = jobs_of(scene([alone], offline=[offline((0, 4, 1))]), [alone])
    assert beside == replace(first, decode_s=beside.decode_s, step_s=beside.step_s)


def test_requests_outside_the_window_do_not_count() -> None:
    requests = online((0.0, 4000, 1), (5.0, 8, 1))
    assert attainment_bound(scene(requests)) == 0.5
    assert attainment_bound(scene(requests, window_s=(4.0, 6.0))) == 1.0
    assert attainment_bound(scene(requests, window_s=(7.0, 8.0))) is None


def test_other_step_times_than_the_profiles_are_refused() -> None:
    with pytest.raises(ValueError, match="step times of the profile"):
        attainment_bound(constant(online((0.0, 8, 1))))


REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 500), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12
)


@pytest.mark.parametrize("policy", ["neaptide", "priority", "qoserve", "slidingserve"])
@given(requests=REQUESTS, flood=st.booleans(), step_tokens=st.sampled_from([64, 512]))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_no_policy_exceeds_the_bound(
    policy: str, requests: list[tuple[int, int, int, int]], flood: bool, step_tokens: int
) -> None:
    """Requests in 40 ms, some of which share the first half of their prompts with others or with offline rows."""
    load = sorted(
        (
            TraceRequest(ms / 1000, ((group, tokens),) if not group else ((group, 100), (10 + n, tokens)), outputs)
            for n, (ms, tokens, outputs, group) in enumerate(requests)
        ),
        key=lambda request: request.arrival_s,
    )
    rows = [offline(*[(8, 30, 6)] * 5)] if flood else []
    some = scene(load, policy=policy, offline=rows, max_num_batched_tokens=step_tokens, max_num_seqs=16, drain_s=5.0)
    bound = attainment_bound(some)
    assert bound is not None
    assert simulate(some).result.attained <= bound
