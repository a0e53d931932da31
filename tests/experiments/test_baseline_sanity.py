"""The known failure of ``priority``, on a virtual clock with step times of a real machine; attainment by deadlines."""

from dataclasses import replace

import pytest

from neaptide.engine.scheduler.policies import POLICIES
from neaptide.estimator.device_profile import load_profile
from neaptide.experiments import bros_case
from neaptide.experiments.baseline_sanity import PROFILE, outcome, run
from neaptide.experiments.vllm_cpu_case import ALONE, CPU_CASES, FLOODED, CpuRuns, cpu_rows, run_case
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario

SEEDS = range(1)
ONE_STREAM = Scenario(
    profile=load_profile(PROFILE), policy="fcfs", online=[TraceRequest(0.0, ((1, 64),), 20)], max_model_len=1024
)


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


def test_deadlines_from_arrival_let_an_early_first_token_pay_for_slow_gaps() -> None:
    first_s, gap_s = _first_token_and_gap_s()
    # The gaps exceed their target a little; a first token long before its deadline leaves room for that.
    ample = replace(ONE_STREAM, ttft_slo_s=first_s + 20 * gap_s, tpot_slo_s=0.9 * gap_s)
    assert outcome(ample).on_deadline == 1.0
    assert outcome(ample).result.online.attainment["tpot"] == 0.0
    tight = replace(ONE_STREAM, ttft_slo_s=1.01 * first_s, tpot_slo_s=0.9 * gap_s)
    assert outcome(tight).on_deadline == 0.0


def test_a_late_first_token_counts_though_the_last_one_is_in_time() -> None:
    first_s, gap_s = _first_token_and_gap_s()
    caught_up = outcome(replace(ONE_STREAM, ttft_slo_s=0.9 * first_s, tpot_slo_s=first_s + gap_s))
    assert caught_up.on_deadline == 0.0


@pytest.mark.full
def test_the_load_of_bros_runs_dry_nowhere_and_differs_by_policy() -> None:
    results = bros_case.run_bros_load(seed=0, seconds=2.0)
    assert all(result.valid for result in results.values())
    assert len({result.steps for result in results.values()}) == len(bros_case.POLICIES)


@pytest.mark.full
def test_every_policy_decides_otherwise_than_fcfs_and_no_row_fails() -> None:
    result = run(quick=True)
    assert not result.failed
    assert {name for name, one in result.data["policies"].items() if not one["differs_from_fcfs"]} == {"fcfs"}
    assert set(result.data["policies"]) == set(POLICIES)
    assert set(result.data["cpu"]) == {case.name for case in CPU_CASES}


def _first_token_and_gap_s() -> tuple[float, float]:
    online = outcome(ONE_STREAM).result.online
    first_s, gap_s = online.ttft_s["p50"], online.tpot_s["p50"]
    assert first_s is not None
    assert gap_s is not None
    return first_s, gap_s
