"""Online correction: a machine that changes is followed, the margin covers what it promises, runs repeat exactly."""

import random
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.conformal import AdaptiveQuantile
from neaptide.estimator.cost.iteration_time import Regime, StepSample, mean_relative_error
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from tests.estimator.machines import decodes, linear_machine, measure, random_shape

MACHINE = partial(linear_machine, mixed=1.15)


def slowing_run(seed: int, steps: int, noise: float = 0.03) -> list[StepSample]:
    """A changing mix of steps on a machine that becomes 1.5 times slower in the middle."""
    rng, samples = random.Random(seed), []
    for step in range(steps):
        weights = ((1, 6, 3), (3, 4, 5), (1, 9, 1))[3 * step // steps]
        shape = random_shape(rng, rng.choices(list(Regime), weights)[0])
        slow = 1.5 if step >= steps // 2 else 1.0
        samples.append(StepSample(shape, slow * MACHINE(shape) * rng.lognormvariate(0.0, noise)))
    return samples


def errors(model: OnlineCostModel, samples: list[StepSample]) -> list[float]:
    """Relative errors before each step is observed."""
    found = []
    for sample in samples:
        found.append(abs(model.predict(sample.shape).seconds / sample.seconds - 1.0))
        model.observe(sample.shape, sample.seconds)
    return found


@dataclass
class Base:
    """Models to start from."""

    calibrated: RooflineModel
    generic: RooflineModel


@pytest.fixture(scope="module")
def base() -> Base:
    calibrated = RooflineModel()
    calibrated.fit(measure(MACHINE, 100, 150, noise=0.03))
    return Base(calibrated, RooflineModel.generic())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", ["calibrated", "generic"])
def test_after_a_slow_down_the_error_is_back_within_100_steps_and_coverage_holds(
    base: Base, start: str, seed: int
) -> None:
    model = OnlineCostModel(getattr(base, start))
    found = errors(model, slowing_run(seed, 1000))
    rolling = {step: sum(found[step - 20 : step]) / 20 for step in range(20, 1001)}
    assert found[500] > 0.25  # it was a change that hurts
    assert all(rolling[step] < 0.08 for step in range(600, 1001))
    assert model.coverage == pytest.approx(0.95, abs=0.015)
    assert model.mape == pytest.approx(sum(found) / 1000)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2])
def test_the_margin_covers_the_share_that_was_asked_for(base: Base, alpha: float) -> None:
    model = OnlineCostModel(base.calibrated, alpha)
    errors(model, slowing_run(3, 2000))
    assert model.coverage == pytest.approx(1.0 - alpha, abs=0.015)


def test_noisy_and_quiet_regimes_are_both_covered_as_promised(base: Base) -> None:
    rng, model = random.Random(0), OnlineCostModel(base.calibrated)
    noise = {Regime.PREFILL: 0.08, Regime.DECODE: 0.02, Regime.MIXED: 0.08}
    covered: dict[Regime, list[bool]] = {regime: [] for regime in Regime}
    for _ in range(2400):
        regime = rng.choice(list(Regime))
        shape = random_shape(rng, regime)
        seconds = MACHINE(shape) * rng.lognormvariate(0.0, noise[regime])
        predicted_s, margin_s = model.predict(shape)
        covered[regime].append(seconds <= predicted_s + margin_s)
        model.observe(shape, seconds)
    for met in covered.values():
        assert sum(met) / len(met) == pytest.approx(0.95, abs=0.015)


def test_a_slow_down_seen_in_decodes_is_expected_of_prefills(base: Base) -> None:
    model = OnlineCostModel(base.calibrated)
    errors(model, measure(MACHINE, 0, 100, 0.03))
    errors(model, measure(lambda shape: 1.5 * MACHINE(shape), 1, 60, 0.03, Regime.DECODE))
    unseen = measure(lambda shape: 1.5 * MACHINE(shape), 2, 50, 0.0, Regime.PREFILL)
    assert mean_relative_error(model, unseen) < 0.1


def test_one_stalled_step_changes_little(base: Base) -> None:
    model = OnlineCostModel(base.calibrated)
    errors(model, measure(MACHINE, 0, 200, 0.03))
    sample = measure(MACHINE, 1, 1)[0]
    before = model.predict(sample.shape).seconds
    model.observe(sample.shape, 20.0 * sample.seconds)
    assert model.predict(sample.shape).seconds < 1.1 * before


def test_a_guess_ten_times_off_is_corrected(base: Base) -> None:
    model = OnlineCostModel(base.generic)
    errors(model, measure(lambda shape: 10.0 * MACHINE(shape), 0, 200))
    assert mean_relative_error(model, measure(lambda shape: 10.0 * MACHINE(shape), 1, 100)) < 0.05


def test_the_same_steps_give_the_same_model_bit_for_bit(base: Base) -> None:
    run = slowing_run(0, 300)
    first, second = OnlineCostModel(base.calibrated), OnlineCostModel(base.calibrated)
    errors(first, run)
    errors(second, run)
    assert all(first.predict(sample.shape) == second.predict(sample.shape) for sample in run)


def test_the_margin_is_at_most_three_tenths_of_the_prediction(base: Base) -> None:
    rng, model = random.Random(0), OnlineCostModel(base.calibrated)
    for sample in measure(MACHINE, 0, 300):
        model.observe(sample.shape, sample.seconds * rng.choice([0.2, 5.0]))
    seconds, margin_s = model.predict(random_shape(rng))
    assert margin_s == pytest.approx(0.3 * seconds)


def test_the_base_is_not_changed(base: Base) -> None:
    shape = random_shape(random.Random(0))
    before = base.calibrated.predict(shape)
    errors(OnlineCostModel(base.calibrated), slowing_run(0, 100))
    assert base.calibrated.predict(shape) == before


@pytest.mark.parametrize("noise", ["normal", "rare spikes"])
def test_a_long_calm_is_not_paid_back_by_misses_once_there_is_noise(base: Base, noise: str) -> None:
    rng, model = random.Random(0), OnlineCostModel(base.calibrated)
    shapes = [random_shape(rng, Regime.DECODE) for _ in range(200)]
    for step in range(3000):
        shape = shapes[step % 200]
        spike = 1.1 if noise == "rare spikes" and rng.random() < 0.03 else 1.0
        model.observe(shape, spike * base.calibrated.predict(shape).seconds)
    covered = 0
    for step in range(1000):
        shape = shapes[step % 200]
        seconds = base.calibrated.predict(shape).seconds * rng.lognormvariate(0.0, 0.05)
        predicted_s, margin_s = model.predict(shape)
        covered += seconds <= predicted_s + margin_s
        model.observe(shape, seconds)
    assert covered / 1000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_is_none_is_ignored(base: Base, seconds: float) -> None:
    model = OnlineCostModel(base.calibrated)
    run = slowing_run(0, 100)
    errors(model, run[:50])
    before = [model.predict(sample.shape) for sample in run], model.coverage, model.mape
    model.observe(run[50].shape, seconds)
    assert ([model.predict(sample.shape) for sample in run], model.coverage, model.mape) == before


def test_before_the_first_step_there_is_nothing_to_say(base: Base) -> None:
    model = OnlineCostModel(base.calibrated)
    assert (model.coverage, model.mape) == (1.0, 0.0)
    model.observe(random_shape(random.Random(0)), 0.0)
    assert (model.coverage, model.mape) == (1.0, 0.0)


@pytest.fixture(scope="module")
def shaken(base: Base) -> OnlineCostModel:
    model = OnlineCostModel(base.generic)
    errors(model, measure(MACHINE, 5, 60, noise=0.7))
    return model


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 2000), context=st.integers(0, 4000))
def test_a_larger_chunk_never_takes_less_time(shaken: OnlineCostModel, seed: int, tokens: int, context: int) -> None:
    shape = random_shape(random.Random(seed))
    smaller, larger = shape.plus(tokens, context), shape.plus(tokens + 1, context)
    assert shaken.predict(larger).seconds >= shaken.predict(smaller).seconds * (1 - 1e-12)


def test_the_quantile_covers_scores_that_drift() -> None:
    rng, quantile, missed = random.Random(0), AdaptiveQuantile(0.1), 0
    for step in range(3000):
        score = rng.gauss(step / 500.0, 1.0)
        missed += score > quantile.value
        quantile.observe(score, score > quantile.value)
    assert missed / 3000 == pytest.approx(0.1, abs=0.01)


def test_the_quantile_of_few_scores_is_the_initial_bound() -> None:
    quantile = AdaptiveQuantile(0.05, gamma=1e-6, initial=2.0)
    for _ in range(18):
        quantile.observe(1.0, missed=False)
        assert quantile.value == 2.0
    quantile.observe(1.0, missed=False)
    assert quantile.value == 1.0


def test_misses_are_made_up_for_but_not_without_end() -> None:
    """One score in ten is 1: the bound is 1 as long as the level is below 2 / 11. From the least, -0.25, it comes back
    by gamma * alpha = 0.005 a step, in 87 of them."""
    quantile = AdaptiveQuantile(0.5, gamma=0.01, window=10)
    for step in range(1000):
        quantile.observe(float(step % 10 == 0), missed=True)
    steps = 0
    while quantile.value == 1.0:
        quantile.observe(float(steps % 10 == 0), missed=False)
        steps += 1
    assert steps == 87


def test_a_small_change_is_believed_as_soon_as_the_filter_was_tuned_for() -> None:
    """The common factor may drift by 0.25% a step, so that a long calm does not make the model deaf."""
    base, shape = RooflineModel.generic(), decodes(8, 200)
    model, calm_s = OnlineCostModel(base), base.predict(shape).seconds
    for _ in range(2000):
        model.observe(shape, calm_s)
    for _ in range(5):
        model.observe(shape, calm_s * (1.0 + 1e-6))
    missing = 1.0 - (model.predict(shape).seconds / calm_s - 1.0) / 1e-6
    assert missing == pytest.approx(0.408, abs=0.008)


def test_the_price_of_shared_reads_that_was_never_measured_is_learned(base: Base) -> None:
    """A kernel for which a shared read costs half of another one, and a profile that does not know it."""
    truth = {
        regime: msgspec.structs.replace(cost, shared_kv_token_s=0.5 * cost.kv_token_s)
        for regime, cost in base.calibrated.costs.items()
    }
    machine, model, rng = RooflineModel(truth), OnlineCostModel(base.calibrated), random.Random(0)
    found = []
    for _ in range(300):
        count, prefix = rng.randint(8, 24), rng.choice((1024, 2048))
        shape = BatchShape()
        shape.add_decodes(count, count * (prefix + 64), prefix + 64, shared_tokens=(count - 1) * prefix)
        seconds = machine.predict(shape).seconds
        found.append(abs(model.predict(shape).seconds / seconds - 1.0))
        model.observe(shape, seconds)
    assert found[0] > 0.3
    assert sum(found[-50:]) / 50 < 0.08
