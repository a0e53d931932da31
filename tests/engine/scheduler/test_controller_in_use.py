"""The controller of the time budget, through the engine: steps that overrun shrink what the next ones may take."""

from pathlib import Path

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.trace_executor import TraceExecutor

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
