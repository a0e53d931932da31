"""Steps of decodes: what planning and committing them leaves out, it may leave out."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step
from tests.engine.harness import Harness, flex, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.policies import PUBLISHES_LATE
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, PerToken


class Continued(EngineObserver):
    """Looks at every step before it is committed."""

    def __init__(self) -> None:
        self.num_steps = {True: 0, False: 0}

    def executed(self, step: Step, result: StepResult) -> None:
        plan, table = step.plan, step.plan.table
        prompt, size = table.prompt[plan.rows], table.blocks.block_size
        are_behind = (plan.num_tokens == 1) & (plan.num_computed >= prompt) & plan.sample
        current = step.is_current()
        if current.all():
            assert plan.is_continued == are_behind.all()
            self.num_steps[plan.is_continued] += 1
        if plan.is_continued:
            rows = plan.rows[current]
            assert (prompt[current] // size <= table.indexed[rows]).all(), "a prompt's block has not been published"
            assert np.array_equal(plan.output_position > 0, plan.sample)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["neaptide", "fcfs", PUBLISHES_LATE])
def test_rows_that_continue_have_published_their_prompts(policy: str, depth: int, tmp_path: Path) -> None:
    harness, continued = Harness(policy=policy, overlap_depth=depth, **SMALL_POOL), Continued()  # type: ignore[arg-type]
    harness.core.subscribe(continued)
    History(3, tmp_path).play(harness, 120)
    assert min(continued.num_steps.values()) > 10


def test_the_last_token_of_a_prompt_may_come_alone_and_is_published_all_the_same() -> None:
    harness = Harness(policy=PUBLISHES_LATE, max_num_batched_tokens=15)
    harness.core.handle(online("a", [7] * 16, max_tokens=3))
    assert [harness.step() for _ in range(3)] == [{"a": 15}, {"a": 1}, {"a": 1}]
    harness.core.handle(online("b", [7] * 16 + [8], max_tokens=1))
    harness.run()
    (output,) = harness.ends["b"]
    assert output.num_cached_tokens == 16


class Sums(EngineObserver):
    """Adds up the parts of every plan."""

    def __init__(self) -> None:
        self.num_cut = 0
        """Steps with some offline decodes, and without others."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan, shape = step.plan, BatchShape()
        for num_tokens, num_computed in zip(plan.num_tokens.tolist(), plan.num_computed.tolist(), strict=True):
            shape.add(num_tokens, num_computed)
        assert plan.shape == shape
        self.num_cut += 0 < np.count_nonzero(~step.is_online) < len(scheduler.queues.running_offline)


def test_what_a_step_costs_is_that_of_its_parts_though_some_decodes_sit_out() -> None:
    harness, sums = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0), Sums()
    harness.core.subscribe(sums)
    for index in range(6):
        harness.core.handle(flex(f"f{index}", [8] * (index + 2), max_tokens=40))
    harness.step()
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=4 * TOKEN_S, ttft_slo_s=50.0))
    for _ in range(15):
        harness.step()
    assert sums.num_cut > 5


class Ended(EngineObserver):
    """What requests had at their ends."""

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []

    def ended(self, request: Request, reason: FinishReason) -> None:
        self.token_ids.append(request.token_ids.tolist())


def test_what_is_computed_again_token_by_token_keeps_the_tokens_that_it_has() -> None:
    ended = Ended()
    for is_preempted in (False, True):
        harness = Harness(max_num_batched_tokens=1, cache=CacheConfig(block_size=16))
        harness.core.subscribe(ended)
        harness.core.handle(online("a", [7, 8, 9], max_tokens=5, ttft_slo_s=100.0, tpot_slo_s=100.0))
        for _ in range(5):
            harness.step()
        assert len(harness.tokens["a"]) == 3
        if is_preempted:
            harness.core.scheduler.queues.preempt(harness.core.scheduler.queues.running_online["a"])
        assert len(harness.run()) == 2 + 5 * is_preempted
    assert len(ended.token_ids[0]) == 3 + 5
    assert ended.token_ids[0] == ended.token_ids[1]
