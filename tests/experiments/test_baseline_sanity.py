"""The known failure of ``priority``, on a virtual clock with step times of a real machine."""

import pytest

from neaptide.engine.scheduler.policies import POLICIES
from neaptide.experiments.baseline_sanity import ALONE, FLOODED, CpuRuns, run, run_case

SEEDS = range(1)


@pytest.fixture(scope="module")
def alone() -> CpuRuns:
    return run_case(ALONE, SEEDS)


@pytest.fixture(scope="module")
def flooded() -> CpuRuns:
    return run_case(FLOODED, SEEDS)


def test_priority_lets_a_flood_raise_the_p99_of_ttft_many_fold(alone: CpuRuns, flooded: CpuRuns) -> None:
    assert flooded.ttft_ms("p99") > 5 * alone.ttft_ms("p99")


def test_priority_lets_a_flood_raise_tpot_many_fold(alone: CpuRuns, flooded: CpuRuns) -> None:
    assert flooded.tpot_ms("p50") > 3 * alone.tpot_ms("p50")
    assert flooded.tpot_ms("p99") > 5 * alone.tpot_ms("p99")


def test_priority_preempts_nobody_while_that_happens(flooded: CpuRuns) -> None:
    assert flooded.num_preemptions == 0


def test_online_alone_is_as_fast_as_the_measured_machine(alone: CpuRuns) -> None:
    # The step times were derived from these two.
    assert alone.ttft_ms("p50") == pytest.approx(ALONE.ttft_p50_ms, rel=0.1)
    assert alone.tpot_ms("p50") == pytest.approx(ALONE.tpot_p50_ms, rel=0.05)


@pytest.mark.full
def test_every_policy_decides_otherwise_than_fcfs_and_no_row_fails() -> None:
    result = run(quick=True)
    assert not result.failed
    assert {name for name, one in result.data["policies"].items() if not one["differs_from_fcfs"]} == {"fcfs"}
    assert set(result.data["policies"]) == set(POLICIES)
