"""The definition of percentiles for live and simulated figures."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Percentiles(NamedTuple):
    """Three percentiles; NaN without values."""

    p50: float
    p90: float
    p99: float


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the nearest ranks (numpy's ``linear``), q in [0, 1]; NaN without values."""
    if not len(values):
        return math.nan
    return float(np.percentile(np.asarray(values, np.float64), 100 * q))


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Percentiles of the values that are not None."""
    present = np.array([value for value in values if value is not None], np.float64)
    if not present.size:
        return Percentiles(math.nan, math.nan, math.nan)
    return Percentiles(*np.percentile(present, (50, 90, 99)).tolist())
