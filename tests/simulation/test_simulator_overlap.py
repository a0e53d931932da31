"""The simulator with a step in flight while the next is planned."""

from pathlib import Path

import pytest

from neaptide.engine.record.step_log import StepLine, read_log
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.simulation.simulator import Run, simulate
from tests.simulation.scenes import STEP_S, constant, mixed, offline, online

ROWS = offline(*((24, 1 + k, 3 + k % 5) for k in range(12)))


def run(policy: str, depth: int) -> Run:
    return simulate(constant([], [ROWS], policy=policy, overlap_depth=depth, refill=False))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_comes_to_the_end_of_a_mixed_load(policy: str) -> None:
    done = simulate(mixed(policy=policy, overlap_depth=1, num_online=12, num_rows=12))
    assert done.num_unfinished == done.num_failed == 0
    assert done.result.online.requests == 12


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_offline_rows_are_completed(policy: str) -> None:
    assert len(run(policy, 1).measures.offline_ends_s) == len(ROWS.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_throughput_is_the_same_where_planning_takes_no_time(policy: str) -> None:
    """With ends by length: one that the engine learns of at the commit costs a step in which its seat is not free."""
    rows = offline(*((24, 1 + k, 5) for k in range(12)))
    makespans_s = [
        simulate(
            constant([], [rows], policy=policy, overlap_depth=depth, refill=False, max_output_tokens=5, max_num_seqs=4)
        ).result.offline.makespan_s
        for depth in (0, 1)
    ]
    assert makespans_s[1] == pytest.approx(makespans_s[0])


def test_a_token_behind_the_end_is_no_output() -> None:
    steps = run("fcfs", 1).measures.steps((0.0, 1e9))
    assert steps["output_tokens"].sum() == sum(request.output_tokens for request in ROWS.requests)


def test_an_online_answer_takes_as_many_steps() -> None:
    (record,) = simulate(constant(online((0.0, 8, 5)), overlap_depth=1)).measures.online.values()
    assert (record.first_s, record.last_s) == pytest.approx((STEP_S, 5 * STEP_S))


def test_the_step_log_names_every_request_once_where_it_ends(tmp_path: Path) -> None:
    """A request of the step in flight may have ended with the step before it: what it computes there is dropped."""
    log = tmp_path / "log"
    simulate(mixed(policy="fcfs", overlap_depth=1, num_online=12, num_rows=20), step_log=log)
    steps = [line for line in read_log(log) if isinstance(line, StepLine)]
    running: set[int] = set()
    for line in steps:
        running -= set(line.preempt)
        admitted = {handle for handle, _ in line.admit}
        assert not admitted & running
        running |= admitted
        ended = {handle for handle, *_ in line.end}
        assert ended <= running
        running -= ended
    assert sum(len(line.end) for line in steps) > 12
