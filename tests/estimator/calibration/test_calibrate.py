"""Calibration: recovers a machine that it can represent, in a seeded order, within its time."""

import random
from dataclasses import dataclass, replace

import msgspec
import pytest

from neaptide.commands.calibration import error_table
from neaptide.engine.clock import VirtualClock
from neaptide.estimator.calibration.calibrate import (
    NO_ROOM,
    NO_TIME,
    QUICK,
    TOO_LONG,
    Calibration,
    CalibrationPace,
    MeasuredRun,
    Measurements,
)
from neaptide.estimator.calibration.micro_runs import MicroRunner, shape_of
from neaptide.estimator.calibration.report import (
    OURS,
    VISIBLE_DRIFT,
    CalibrationReport,
    evaluate,
    noise_floor,
    repeats_of,
    report,
)
from neaptide.estimator.calibration.steps import CalibrationLimits, calibration_steps, ragged_step, start_steps
from neaptide.estimator.cost.iteration_time import Regime, regime_of
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile, save_profile
from neaptide.estimator.subject import Subject
from tests.estimator.machine_executor import COST, DIFFERENT, SAME_EVERYWHERE, MachineExecutor

LIMITS = CalibrationLimits(max_batched_tokens=2048, max_seqs=64, max_model_len=8192, kv_tokens=2048 * 16)
BRIEF = CalibrationPace(budget_s=60.0, max_step_s=1.0, max_rounds=2)


@dataclass
class Lab:
    executor: MachineExecutor
    calibration: Calibration

    @classmethod
    def of(cls, pace: CalibrationPace = BRIEF, *, seed: int = 0, slow: float = 1.0, num_blocks: int = 2048) -> "Lab":
        return cls.on(MachineExecutor(VirtualClock(), num_blocks, slow=lambda: slow), pace, seed)

    @classmethod
    def on(cls, executor: MachineExecutor, pace: CalibrationPace = BRIEF, seed: int = 0) -> "Lab":
        runner = MicroRunner(executor, executor.clock, 16)
        return cls(executor, Calibration(runner, executor.clock, LIMITS, pace, seed))


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return Lab.of().calibration.measure()


@pytest.fixture(scope="module")
def found(measured: Measurements) -> CalibrationReport:
    return report(measured)


def test_a_machine_that_the_model_can_represent_is_recovered_exactly(found: CalibrationReport) -> None:
    truth = RooflineModel(SAME_EVERYWHERE)
    for sample in found.raw.training + found.raw.held_out:
        assert found.raw.ours.predict(sample.shape).seconds == pytest.approx(truth.predict(sample.shape).seconds, 1e-6)
    costs = found.raw.ours.costs
    assert costs[Regime.PREFILL].pair_s == pytest.approx(COST.pair_s, rel=1e-5)
    assert costs[Regime.DECODE].kv_token_s == pytest.approx(COST.kv_token_s, rel=1e-5)


def test_reads_of_context_and_masked_pairs_of_chunks_are_recovered() -> None:
    costs = dict.fromkeys(Regime, msgspec.structs.replace(COST, pair_s=5e-8, masked_pair_s=2e-8, kv_token_s=1e-6))
    executor = MachineExecutor(VirtualClock(), costs=costs)
    found = report(Lab.on(executor, replace(BRIEF, max_rounds=1)).calibration.measure())
    assert max(found.raw.mape[OURS].values()) < 1e-5
    assert found.raw.ours.costs[Regime.PREFILL].masked_pair_s == pytest.approx(2e-8, rel=1e-3)


def test_regimes_that_differ_are_recovered_closely() -> None:
    executor = MachineExecutor(VirtualClock(), costs=DIFFERENT)
    found = report(Lab.on(executor, replace(BRIEF, max_rounds=1)).calibration.measure())
    assert max(found.raw.mape[OURS].values()) < 0.03


def test_every_model_is_judged_in_every_regime_and_ours_is_lowest_here(found: CalibrationReport) -> None:
    assert list(found.raw.mape) == ["echo_max", "echo_sum", "bros", "hygen", OURS]
    for errors in found.raw.mape.values():
        assert set(errors) == set(Regime)
    assert all(found.raw.is_lowest(regime) and found.raw.is_within_bound(regime) for regime in Regime)
    assert found.raw.echo in ("echo_max", "echo_sum")


def test_a_machine_without_noise_has_no_noise_floor(found: CalibrationReport) -> None:
    assert max(found.raw.noise_floor.values()) < 1e-9
    assert {found.raw.bound(regime) for regime in Regime} == {0.05}
    assert found.measurements.drift == pytest.approx(0.0, abs=1e-9)
    assert not found.is_normalised


def noisy(repeats: int, sigma: float = 0.1, steps: int = 2000) -> Measurements:
    """Decodes, each repeated so often on a machine with log-normal noise."""
    rng, measured = random.Random(0), Measurements(frozenset(), frozenset())
    for length in range(1, steps + 1):
        for _ in range(repeats):
            measured.runs.append(MeasuredRun(((1, length),), rng.lognormvariate(0.0, sigma), 1))
    return measured


@pytest.mark.parametrize("repeats", [2, 3, 9])
def test_the_noise_floor_does_not_depend_on_the_number_of_repeats(repeats: int) -> None:
    # The median of |N(0, 1)| is 0.6745.
    assert noise_floor(noisy(repeats))[Regime.DECODE] == pytest.approx(0.06745, rel=0.05)


def test_steps_that_ran_once_tell_nothing_of_noise() -> None:
    measured = noisy(3)
    floor = noise_floor(measured)
    measured.runs += [MeasuredRun(((2, length),), 1.0 + length, 1) for length in range(1000)]
    measured.runs += [MeasuredRun(((1, 5000 + length),), 1.0 + length, 1) for length in range(1000)]
    assert noise_floor(measured) == floor
    assert repeats_of(measured) == {Regime.PREFILL: 0, Regime.DECODE: 3, Regime.MIXED: 0}


def test_where_nothing_was_repeated_the_noise_is_unknown_and_the_bound_is_the_least(found: CalibrationReport) -> None:
    once = replace(found.raw, noise_floor=noise_floor(noisy(1)), repeats=repeats_of(noisy(1)))
    assert {once.bound(regime) for regime in Regime} == {0.05}
    table = error_table(once, "")
    cells = {column.header: dict(zip(table.columns[0].cells, column.cells, strict=True)) for column in table.columns}
    assert (cells["decode"]["noise floor"], cells["decode"]["from repeats"]) == ("?", "0")


def test_the_report_says_how_often_steps_were_repeated(found: CalibrationReport) -> None:
    assert found.raw.repeats == dict.fromkeys(Regime, 2)


def test_errors_on_the_grid_and_on_ragged_steps_make_up_the_whole(
    measured: Measurements, found: CalibrationReport
) -> None:
    for evaluation in (found.raw, found.normalised):
        for name, errors in evaluation.mape.items():
            for regime in Regime:
                count = [
                    sum(
                        regime_of(sample.shape) is regime for sample in measured.samples(held_out=True, of_grid=of_grid)
                    )
                    for of_grid in (True, False)
                ]
                assert min(count) > 0
                both = count[0] * evaluation.grid_mape[name][regime] + count[1] * evaluation.ragged_mape[name][regime]
                assert both / sum(count) == pytest.approx(errors[regime])


def test_grid_steps_are_powers_of_two_and_the_others_ragged() -> None:
    steps = calibration_steps(LIMITS, 0)
    sizes = {num_tokens for parts in steps.grid for num_tokens, _ in parts}
    assert all(size & (size - 1) == 0 for size in sizes)
    assert steps.grid < set(steps.training + steps.held_out)
    ragged = [parts for parts in steps.training + steps.held_out if parts not in steps.grid]
    assert len(ragged) > 100


def test_every_measured_step_is_either_fitted_or_held_out(measured: Measurements) -> None:
    steps = calibration_steps(LIMITS, 0)
    assert not set(steps.training) & set(steps.held_out)
    run = set(measured.by_step())
    assert len(measured.samples(held_out=True)) == len(run & set(steps.held_out))
    assert len(measured.samples(held_out=False)) == len(run & set(steps.training))


def test_no_model_is_fitted_to_a_held_out_step(measured: Measurements, found: CalibrationReport) -> None:
    """Held-out steps that took other times change every error, and not one coefficient."""
    rng = random.Random(0)
    runs = [
        replace(run, seconds=run.seconds * rng.uniform(3.0, 9.0)) if run.parts in measured.held_out else run
        for run in measured.runs
    ]
    other = evaluate(replace(measured, runs=runs))
    assert other.ours.costs == found.raw.ours.costs
    for name, model in found.raw.models.items():
        for sample in found.raw.training + found.raw.held_out:
            assert other.models[name].predict(sample.shape) == model.predict(sample.shape)
        for regime in Regime:
            assert other.mape[name][regime] != found.raw.mape[name][regime]


def test_the_bound_is_5_percent_or_one_and_a_half_times_the_noise(found: CalibrationReport) -> None:
    noise = {Regime.PREFILL: 0.02, Regime.DECODE: 0.1, Regime.MIXED: 0.04}
    bounds = [replace(found.raw, noise_floor=noise).bound(regime) for regime in Regime]
    assert bounds == pytest.approx([0.05, 0.15, 0.06])


def test_held_out_steps_lie_between_powers_of_two_and_differ_in_context() -> None:
    held_out = calibration_steps(LIMITS, 0).held_out
    assert any(shape_of(parts).num_tokens & (shape_of(parts).num_tokens - 1) for parts in held_out)
    assert any(len({context for _, context in parts}) > 2 for parts in held_out)
    assert {regime_of(shape_of(parts)) for parts in held_out} == set(Regime)


@pytest.mark.parametrize("seed", range(3))
def test_steps_keep_to_the_limits(seed: int) -> None:
    limits = CalibrationLimits(max_batched_tokens=300, max_seqs=10, max_model_len=512, kv_tokens=3000)
    steps = calibration_steps(limits, seed)
    for parts in steps.training + steps.held_out + start_steps(limits):
        shape = shape_of(parts)
        assert shape.num_tokens <= 300
        assert len(parts) <= 10
        assert shape.max_context_tokens <= 512
        assert sum(sum(part) for part in parts) <= 3000


def test_ragged_steps_are_of_the_kind_asked_for() -> None:
    rng = random.Random(0)
    for kind in Regime:
        for _ in range(50):
            assert regime_of(shape_of(ragged_step(LIMITS, rng, kind.value))) is kind


def test_the_order_is_random_and_comes_from_the_seed() -> None:
    pace = replace(BRIEF, budget_s=5.0)
    first, again, other = (Lab.of(pace, seed=seed).calibration.measure() for seed in (1, 1, 2))
    assert [run.parts for run in first.runs] == [run.parts for run in again.runs]
    assert [run.parts for run in first.runs] != [run.parts for run in other.runs]
    sizes = [shape_of(run.parts).num_tokens for run in first.runs]
    assert sizes != sorted(sizes)


def test_every_step_is_repeated_once_a_round(measured: Measurements) -> None:
    assert {len(times) for times in measured.by_step().values()} == {2}
    half = len(measured.runs) // 2
    assert {run.parts for run in measured.runs[:half]} == {run.parts for run in measured.runs[half:]}


def test_a_slow_machine_takes_no_longer_than_the_budget() -> None:
    lab = Lab.of(QUICK, slow=20.0)
    measured = lab.calibration.measure()
    assert measured.seconds <= QUICK.budget_s + QUICK.max_step_s
    assert measured.left_out[TOO_LONG] > 0
    assert measured.left_out[NO_TIME] > 0
    assert max(run.seconds for run in measured.runs) < 2 * QUICK.max_step_s


def test_what_the_cache_does_not_hold_is_left_out() -> None:
    measured = Lab.of(num_blocks=600).calibration.measure()
    assert measured.left_out[NO_ROOM] > 0
    assert max(sum(sum(part) for part in run.parts) for run in measured.runs) <= 600 * 16


def test_no_time_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="too short"):
        Lab.of(replace(QUICK, budget_s=1e-3)).calibration.measure()


def test_the_executor_forgets_every_request() -> None:
    lab = Lab.of(replace(QUICK, max_rounds=1))
    lab.calibration.measure()
    assert lab.executor.known_requests == frozenset()


def test_a_machine_that_slows_down_is_normalised_by_its_reference_step() -> None:
    clock = VirtualClock()
    executor = MachineExecutor(clock, slow=lambda: 1.0 + 0.02 * clock.now())
    found = report(Lab.on(executor, replace(BRIEF, max_rounds=8)).calibration.measure())
    assert found.measurements.drift > VISIBLE_DRIFT
    assert found.is_normalised
    assert max(found.normalised.noise_floor.values()) < 0.02 < min(found.raw.noise_floor.values())
    assert max(found.chosen.mape[OURS].values()) < 0.02


def test_the_profile_holds_what_was_found(found: CalibrationReport, tmp_path_factory: pytest.TempPathFactory) -> None:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16)
    profile = found.profile(subject, "cpu-tiny", "2026-01-01", "abc")
    assert (profile.device, profile.dtype, profile.model) == ("a machine", "float32", "tiny")
    assert (profile.source, profile.date, profile.commit) == ("measured", "2026-01-01", "abc")
    assert (profile.kv_bytes_per_token, profile.num_blocks, profile.block_size) == (1024, 2048, 16)
    assert set(profile.held_out_mape) == {"echo_max", "echo_sum", "bros", "hygen", OURS}
    assert profile.measurement is not None
    assert profile.measurement.repeats == {"prefill": 2, "decode": 2, "mixed": 2}
    assert set(profile.measurement.grid_mape[OURS]) == set(profile.measurement.ragged_mape[OURS]) == set(Regime)
    assert profile.measurement.num_steps == len(found.measurements.runs)
    file = tmp_path_factory.mktemp("profile") / "cpu-tiny.json"
    save_profile(profile, file)
    loaded = RooflineModel.from_profile(load_profile(file))
    shape = shape_of(((100, 0), (1, 50)))
    assert loaded.predict(shape) == found.chosen.ours.predict(shape)
