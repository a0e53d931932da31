"""Values drawn from buckets keep to the buckets and to the sum."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.observation.draws import drawn_counts, drawn_values, share_below

LIMITS = (10.0, 20.0, 50.0, math.inf)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_value_of_a_single_observation_is_the_sum() -> None:
    assert drawn_counts(rng(), [(100.0, 0), (200.0, 1), (math.inf, 0)], 137.0).tolist() == [137]


def test_nothing_is_drawn_from_nothing() -> None:
    assert drawn_counts(rng(), [(100.0, 0.0)], 0.0).tolist() == []


@given(st.lists(st.floats(0.5, 90.0), min_size=1, max_size=30), st.integers(0, 5))
def test_drawn_values_have_the_buckets_and_the_sum_of_what_was_observed(values: list[float], seed: int) -> None:
    edges = (0.0, *LIMITS)
    buckets = [(high, sum(low < value <= high for value in values)) for low, high in zip(edges, LIMITS, strict=False)]
    drawn = drawn_values(np.random.default_rng(seed), buckets, sum(values))
    assert len(drawn) == len(values)
    assert float(drawn.sum()) == pytest.approx(sum(values), rel=1e-6)
    closed = [(low, high, n) for (high, n), low in zip(buckets, edges, strict=False) if math.isfinite(high)]
    for low, high, number in closed:
        assert sum(low - 1e-9 <= value <= high + 1e-9 for value in drawn.tolist()) >= number


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(0, 5))
def test_drawn_counts_have_exactly_the_sum(values: list[int], seed: int) -> None:
    edges = (0.0, *LIMITS)
    buckets = [(high, sum(low < value <= high for value in values)) for low, high in zip(edges, LIMITS, strict=False)]
    drawn = drawn_counts(np.random.default_rng(seed), buckets, float(sum(values)))
    assert (len(drawn), int(drawn.sum()), int(drawn.min()) >= 1) == (len(values), sum(values), True)


def test_a_share_below_a_limit_is_between_its_bounds() -> None:
    buckets = [(0.1, 6.0), (0.2, 2.0), (math.inf, 2.0)]
    assert share_below(buckets, 0.1) == (0.6, 0.6, 0.6)
    assert share_below(buckets, 0.15) == pytest.approx((0.7, 0.6, 0.8))
    assert share_below(buckets, 5.0) == (0.8, 0.8, 1.0)
    assert share_below([(0.1, 0.0)], 1.0) is None
