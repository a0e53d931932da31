"""Fluid model of batch work beside chats: paths of future chat load, and when a batch ends on each of them.

Chats take a share of the device in every period of ten minutes, and batch work flows through the rest. Future loads are
drawn from recorded ones: the mean of each time of day, moved to the level of the last half hour, plus the deviations of
a contiguous block of the record (block bootstrap). Pure: no clock, and random numbers come from a seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray

DAY_PERIODS = 144
HORIZON_PERIODS = 2 * DAY_PERIODS
"""How far quotes look ahead: a batch that takes longer gets no finish time."""
NUM_PATHS = 400
RECENT_PERIODS = 3
"""Number of last periods whose deviation from the time of day is carried into the future."""
FEWEST_DAYS = 2
"""Days on which each time of day must have been seen before it counts for itself."""
LEAST_LEVEL = 0.02
"""Added to loads before their logarithm is taken: an idle night is no infinitely large deviation."""
BLIND_SIGMA = 0.5
"""Standard deviation of the logarithm of the load level while less than ``FEWEST_DAYS`` are recorded."""


@dataclass(frozen=True, slots=True)
class LoadPaths:
    """Possible loads of the following periods."""

    loads: FloatArray
    """[paths, periods] share of the device that chats take."""
    first_s: float
    """Seconds until the end of the first period, which has begun."""
    period_s: float
    has_days: bool
    """Whether times of day count for themselves."""
    lag_s: float = 0.0
    """Seconds of their load by which chats fall behind while batch work runs; they are done after it."""


def load_paths(
    loads: FloatArray,
    first_slot: int,
    rng: np.random.Generator,
    *,
    num_paths: int = NUM_PATHS,
    horizon: int = HORIZON_PERIODS,
    first_s: float = 600.0,
    period_s: float = 600.0,
) -> LoadPaths:
    """Paths that begin with the period after the last recorded one.

    Args:
        loads: [periods] recorded loads without gaps, oldest first; NaN where nothing was observed.
        first_slot: period of the day that the first one is, from 0.
    """
    if not np.isfinite(loads).any():
        flat = np.zeros((num_paths, horizon))
        return LoadPaths(flat, first_s, period_s, has_days=False)
    levels = np.log(loads + LEAST_LEVEL)
    slots = (first_slot + np.arange(len(loads) + horizon)) % DAY_PERIODS
    typical, deviations = _by_time_of_day(levels, slots[: len(loads)])
    has_days = typical is not None
    if typical is None:
        center = float(np.nanmean(levels))
        typical, deviations = np.full(DAY_PERIODS, center), levels - center
    known = np.nan_to_num(deviations)
    recent = _recent(deviations)
    carried = _carried(known, recent, horizon)
    starts = rng.integers(len(known), size=num_paths)
    places = (starts[:, None] + np.arange(horizon)) % len(known)
    own = known[places] - recent[starts][:, None] * carried
    if not has_days:
        own = own + BLIND_SIGMA * rng.standard_normal((num_paths, 1))
    paths = typical[slots[len(loads) :]] + recent[-1] * carried + own
    return LoadPaths(np.maximum(np.exp(paths) - LEAST_LEVEL, 0.0), first_s, period_s, has_days)


def _by_time_of_day(levels: FloatArray, slots: IntArray) -> tuple[FloatArray | None, FloatArray]:
    """Mean of each time of day, and each level less the mean of the other days; None if too few days are recorded."""
    seen = np.isfinite(levels)
    counts = np.bincount(slots[seen], minlength=DAY_PERIODS)
    if counts.min() < FEWEST_DAYS:
        return None, levels
    sums = np.bincount(slots[seen], weights=levels[seen], minlength=DAY_PERIODS)
    others = (sums[slots] - np.where(seen, levels, 0.0)) / np.maximum(counts[slots] - 1, 1)
    return sums / counts, levels - others


def _recent(deviations: FloatArray) -> FloatArray:
    """[periods] mean of the deviations of the periods up to and before each start; entry k is of what precedes k.

    The last entry is of the time after the record.
    """
    seen = np.isfinite(deviations)
    sums = np.concatenate(([0.0], np.cumsum(np.where(seen, deviations, 0.0))))
    counts = np.concatenate(([0], np.cumsum(seen)))
    ends = np.arange(len(deviations) + 1)
    begins = np.maximum(ends - RECENT_PERIODS, 0)
    return np.asarray((sums[ends] - sums[begins]) / np.maximum(counts[ends] - counts[begins], 1))


def _carried(known: FloatArray, recent: FloatArray, horizon: int) -> FloatArray:
    """[horizon] share of the recent deviation that remained after so many periods: least squares, from 0 to 1."""
    places = (np.arange(len(known))[:, None] + np.arange(horizon)) % len(known)
    before = recent[: len(known)]
    power = float(before @ before)
    if power <= 0.0:
        return np.zeros(horizon)
    return np.asarray(np.clip(before @ known[places] / power, 0.0, 1.0))


def finish_times(paths: LoadPaths, work_s: FloatArray, efficiency: FloatArray) -> FloatArray:
    """[paths] seconds until the work is done; infinite if it takes longer than the paths.

    Args:
        work_s: [paths] device time that it needs, with all that goes before it.
        efficiency: [paths] device time that batch work gets done in a second that chats leave.
    """
    lengths = np.full(paths.loads.shape[1], paths.period_s)
    lengths[0] = paths.first_s
    lag_s = np.minimum(paths.loads, 1.0) * efficiency[:, None] * paths.lag_s
    done = np.cumsum(np.maximum(1.0 - paths.loads, 0.0) * efficiency[:, None] * lengths, axis=1) + lag_s
    done = np.maximum.accumulate(done, axis=1)
    ends = np.cumsum(lengths)
    place = (done < work_s[:, None]).sum(axis=1)
    inside = np.minimum(place, len(lengths) - 1)
    rows = np.arange(len(work_s))
    before = np.where(inside > 0, done[rows, np.maximum(inside - 1, 0)], lag_s[:, 0])
    gained = done[rows, inside] - before
    part = (work_s - before) / np.maximum(gained, 1e-12)
    found = ends[inside] - lengths[inside] * (1.0 - np.clip(part, 0.0, 1.0))
    # However far chats fall behind, there is one device.
    return np.where(place < len(lengths), np.maximum(found, work_s / efficiency), math.inf)


def quantile(values: FloatArray, share: float) -> float:
    """The value that ``share`` of all are at most; infinite values count as the largest."""
    ranked = np.sort(values)
    return float(ranked[min(math.ceil(share * len(ranked) - 1e-9), len(ranked)) - 1])


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """A batch that is not done yet."""

    key: str
    """Key that its work is charged to."""
    work_s: float
    """Device time that it still needs."""
    left_s: float
    """Seconds until its deadline."""


def work_before(
    pool: Sequence[PoolBatch], key: str, own_s: FloatArray, window_s: float, weights: dict[str, float]
) -> FloatArray:
    """Device time that goes to other batches before a new one ends, for each device time that it may need.

    A key's batches run in the order of their deadlines. Keys share the device by their weights, as long as they have
    work.
    """
    waits: dict[str, float] = {}
    for one in pool:
        if one.key != key or one.left_s <= window_s:
            waits[one.key] = waits.get(one.key, 0.0) + one.work_s
    own_before_s, weight = waits.pop(key, 0.0), weights.get(key, 1.0)
    before_s = np.full(own_s.shape, own_before_s)
    for other, work_s in waits.items():
        before_s += np.minimum(work_s, (own_s + own_before_s) * (weights.get(other, 1.0) / weight))
    return before_s
