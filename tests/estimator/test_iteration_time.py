"""What the models share; and the linear one: recovers a machine, follows one that changes, keeps a covering margin."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.batch import BatchShape
from neaptide.estimator.iteration_time import (
    ConstantCostModel,
    LinearCostModel,
    Regime,
    Sample,
    mean_relative_error,
    nonnegative_least_squares,
    regime_of,
)
from tests.estimator.machines import decodes, prefills


def test_regimes() -> None:
    assert regime_of(prefills(1, 10)) is Regime.PREFILL
    assert regime_of(decodes(3, 10)) is Regime.DECODE
    assert regime_of(decodes(3, 10).plus(10, 0)) is Regime.MIXED
    assert regime_of(BatchShape()) is Regime.DECODE


def test_the_error_is_relative_to_the_measured_time() -> None:
    samples = [Sample(decodes(1, 10), 2.0), Sample(decodes(1, 10), 0.5)]
    assert mean_relative_error(ConstantCostModel(1.0), samples) == (0.5 + 1.0) / 2


def random_shape(rng: random.Random) -> BatchShape:
    shape = BatchShape()
    for _ in range(rng.randrange(0, 3)):
        shape.add(rng.randrange(2, 300), rng.randrange(0, 500))
    for _ in range(rng.randrange(1, 40)):
        shape.add(1, rng.randrange(1, 800))
    return shape


def machine(shape: BatchShape, slow: float = 1.0) -> float:
    """A made-up machine that the model can represent exactly."""
    seconds = 4e-3 + 8e-5 * shape.num_tokens + 2e-8 * shape.prefill_attention_pairs
    return slow * (seconds + 5e-7 * shape.decode_context_tokens)


def test_recovers_a_linear_machine() -> None:
    rng, model = random.Random(0), LinearCostModel()
    for _ in range(400):
        shape = random_shape(rng)
        model.observe(shape, machine(shape))
    errors = [abs(model.predict(s).seconds / machine(s) - 1) for s in (random_shape(rng) for _ in range(100))]
    assert float(np.mean(errors)) < 0.02


def test_follows_a_machine_that_slows_down() -> None:
    rng, model = random.Random(1), LinearCostModel()
    for _ in range(400):
        shape = random_shape(rng)
        model.observe(shape, machine(shape))
    for _ in range(600):
        shape = random_shape(rng)
        model.observe(shape, machine(shape, slow=1.5))
    errors = [abs(model.predict(s).seconds / machine(s, 1.5) - 1) for s in (random_shape(rng) for _ in range(100))]
    assert float(np.mean(errors)) < 0.05


def test_margin_covers_about_the_promised_share() -> None:
    rng, model = random.Random(2), LinearCostModel(alpha=0.05)
    covered = 0
    for step in range(1500):
        shape = random_shape(rng)
        seconds = machine(shape, slow=rng.lognormvariate(0.0, 0.1))
        if step >= 500:
            predicted_s, margin_s = model.predict(shape)
            covered += seconds <= predicted_s + margin_s
        model.observe(shape, seconds)
    assert covered / 1000 == pytest.approx(0.95, abs=0.03)


def test_errors_made_while_learning_do_not_widen_the_margin() -> None:
    rng, model = random.Random(3), LinearCostModel()
    for _ in range(60):  # far fewer than the window: what the first guess got wrong is still in it
        shape = random_shape(rng)
        model.observe(shape, machine(shape, slow=20.0))
    predicted_s, margin_s = model.predict(random_shape(rng))
    assert margin_s < 0.1 * predicted_s


@given(seed=st.integers(0, 1000))
def test_more_work_never_takes_less_time(seed: int) -> None:
    rng, model = random.Random(seed), LinearCostModel()
    for _ in range(40):
        shape = random_shape(rng)
        model.observe(shape, machine(shape, slow=rng.uniform(0.5, 2.0)))
    shape = random_shape(rng)
    assert model.predict(shape.plus(rng.randrange(1, 50), 30)).seconds >= model.predict(shape).seconds


def test_negative_directions_are_clamped_to_zero() -> None:
    assert nonnegative_least_squares([[1.0, 0.0], [0.0, 1.0]], [1.0, -1.0], [0.0, 0.0]) == [1.0, 0.0]
