"""What is learned from steps: those that overrun shrink what the next ones may take, and stalls what offline work may
spend of the streams' slack."""

from pathlib import Path

import numpy as np
import pytest
from neaptide.engine.scheduler.cushion import Cushion

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AbortRequest, AddBatch
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.trace_executor import TraceExecutor
from tests.engine.harness import Harness, flex, online

NUM_BLOCKS, ROWS = 256, 4


class Machine:
    """Implements ``CostModel``: as slow as it is set."""

    seconds = 0.1

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self.seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def offline_engine(directory: Path, machine: Machine) -> EngineCore:
    """Believes that every step takes 0.1 s, and has offline rows to decode for long."""
    clock = VirtualClock()
    executor = TraceExecutor(NUM_BLOCKS, machine, clock, lambda _: 1 << 30, lambda _: False)
    config = EngineConfig(cache=CacheConfig(num_blocks=NUM_BLOCKS), scheduler=SchedulerConfig(max_model_len=1024))
    core = EngineCore(config, executor, ConstantCostModel(0.1), FixedHeadroom(NUM_BLOCKS, 0.0), clock)
    with TokenFileWriter(directory / "rows") as writer:
        for row in range(ROWS):
            writer.append([100 + row] * 8)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    core.handle(AddBatch("b", str(directory / "rows"), list(range(ROWS)), [params], [0] * ROWS, [], 1e9))
    return core


def budgets_s(core: EngineCore, steps: int) -> list[float]:
    return [stats.budget_s for _ in range(steps) for stats in core.step().stats]


def test_the_time_budget_shrinks_while_steps_overrun_and_comes_back(tmp_path: Path) -> None:
    machine = Machine()
    core = offline_engine(tmp_path, machine)
    (budget_s,) = set(budgets_s(core, 5))
    machine.seconds = 10.0 * budget_s
    overrun = budgets_s(core, 20)
    assert overrun[-1] == pytest.approx(0.6 * budget_s)
    assert overrun == sorted(overrun, reverse=True)
    machine.seconds = 0.1
    budgets_s(core, 1)
    assert budgets_s(core, 20)[-1] == pytest.approx(0.8 * budget_s)


def test_a_step_that_takes_what_the_factor_took_off_has_not_overrun(tmp_path: Path) -> None:
    machine = Machine()
    core = offline_engine(tmp_path, machine)
    (budget_s,) = set(budgets_s(core, 5))
    machine.seconds = 10.0 * budget_s
    budgets_s(core, 20)
    machine.seconds = 0.95 * budget_s
    budgets_s(core, 1)
    assert budgets_s(core, 20)[-1] == pytest.approx(0.8 * budget_s)


# ---- the cushion ----

TOKEN_S = 1 / 64


class PerToken(Machine):
    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(TOKEN_S * shape.num_tokens, 0.0)


@pytest.mark.parametrize(("after_s", "share"), [(0.0, 4.0), (60.0, 2.0), (120.0, 1.0), (180.0, 1.0)])
def test_a_cushion_is_as_deep_as_the_last_dip_and_loses_half_of_it_in_a_minute(after_s: float, share: float) -> None:
    cushion = Cushion()
    cushion.observe(5.0, 4.0)
    assert cushion.share(5.0 + after_s) == share


def test_a_dip_that_is_less_than_what_is_left_of_the_deepest_changes_nothing() -> None:
    cushion = Cushion()
    cushion.observe(0.0, 4.0)
    cushion.observe(60.0, 1.5)
    assert cushion.share(60.0) == 2.0


def test_a_cushion_is_never_more_than_six_targets_however_late_streams_have_been() -> None:
    cushion = Cushion()
    cushion.observe(0.0, 100.0)
    assert (cushion.share(0.0), cushion.share(60.0)) == (6.0, 3.0)


@pytest.mark.parametrize(
    ("share", "num_output", "in_hand"), [(1.0, 5, 0.5), (2.0, 5, 1.0), (6.0, 5, 2.0), (6.0, 40, 6.0)]
)
def test_a_stream_gains_its_cushion_over_ten_tokens_but_no_more_than_four_tenths_with_each(
    share: float, num_output: int, in_hand: float
) -> None:
    assert Cushion().in_hand(np.array([num_output]), share) == [in_hand]


@pytest.mark.parametrize(
    ("answers", "in_hand"),
    [([32] * 4, 1.0), ([120] * 4, 0.25), ([120, 9, 9], 1.0), ([9, 120, 120], 0.25), ([9] * 200 + [120] * 80, 0.25)],
)
def test_a_cushion_is_gained_over_a_third_of_the_median_of_the_last_answers(answers: list[int], in_hand: float) -> None:
    """After ten tokens; a hundred answers count."""
    cushion = Cushion()
    for num_tokens in answers:
        cushion.observe_answer(num_tokens)
    assert cushion.in_hand(np.array([10]), 1.0) == [in_hand]


def streaming_harness() -> Harness:
    """A stream with 20 tokens and a target of 64 tokens' time."""
    harness = Harness(cost_model=PerToken(), delivery_latency_s=0.0, ttft_slo_s=50.0)
    harness.core.handle(online("a", [7], max_tokens=50, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0, arrival_s=-20.0))
    for _ in range(20):
        harness.step()
    return harness


def set_due(harness: Harness, tokens: int) -> None:
    """The stream's next token is due in the time of so many."""
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s = harness.clock.now() + (tokens - 64 * stream.num_output_tokens) * TOKEN_S


@pytest.mark.parametrize(("stalled_tokens", "offline_tokens"), [(0, 95), (192, 47)])
def test_offline_work_leaves_streams_what_they_have_lost_in_a_stall(stalled_tokens: int, offline_tokens: int) -> None:
    harness = streaming_harness()
    set_due(harness, 65 - stalled_tokens)  # a cushion of 64 and the token itself, or so much less
    harness.step()
    set_due(harness, 240)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": offline_tokens}


def test_online_prompts_may_spend_a_cushion_that_is_there_for_them() -> None:
    """All but the 64 tokens that are left to every stream, where so many prompts come that pace is kept."""
    harness = streaming_harness()
    set_due(harness, 65 - 192)
    harness.step()
    now_s, gone = harness.clock.now(), [f"gone{k}" for k in range(40)]
    for request_id in gone:
        harness.core.handle(online(request_id, [9] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S, arrival_s=now_s))
    harness.core.handle(AbortRequest(gone))
    set_due(harness, 140)
    harness.core.handle(online("b", [8] * 200, ttft_slo_s=50.0, tpot_slo_s=64 * TOKEN_S))
    assert harness.step() == {"a": 1, "b": 75}
