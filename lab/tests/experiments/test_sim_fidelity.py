"""sim-fidelity with a virtual machine in the place of the real one: what passes, and what must not."""

import copy
import math
import random
from itertools import islice, pairwise, repeat
from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.clock import Clock, VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel, Regime
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.executors.simulated.trace_executor import TraceExecutor
from neaptide.simulation.driven_runs import DrivenLoad, DrivenStep, MachineModel, Outcome, drive, online_percentiles
from neaptide.simulation.replay import Replay
from neaptide_lab.experiments import sim_fidelity
from neaptide_lab.experiments.sim_fidelity import (
    ERRORS,
    Fidelity,
    Findings,
    Replayed,
    _replay_latencies,
    _simulation_rows,
    result_of,
    simulated_machine,
)

NUM_BLOCKS = 1024
STEP_S = 0.01


class SlowerFromThen:
    """Implements ``CostModel``: steps take twice as long from a moment on."""

    def __init__(self, base: CostModel, clock: Clock, then_s: float) -> None:
        self._base = base
        self._clock = clock
        self._then_s = then_s

    def predict(self, shape: BatchShape) -> Prediction:
        factor = 2.0 if self._clock.now() >= self._then_s else 1.0
        return Prediction(self._base.predict(shape).seconds * factor, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def make_load(directory: Path, duration_s: float = 10.0, rate_rps: float = 2.0) -> DrivenLoad:
    return DrivenLoad.make(rate_rps, duration_s, 3000, (0.3, 0.05), 1000, directory)


def run(load: DrivenLoad, truth: CostModel, clock: VirtualClock) -> Outcome:
    executor = TraceExecutor(NUM_BLOCKS, truth, clock, lambda _: 1 << 30, lambda name: name.startswith("online"))
    scheduler = SchedulerConfig(max_model_len=1024, max_num_seqs=8)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    model, headroom = ConstantCostModel(STEP_S), FixedHeadroom(NUM_BLOCKS, 0.1)
    return drive(EngineCore(config, executor, model, headroom, clock), clock, load)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> DrivenLoad:
    return make_load(tmp_path_factory.mktemp("steady"))


@pytest.fixture(scope="module")
def steady(load: DrivenLoad) -> Outcome:
    """Every step takes 10 ms. Tests only look at it."""
    return run(load, ConstantCostModel(STEP_S), VirtualClock())


def test_every_online_request_ends_and_offline_work_lasts_until_the_end(load: DrivenLoad, steady: Outcome) -> None:
    assert [record.tokens for record in steady.measures.online.values()] == [32] * len(load.arrivals_s)
    assert steady.step_ends_s[-1] >= load.duration_s
    assert not steady.dry


def test_percentiles_are_of_requests_after_the_warm_up(steady: Outcome) -> None:
    # A request waits for the running step to end, and then for its own.
    found = online_percentiles(steady.measures, steady)
    assert found["TPOT"] == pytest.approx({"p50": STEP_S, "p90": STEP_S, "p99": STEP_S})
    assert STEP_S <= found["TTFT"]["p50"] <= 2 * STEP_S + 1e-9


def test_offline_rows_that_run_out_are_noticed(tmp_path: Path) -> None:
    load = DrivenLoad.make(2.0, 5.0, 3, (0.3, 0.05), 1000, tmp_path)
    assert run(load, ConstantCostModel(STEP_S), VirtualClock()).dry


def steps_of(seconds: list[float]) -> list[DrivenStep]:
    shape = BatchShape(decode_requests=1, decode_context_tokens=9)
    starts_s = np.cumsum([0.0, *seconds[:-1]]).tolist()
    return [DrivenStep(start_s, one_s, 0.001, shape) for start_s, one_s in zip(starts_s, seconds, strict=True)]


def test_the_drift_is_measured_over_predicted_time_of_the_steps_that_are_known() -> None:
    machine = MachineModel(ConstantCostModel(STEP_S), steps_of([STEP_S] * 100 + [3 * STEP_S] * 100))
    assert machine.drift == pytest.approx(2.0)
    assert machine.predict(BatchShape()).seconds == pytest.approx(2 * STEP_S + 0.001)
    assert machine.error(steps_of([STEP_S, 4 * STEP_S])) == pytest.approx((1.0 + 0.5) / 2)


def test_the_scatter_of_known_steps_does_not_hang_on_the_drift_or_on_one_stalled_step() -> None:
    rng = np.random.default_rng(0)
    seconds = (2.0 * STEP_S * rng.lognormal(0.0, 0.05, 1000)).tolist()
    noise = MachineModel(ConstantCostModel(STEP_S), steps_of([*seconds, 100.0])).noise
    assert noise == pytest.approx(0.05, rel=0.1)


def test_known_steps_come_again_in_stretches_each_as_often_as_any_other() -> None:
    """200 steps, each a little longer than the one before."""
    machine = MachineModel(ConstantCostModel(STEP_S), steps_of([STEP_S * (1.0 + k / 200) for k in range(200)]))
    drawn = {seed: list(islice(machine.factors(seed), 400)) for seed in (0, 1)}
    for factors in drawn.values():
        for once in (factors[:200], factors[200:]):
            assert sorted(once) == pytest.approx([(1.0 + k / 200) / machine.drift for k in range(200)])
            which = np.argsort(np.argsort(once)).tolist()
            # Five stretches of 40 steps, in an order that is not their own.
            assert 195 <= sum((after - before) % 200 == 1 for before, after in pairwise(which)) < 199
    assert drawn[0] != drawn[1]
    assert drawn[0][:200] != drawn[0][200:]


def test_without_drift_the_profile_is_taken_as_it_is() -> None:
    machine = MachineModel(ConstantCostModel(STEP_S), steps_of([3 * STEP_S] * 100), drift=False)
    assert machine.predict(BatchShape()).seconds == pytest.approx(STEP_S + 0.001)
    assert machine.error(steps_of([3 * STEP_S])) == pytest.approx(2 / 3)


def test_the_window_of_measurement_begins_after_a_fifth_of_the_run() -> None:
    outcome = Outcome(steps=steps_of([1.0] * 20), duration_s=15.0)
    assert [step.start_s for step in outcome.steps_before_window()] == [0.0, 1.0]
    assert [step.start_s for step in outcome.steps_in_window()] == [float(start) for start in range(2, 14)]


# ---- the whole comparison, on a machine that is known ----

COST = StepCost(fixed_s=0.03, gemm_curve_s=(1e-3, 2e-3), pair_s=1e-7, kv_token_s=1e-6)


def costs_times(factors: dict[Regime, float]) -> RooflineModel:
    """The synthetic machine's own profile, times a factor in each regime."""
    return RooflineModel(
        {
            regime: StepCost(
                fixed_s=factor * COST.fixed_s,
                gemm_curve_s=tuple(factor * seconds for seconds in COST.gemm_curve_s),
                pair_s=factor * COST.pair_s,
                kv_token_s=factor * COST.kv_token_s,
            )
            for regime, factor in factors.items()
        }
    )


RIGHT = dict.fromkeys(Regime, 1.0)


def compare(
    directory: Path,
    profile: RooflineModel,
    duration_s: float = 30.0,
    *,
    slower_from_s: float = math.inf,
    scatter_share: float = 0.02,
) -> Findings:
    """A machine of ``COST`` with some scatter, that is now 1.1 times slower than when it was calibrated."""
    clock = VirtualClock()
    truth = SlowerFromThen(costs_times(dict.fromkeys(Regime, 1.1)), clock, slower_from_s)
    scatter = random.Random(103)
    factors = (scatter.lognormvariate(-(scatter_share**2) / 2, scatter_share) for _ in repeat(None))
    executor = simulated_machine(truth, clock, factors)
    return Fidelity(executor, clock, profile, directory).run(duration_s, vocab=1000)


@pytest.fixture
def one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is wrong by far more than steps scatter: a median over draws would say the same."""
    monkeypatch.setattr(sim_fidelity, "DRAWS", 1)


def failed(found: Findings) -> list[str]:
    return [row.case for row in result_of("synthetic", found).failed]


def test_a_right_profile_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps scatter so little that every draw agrees: with more, a median TTFT of some 60 requests may be off by 5%."""
    monkeypatch.setattr(sim_fidelity, "DRAWS", 3)
    found = compare(tmp_path, costs_times(RIGHT), scatter_share=0.001)
    assert failed(found) == []
    assert found.simulated.machine.drift == pytest.approx(1.1, rel=0.01)
    assert found.undrifted.machine.drift == 1.0
    assert len(found.simulated.outcomes) == len(found.undrifted.outcomes) == 3
    assert len({outcome.step_ends_s[-1] for outcome in found.simulated.outcomes}) == 3


@pytest.mark.usefixtures("one_draw")
def test_what_happens_in_the_window_is_not_in_its_prediction(tmp_path: Path) -> None:
    """A machine that becomes twice as slow in the window is predicted as it was before, so the check fails."""
    found = compare(tmp_path, costs_times(RIGHT), 20.0, slower_from_s=10.0)
    assert found.simulated.machine.drift == pytest.approx(1.1, rel=0.01)
    assert any("tokens/s" in case for case in failed(found))


@pytest.mark.usefixtures("one_draw")
@pytest.mark.parametrize("factor", [0.2, 1.7, pytest.param(3.0, marks=pytest.mark.full)])
def test_a_profile_that_is_wrong_as_a_whole_fails(tmp_path: Path, factor: float) -> None:
    found = compare(tmp_path, costs_times(dict.fromkeys(Regime, factor)), duration_s=8.0)
    assert "profile: step times before the window over the calibrated" in failed(found)


@pytest.mark.usefixtures("one_draw")
def test_a_profile_that_is_wrong_in_one_regime_fails(tmp_path: Path) -> None:
    """One factor cannot mend it: prompts are guessed to take twice what they take, decodes half."""
    profile = costs_times({Regime.PREFILL: 2.0, Regime.MIXED: 2.0, Regime.DECODE: 0.5})
    assert any(case.startswith("simulated: TPOT") for case in failed(compare(tmp_path, profile)))


# ---- what a simulation may be off ----


def slowed(outcome: Outcome, factor: float) -> Outcome:
    """The same steps on a machine slower by a factor: every time is longer by it."""
    steps = [DrivenStep(factor * s.start_s, factor * s.seconds, factor * s.host_s, s.shape) for s in outcome.steps]
    slow = Outcome(outcome.measures, steps, outcome.start_s, factor * outcome.duration_s)
    slow.measures = copy.deepcopy(outcome.measures)
    for record in slow.measures.online.values():
        record.arrival_s, record.first_s, record.last_s = (
            factor * time_s for time_s in (record.arrival_s, record.first_s, record.last_s)
        )
    return slow


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("case", "allowed"), [("tokens/s", 0.03), ("p50", 0.05), ("p99", 0.15)])
def test_a_simulation_may_be_off_by_what_is_promised_and_no_more(
    steady: Outcome, case: str, allowed: float, sign: int
) -> None:
    for off, holds in ((0.99 * allowed, True), (1.01 * allowed, False)):
        ratio = 1.0 + sign * off
        slower = slowed(steady, 1.0 / ratio if case == "tokens/s" else ratio)
        rows = [row for row in _simulation_rows(steady, [slower]) if case in row.case]
        assert len(rows) == 2
        assert [row.holds for row in rows] == [holds, holds]


def test_a_replay_may_be_off_by_one_percent(steady: Outcome) -> None:
    for off, holds in ((0.0099, True), (0.0101, False), (-0.0101, False)):
        replayed = Replayed(Replay(len(steady.steps), None), slowed(steady, 1.0 + off).measures)
        rows = _replay_latencies(steady, replayed)
        assert len(rows) == 6
        assert {row.holds for row in rows} == {holds}


@pytest.mark.full
def test_a_replay_of_a_real_run_decides_as_it_did_and_has_its_latencies() -> None:
    """The promise of 3, 5 and 15% is judged by the experiment on a quiet machine, and above on a known one; of a
    machine that others share, this asks only that the rows say what was found. A replay has no time for handing
    outputs on, which is more than 1% of the embedded model's shortest latencies: up to 2 ms are let pass."""
    rows = sim_fidelity.run(quick=True).rows
    replayed = [row for row in rows if row.case.startswith("replay")]
    assert len(replayed) == 7
    assert replayed[0].holds
    for row in replayed[1:]:
        assert row.paper is not None
        assert row.ours == pytest.approx(row.paper, rel=0.01, abs=2.0)
    simulated = [row for row in rows if row.case.startswith("simulated")]
    assert len(simulated) == 6
    for row in simulated:
        allowed = next(error for case, error in ERRORS.items() if case in row.case)
        assert row.ratio is not None
        assert row.holds == (abs(row.ratio - 1.0) <= allowed)


def test_a_measure_of_the_simulation_is_the_median_over_its_draws(load: DrivenLoad, steady: Outcome) -> None:
    slow = run(load, ConstantCostModel(2.0 * STEP_S), VirtualClock())
    assert all(row.ratio == 1.0 for row in _simulation_rows(steady, [slow, steady, steady]))
    rows = _simulation_rows(steady, [slow, steady, slow])
    assert not any(row.holds for row in rows if "online tokens" not in row.case)
