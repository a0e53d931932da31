"""Jobs whose rows share prefixes: each waits in the plan for the other's rows, unless its deadline presses."""

import pytest

from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.simulator import Run, simulate
from tests.simulation.scenes import BASE, constant, profile

BLOCK, PREFIX_BLOCKS, GROUPS, ROWS = 4, 8, 12, 3
NUM_BLOCKS = 5 * PREFIX_BLOCKS
"""Of the cache: for those that two ends have at work, and what leaves is not wanted any more."""
PREFIX_TOKENS = PREFIX_BLOCKS * BLOCK
BOUND = (2 * ROWS - 1) * PREFIX_TOKENS / (2 * ROWS * (PREFIX_TOKENS + 1))
"""Saved if every prefix is computed once for both jobs ..."""
APART = (ROWS - 1) * PREFIX_TOKENS / (ROWS * (PREFIX_TOKENS + 1))
"""... and if once for each of them."""


def job(number: int, groups: list[int], deadline_s: float) -> OfflineSet:
    """Some rows of every group, group after group, with one token of their own."""
    rows = [
        TraceRequest(0.0, ((BASE + group, PREFIX_TOKENS), (BASE + 100 + ROWS * group + k + 1000 * number, 1)), 1)
        for group in groups
        for k in range(ROWS)
    ]
    return OfflineSet(f"scene{number}", rows, synthetic=True, content="scene", deadline_s=deadline_s)


def worked_off(plan: str | None, second_deadline_s: float = 1e7) -> Run:
    """Two jobs, the second with its groups the other way round."""
    groups = list(range(GROUPS))
    return simulate(
        constant(
            (),
            [job(0, groups, 1e7), job(1, groups[::-1], second_deadline_s)],
            profile=profile(num_blocks=NUM_BLOCKS),
            plan=plan,
            planning_scale=0.0,
            refill=False,
            window_s=(0.0, 1e9),
            max_num_batched_tokens=PREFIX_TOKENS + 1,
            headroom="fixed@0",
            offline_max_kv_ratio=1.0,
        )
    )


@pytest.mark.parametrize("plan", ["neaptide", DUAL_SCAN])
def test_along_a_plan_a_prefix_of_two_jobs_is_computed_once(plan: str) -> None:
    run = worked_off(plan)
    assert run.result.kv.saving_ratio == pytest.approx(BOUND, abs=1e-12)
    assert run.result.offline.requests_completed == 2 * GROUPS * ROWS


def test_by_turns_each_job_computes_what_has_left_the_cache_again() -> None:
    saving = worked_off(None).result.kv.saving_ratio
    assert saving is not None
    assert APART <= saving < BOUND
