"""Pools of unusual shapes, run to their end by the engine with and without a plan."""

from collections.abc import Sequence

import pytest

from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.simulator import Run, simulate
from tests.simulation.scenes import BASE, constant, profile

BLOCK = 16
PLANS = (None, "neaptide", DUAL_SCAN)
pytestmark = pytest.mark.parametrize("plan", PLANS)


def worked_off(rows: Sequence[TraceRequest], plan: str | None, num_blocks: int = 64, **fields: object) -> Run:
    run = simulate(
        constant(
            (),
            [OfflineSet("scene", list(rows), synthetic=True)],
            profile=profile(num_blocks=num_blocks, block_size=BLOCK),
            block_size=BLOCK,
            plan=plan,
            refill=False,
            window_s=(0.0, 1e9),
            **fields,
        )
    )
    assert run.num_failed == 0
    assert run.result.offline.requests_completed + run.num_left_out == len(rows)
    return run


def row(*segments: tuple[int, int], output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(0.0, tuple((BASE + content, tokens) for content, tokens in segments), output_tokens)


@pytest.mark.parametrize("copies", [200, pytest.param(5000, marks=pytest.mark.full)])
def test_the_same_prompt_is_computed_once(copies: int, plan: str | None) -> None:
    run = worked_off([row((0, 4 * BLOCK + 1))] * copies, plan)
    num_tokens = 4 * BLOCK + 1
    assert run.result.kv.saving_ratio == pytest.approx((copies - 1) * 4 * BLOCK / (copies * num_tokens))


@pytest.mark.parametrize("depth", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_prompts_each_a_prefix_of_the_next_compute_each_token_once(depth: int, plan: str | None) -> None:
    rows = [row(*((k, BLOCK) for k in range(length + 1)), (10_000 + length, 1)) for length in range(depth)]
    run = worked_off(rows, plan, num_blocks=2 * depth, max_num_seqs=4)
    num_tokens = sum((length + 1) * BLOCK + 1 for length in range(depth))
    assert run.result.kv.saving_ratio == pytest.approx(1 - (depth * BLOCK + depth) / num_tokens)


def test_one_giant_prompt_runs_among_small_ones(plan: str | None) -> None:
    rows = [row((k, 20)) for k in range(20)]
    rows.insert(7, row((100, 60 * BLOCK)))
    assert worked_off(rows, plan).result.offline.requests_completed == 21


def test_a_prompt_larger_than_the_memory_is_refused_and_the_others_run(plan: str | None) -> None:
    rows = [row((0, 20)), row((1, 65 * BLOCK)), row((2, 20))]
    assert worked_off(rows, plan).num_left_out == 1


def test_a_single_request_runs(plan: str | None) -> None:
    assert worked_off([row((0, 20), output_tokens=3)], plan).result.offline.requests_completed == 1


def test_without_a_request_there_is_nothing_to_plan(plan: str | None) -> None:
    online = [TraceRequest(0.0, ((1, 8),), 2)]
    empty = OfflineSet("scene", [], synthetic=True)
    run = simulate(constant(online, [empty], plan=plan))
    assert (run.result.online.requests, run.result.offline.requests_completed) == (1, 0)
