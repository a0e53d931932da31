"""The solver: the best of all active sets, and errors that are relative and robust."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.estimator.cost.least_squares import Array, fit_relative, nonnegative_solve


def objective(gram: Array, target: Array, x: Array) -> float:
    return float(x @ gram @ x / 2 - target @ x)


@given(seed=st.integers(0, 10**6), size=st.integers(1, 5), rank=st.integers(1, 6))
def test_no_set_of_free_coefficients_does_better(seed: int, size: int, rank: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(rank, size))
    gram, target = rows.T @ rows, rows.T @ rng.normal(size=rank)
    x = nonnegative_solve(gram, target)
    assert (x >= 0.0).all()
    for choice in product([False, True], repeat=size):
        free = np.array(choice)
        trial = np.zeros(size)
        if free.any():
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free])[0]
        if (trial >= 0.0).all():
            assert objective(gram, target, x) <= objective(gram, target, trial) + 1e-9


def test_coefficients_of_very_different_size_are_recovered() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(size=(50, 4)) * np.array([1.0, 1e3, 1e6, 1e9])
    coefficients = np.array([5e-3, 2e-5, 0.0, 3e-11])
    assert fit_relative(features, features @ coefficients) == pytest.approx(coefficients, rel=1e-6, abs=1e-15)


def test_a_short_step_counts_as_much_as_a_long_one() -> None:
    features, seconds = np.array([[1.0], [1000.0]]), np.array([1.0, 1100.0])
    (coefficient,) = fit_relative(features, seconds)
    assert 1.04 < coefficient < 1.06


def test_most_samples_win_over_a_few_stalled_ones() -> None:
    features, seconds = np.ones((11, 1)), np.array([1.0] * 9 + [5.0] * 2)
    assert fit_relative(features, seconds)[0] == pytest.approx(1.0, abs=0.02)


def test_a_penalty_holds_what_the_samples_say_nothing_of() -> None:
    features, seconds = np.array([[2.0, 0.0]]), np.array([6.0])
    fitted = fit_relative(features, seconds, 1e-3 * np.eye(2), 1e-3 * np.array([0.0, 7.0]))
    assert fitted == pytest.approx([3.0, 7.0], rel=1e-4)
