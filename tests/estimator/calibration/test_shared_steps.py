"""Calibration of decodes that share reads: their blocks, their shape, and the coefficient that they give."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import SchedulerConfig, SharedReads
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.estimator.calibration.calibrate import Calibration, CalibrationPace, Measurements
from neaptide.estimator.calibration.micro_runs import MicroRunner, Parts, shape_of
from neaptide.estimator.calibration.report import report
from neaptide.estimator.calibration.steps import CalibrationLimits, calibration_steps, start_steps
from neaptide.estimator.calibration.times import load_times, save_times
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.roofline_fit import fit_costs
from neaptide.estimator.device_profile import load_profile, save_profile
from neaptide.estimator.recipes import build_cost_model, roofline_recipe
from neaptide.estimator.subject import Subject
from neaptide.executors.simulated.hash_executor import SimHandle
from tests.estimator.machine_executor import COST, SAME_EVERYWHERE, MachineExecutor

SHARED_S = 1.5e-7
SHARING = dict.fromkeys(Regime, msgspec.structs.replace(COST, shared_kv_token_s=SHARED_S))
KERNEL = SharedReads(decodes_per_read=12, min_tokens=64)
LIMITS = CalibrationLimits(2048, 64, 8192, 2048 * 16, decodes_per_read=12)
SHARED: Parts = ((1, 319, 256),) * 3
"""Three decodes that read 320 tokens each; the first 256 are the same blocks."""


class Watched(MachineExecutor):
    """Notes the plans with work."""

    plans: list[StepPlan]

    def submit(self, plan: StepPlan) -> SimHandle:
        if len(plan):
            self.plans.append(plan)
        return super().submit(plan)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    executor = MachineExecutor(VirtualClock(), costs=SHARING)
    runner = MicroRunner(executor, executor.clock, 16)
    return Calibration(runner, executor.clock, LIMITS, CalibrationPace(60.0, 1.0, max_rounds=1)).measure()


def test_the_shape_counts_what_others_have_read() -> None:
    shape = shape_of((*SHARED, (1, 319), (16, 0)))
    assert (shape.decode_context_tokens, shape.shared_prefix_tokens) == (4 * 320, 2 * 256)


def test_decodes_that_share_have_the_same_first_blocks() -> None:
    executor = Watched(VirtualClock(), num_blocks=100)
    executor.plans = []
    runner = MicroRunner(executor, executor.clock, 16)
    seconds = runner.run((*SHARED, (1, 31)))
    (plan,) = executor.plans
    tables = [part.block_ids for part in plan.scheduled]
    assert tables == [
        list(range(20)),
        [*range(16), *range(20, 24)],
        [*range(16), *range(24, 28)],
        [28, 29],
    ]
    assert runner.blocks_of([SHARED]) == 28
    assert plan.shape.shared_prefix_tokens == 512
    assert seconds == pytest.approx(RooflineModel(SAME_EVERYWHERE).predict(shape_of((*SHARED, (1, 31)))).seconds)


def test_steps_that_share_are_measured_only_where_the_kernel_shares() -> None:
    alone, shared = replace(LIMITS, decodes_per_read=1), CalibrationLimits.of(SchedulerConfig(), 2048 * 16, KERNEL)
    for steps in (calibration_steps(alone, 0).training, calibration_steps(alone, 0).held_out, start_steps(alone)):
        assert not any(shape_of(parts).shared_prefix_tokens for parts in steps)
    sharing = [parts for parts in calibration_steps(shared, 0).training if shape_of(parts).shared_prefix_tokens]
    assert {len(parts) for parts in sharing} == {2, 4, 8, 12}
    assert calibration_steps(shared, 0).held_out == calibration_steps(replace(shared, decodes_per_read=1), 0).held_out
    assert [len(parts) for parts in start_steps(shared)[-2:]] == [4, 8]


def test_the_price_of_a_shared_read_is_recovered(measured: Measurements) -> None:
    costs = report(measured).raw.ours.costs
    assert costs[Regime.DECODE].shared_kv_token_s == pytest.approx(SHARED_S, rel=1e-4)
    assert costs[Regime.DECODE].kv_token_s == pytest.approx(COST.kv_token_s, rel=1e-4)


def test_without_shared_reads_there_is_no_price_for_them(measured: Measurements) -> None:
    samples = [sample for sample in measured.samples(held_out=False) if not sample.shape.shared_prefix_tokens]
    assert {cost.shared_kv_token_s for cost in fit_costs(samples).values()} == {0.0}


def test_times_keep_which_steps_shared(measured: Measurements, tmp_path: Path) -> None:
    save_times(measured, tmp_path / "times")
    assert load_times(tmp_path / "times").runs == measured.runs


def test_a_profile_keeps_what_the_kernel_shares_and_its_price(tmp_path: Path) -> None:
    executor = MachineExecutor(VirtualClock())
    subject = Subject.of(executor, "tiny", 16, shared_reads=KERNEL)
    save_profile(subject.profile("mine", "2026-01-01", SHARING), tmp_path / "mine.json")
    loaded = load_profile(tmp_path / "mine.json")
    assert loaded.shared_reads == KERNEL
    shape = BatchShape()
    shape.add_decodes(3, 960, 320, shared_tokens=512)
    seconds = COST.fixed_s + 3e-4 - 1e-4 + 3 * COST.decode_request_s + COST.kv_token_s * 448 + SHARED_S * 512
    assert RooflineModel.from_profile(loaded).predict(shape).seconds == pytest.approx(seconds)
    assert build_cost_model(roofline_recipe(loaded, 1.0)).predict(shape).seconds == pytest.approx(seconds)


def test_an_old_profile_shares_nothing_and_its_recipe_says_nothing_of_it(tmp_path: Path) -> None:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16)
    save_profile(subject.profile("old", "2026-01-01", SAME_EVERYWHERE), tmp_path / "old.json")
    old = msgspec.json.decode((tmp_path / "old.json").read_bytes())
    del old["shared_reads"]
    for cost in old["costs"].values():
        del cost["shared_kv_token_s"]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(old))
    loaded = load_profile(tmp_path / "old.json")
    assert loaded == subject.profile("old", "2026-01-01", SAME_EVERYWHERE)
    recipe = roofline_recipe(loaded, 1.0)
    assert not any("shared_kv_token_s" in cost for cost in recipe["costs"].values())
