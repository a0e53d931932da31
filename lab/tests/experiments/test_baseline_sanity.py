"""The known failure of ``priority``, on a virtual clock with step times of a real machine."""

import pytest

from neaptide.engine.scheduler.policies import POLICIES
from neaptide_lab.experiments.baseline_sanity import run
from neaptide_lab.experiments.bros import one_load
from neaptide_lab.experiments.cases.vllm_cpu import ALONE, CPU_CASES, FLOODED, CpuRuns, cpu_rows, run_case
from neaptide_lab.policies import RIVALS

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


def test_online_alone_comes_out_as_it_went_into_the_step_times(alone: CpuRuns) -> None:
    assert alone.ttft_ms("p50") == pytest.approx(ALONE.ttft_p50_ms, rel=0.1)
    assert alone.tpot_ms("p50") == pytest.approx(ALONE.tpot_p50_ms, rel=0.05)


def test_inputs_of_the_step_times_are_compared_with_nothing(alone: CpuRuns, flooded: CpuRuns) -> None:
    inputs = [row for row in cpu_rows([alone, flooded]) if "input" in row.case]
    assert [(row.case, row.ratio) for row in inputs] == [
        ("CPU, alone: TTFT p50 (an input)", None),
        ("CPU, alone: TPOT p50 (an input)", None),
    ]


@pytest.mark.full
def test_the_load_of_bros_runs_dry_nowhere_and_differs_by_policy() -> None:
    results = one_load.run_bros_load(seed=0, seconds=2.0)
    assert all(result.valid for result in results.values())
    assert len({result.steps for result in results.values()}) == len(one_load.POLICIES)


@pytest.mark.full
def test_every_policy_decides_otherwise_than_fcfs_and_no_row_fails() -> None:
    result = run(quick=True)
    assert not result.failed
    assert {name for name, one in result.data["policies"].items() if not one["differs_from_fcfs"]} == {"fcfs"}
    assert set(result.data["policies"]) == {*POLICIES, *RIVALS}
    assert set(result.data["cpu"]) == {case.name for case in CPU_CASES}
