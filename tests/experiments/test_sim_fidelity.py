"""The load and the machine of sim-fidelity, with a virtual machine in the place of the real one."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.batch import BatchShape
from neaptide.engine.clock import Clock, VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.trace_executor import TraceExecutor
from neaptide.experiments.fidelity_runs import Load, MachineModel, Outcome, Step, drive, online_percentiles
from neaptide.experiments.sim_fidelity import _simulation_rows

NUM_BLOCKS = 1024
STEP_S = 0.01


class SlowerFromThen:
    """Implements ``CostModel``: steps take twice as long from a moment on."""

    def __init__(self, clock: Clock, then_s: float) -> None:
        self._clock = clock
        self._then_s = then_s

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(STEP_S * (2.0 if self._clock.now() >= self._then_s else 1.0), 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def make_load(directory: Path, duration_s: float = 20.0, rate_rps: float = 2.0) -> Load:
    return Load.make(rate_rps, duration_s, 3000, (0.3, 0.05), 1000, directory)


def run(load: Load, truth: CostModel, clock: VirtualClock) -> Outcome:
    executor = TraceExecutor(NUM_BLOCKS, truth, clock, lambda _: 1 << 30, lambda name: name.startswith("online"))
    scheduler = SchedulerConfig(max_model_len=1024, max_num_seqs=8)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    model, headroom = ConstantCostModel(STEP_S), FixedHeadroom(NUM_BLOCKS, 0.1)
    return drive(EngineCore(config, executor, model, headroom, clock), clock, load)


def test_every_online_request_ends_and_offline_work_lasts_until_the_end(tmp_path: Path) -> None:
    load, clock = make_load(tmp_path), VirtualClock()
    outcome = run(load, ConstantCostModel(STEP_S), clock)
    assert [record.tokens for record in outcome.measures.online.values()] == [32] * len(load.arrivals_s)
    assert clock.now() >= load.duration_s
    assert not outcome.dry


def test_percentiles_are_of_requests_after_the_warm_up(tmp_path: Path) -> None:
    load = make_load(tmp_path)
    outcome = run(load, ConstantCostModel(STEP_S), VirtualClock())
    # Every step takes 10 ms: a request waits for the running one to end, and then for its own.
    found = online_percentiles(outcome.measures, outcome)
    assert found["TPOT"] == pytest.approx({"p50": STEP_S, "p90": STEP_S, "p99": STEP_S})
    assert STEP_S <= found["TTFT"]["p50"] <= 2 * STEP_S + 1e-9


def test_offline_rows_that_run_out_are_noticed(tmp_path: Path) -> None:
    load = Load.make(2.0, 5.0, 3, (0.3, 0.05), 1000, tmp_path)
    assert run(load, ConstantCostModel(STEP_S), VirtualClock()).dry


def steps_of(seconds: list[float], scale: float = 1.0) -> list[Step]:
    shape = BatchShape(decode_requests=1, decode_context_tokens=9)
    starts_s = np.cumsum([0.0, *seconds[:-1]]).tolist()
    return [Step(start_s, scale * one_s, 0.0, shape) for start_s, one_s in zip(starts_s, seconds, strict=True)]


def test_the_drift_is_measured_over_predicted_time() -> None:
    clock = VirtualClock()
    machine = MachineModel(ConstantCostModel(STEP_S), steps_of([STEP_S] * 2000 + [2 * STEP_S] * 1000), clock)
    assert machine.predict(BatchShape()).seconds == pytest.approx(STEP_S)
    clock.sleep_until(35.0)
    assert machine.predict(BatchShape()).seconds == pytest.approx(2 * STEP_S)
    assert machine.noise == 0.0


def test_without_drift_the_profile_is_taken_as_it_is() -> None:
    machine = MachineModel(ConstantCostModel(STEP_S), steps_of([3 * STEP_S] * 100), VirtualClock(), drift=False)
    assert machine.predict(BatchShape()).seconds == pytest.approx(STEP_S)
    assert machine.mape == pytest.approx(2 / 3)


def test_a_simulation_with_the_drift_of_a_run_is_that_run(tmp_path: Path) -> None:
    load, clock = make_load(tmp_path, duration_s=40.0), VirtualClock()
    real = run(load, SlowerFromThen(clock, 20.0), clock)
    virtual = VirtualClock()
    simulated = run(load, MachineModel(ConstantCostModel(STEP_S), real.steps, virtual), virtual)
    plain = run(load, ConstantCostModel(STEP_S), VirtualClock())
    rate = real.tokens_per_s(online=False)
    assert simulated.tokens_per_s(online=False) == pytest.approx(rate, rel=0.03)
    assert plain.tokens_per_s(online=False) > 1.2 * rate


@pytest.mark.full
def test_a_replay_of_a_real_run_decides_as_it_did() -> None:
    from neaptide.experiments import sim_fidelity

    result = sim_fidelity.run(quick=True)
    assert result.rows[0].case.startswith("replay")
    assert result.rows[0].ours == 0.0


def test_a_measure_of_the_simulation_is_the_median_over_its_draws(tmp_path: Path) -> None:
    load = make_load(tmp_path)
    real, slow = (run(load, ConstantCostModel(seconds), VirtualClock()) for seconds in (STEP_S, 2.0 * STEP_S))
    assert all(row.ratio == 1.0 for row in _simulation_rows(real, [slow, real, real]))
    assert not any(row.holds for row in _simulation_rows(real, [slow, real, slow]) if "online tokens" not in row.case)
