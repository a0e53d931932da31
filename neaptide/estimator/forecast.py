"""How many KV blocks online work will hold soon, from what it held in the last minutes.

Each forecast bounds the largest number of blocks held within the next ``horizon_s``. The samples are what
``observe`` was told, as a step function of time in bins of ``BIN_S``: an observation costs a few additions, and a
forecast is made once a bin. Times are those given by the caller; no clock is read.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque

BIN_S = 1.0
WARM_UP_ARRIVALS = 200
WARM_UP_RATIO = 0.1
"""Share of the pool that is reserved until so many arrivals are known."""


class WindowForecast(ABC):
    """Implements ``HeadroomPredictor``: the window, the warm-up and the bounds that all forecasts share.

    num_blocks: blocks of the pool; no forecast asks for more.
    window_s: how far back the samples go. horizon_s: how far ahead the forecast has to hold.
    """

    def __init__(self, num_blocks: int, *, window_s: float = 900.0, horizon_s: float = 30.0) -> None:
        self._num_blocks = num_blocks
        self._window_bins = round(window_s / BIN_S)
        self._horizon_bins = round(horizon_s / BIN_S)
        self._warm_up_blocks = round(num_blocks * WARM_UP_RATIO)
        self._num_arrivals = 0
        self._held_blocks = 0
        self._last_s = 0.0
        self._bin = -1
        """The open bin; -1 before the first observation."""
        self._bin_peak = 0
        self._bin_sum = self._bin_square_sum = 0.0
        self._bins: deque[tuple[float, float]] = deque()
        """Mean and mean square of each closed bin in the window."""
        self._sum = self._square_sum = 0.0
        self._peaks: deque[int] = deque(maxlen=self._horizon_bins)
        self._forecast_blocks = 0

    def observe(self, now_s: float, online_held_blocks: int) -> None:
        """Online work holds so many blocks from ``now_s`` on. Times must not decrease.

        Being told the same again changes nothing, not even the rounding of sums, as long as it is told once in a
        window: the step log leaves out such planning.
        """
        now_bin = int(now_s // BIN_S)
        if self._bin < 0:
            # What is held first counts as held since the bin began.
            self._bin, self._last_s, self._held_blocks = now_bin, now_bin * BIN_S, online_held_blocks
        elif now_bin > self._bin:
            self._close_bins_before(now_bin)
        if online_held_blocks != self._held_blocks:
            self._hold_until(now_s)
            self._held_blocks = online_held_blocks

    def observe_arrival(self, now_s: float) -> None:
        self._num_arrivals += 1

    def headroom_blocks(self, now_s: float) -> int:
        """Blocks to leave for online work: the forecast of the last closed bin, or what is held now if that is more."""
        return min(self._num_blocks, max(self._asked_blocks, self._held_blocks))

    @property
    def _asked_blocks(self) -> int:
        return self._forecast_blocks if self._is_warm else self._warm_up_blocks

    @property
    def _is_warm(self) -> bool:
        return self._num_arrivals >= WARM_UP_ARRIVALS and len(self._bins) >= self._horizon_bins

    @property
    def _mean(self) -> float:
        return self._sum / len(self._bins)

    @property
    def _deviation(self) -> float:
        """Standard deviation of the held blocks over the window."""
        return math.sqrt(max(0.0, self._square_sum / len(self._bins) - self._mean**2))

    @abstractmethod
    def _forecast(self, horizon_peak: int | None) -> float:
        """The bound for the horizon that begins now, at the end of a bin.

        horizon_peak: the most blocks held in the horizon that ends now; None before one has passed.
        """

    def _hold_until(self, end_s: float) -> None:
        seconds = end_s - self._last_s
        if seconds > 0.0:
            self._bin_sum += seconds * self._held_blocks
            self._bin_square_sum += seconds * self._held_blocks**2
            self._bin_peak = max(self._bin_peak, self._held_blocks)
            self._last_s = end_s

    def _close_bins_before(self, now_bin: int) -> None:
        self._close_bin()
        # A silence longer than the window fills it all the same.
        self._bin = max(self._bin, now_bin - self._window_bins)
        self._last_s = self._bin * BIN_S
        while self._bin < now_bin:
            self._close_bin()

    def _close_bin(self) -> None:
        self._hold_until((self._bin + 1) * BIN_S)
        self._add_to_window(self._bin_sum / BIN_S, self._bin_square_sum / BIN_S)
        self._peaks.append(self._bin_peak)
        self._bin += 1
        self._bin_peak = 0
        self._bin_sum = self._bin_square_sum = 0.0
        horizon_peak = max(self._peaks) if len(self._peaks) == self._horizon_bins else None
        self._forecast_blocks = math.ceil(self._forecast(horizon_peak))

    def _add_to_window(self, mean: float, mean_square: float) -> None:
        self._bins.append((mean, mean_square))
        self._sum += mean
        self._square_sum += mean_square
        if len(self._bins) > self._window_bins:
            old_mean, old_mean_square = self._bins.popleft()
            self._sum -= old_mean
            self._square_sum -= old_mean_square


class MuSigmaForecast(WindowForecast):
    """Mean plus ``k`` standard deviations of what was held in the window.

    Echo, section 5.3: with k = 2 said to cover 95% of cases, taking the demand for normally distributed.
    """

    def __init__(self, num_blocks: int, k: float = 2.0, *, window_s: float = 900.0, horizon_s: float = 30.0) -> None:
        super().__init__(num_blocks, window_s=window_s, horizon_s=horizon_s)
        self._k = k

    def _forecast(self, horizon_peak: int | None) -> float:
        return self._mean + self._k * self._deviation


class QuantileForecast(WindowForecast):
    """The ``q`` quantile of the horizons' peaks in the window: the least one that a share ``q`` does not exceed.

    Raises:
        ValueError: q is not in (0, 1].
    """

    def __init__(self, num_blocks: int, q: float = 0.95, *, window_s: float = 900.0, horizon_s: float = 30.0) -> None:
        if not 0.0 < q <= 1.0:
            raise ValueError(f"q must be in (0, 1], not {q}")
        super().__init__(num_blocks, window_s=window_s, horizon_s=horizon_s)
        self._q = q
        self._horizon_peaks: deque[int] = deque()
        self._sorted_peaks: list[int] = []

    def _forecast(self, horizon_peak: int | None) -> float:
        if horizon_peak is None:
            return max(self._peaks)
        self._horizon_peaks.append(horizon_peak)
        insort(self._sorted_peaks, horizon_peak)
        if len(self._horizon_peaks) > self._window_bins - self._horizon_bins + 1:  # those that began in the window
            oldest = self._horizon_peaks.popleft()
            del self._sorted_peaks[bisect_left(self._sorted_peaks, oldest)]
        return self._sorted_peaks[math.ceil(self._q * len(self._sorted_peaks)) - 1]


class ConformalForecast(WindowForecast):
    """Midway between present and mean demand, plus k standard deviations, where k is learned from hits and misses.

    When a horizon has passed, ``k += GAIN * (miss - alpha)``, miss = 1 if its peak was above what was reserved for
    it, else 0. Summed up, the share of misses differs from ``alpha`` by the change of k over ``GAIN`` times the
    number of horizons: the longer the run the closer, whatever the demand does, as long as k is above 0. This is the
    feedback of adaptive conformal inference (Gibbs and Candes, NeurIPS 2021, equation 2), given to the threshold itself
    as in quantile tracking (Angelopoulos, Candes and Tibshirani, NeurIPS 2023: no infinite sets), a horizon late.

    Raises:
        ValueError: alpha is not in (0, 1).
    """

    GAIN = 0.05
    """Standard deviations per miss. A burst is missed by all horizons that it ends, so by up to 30 in a row."""
    START_K = 2.0
    PRESENT_WEIGHT = 0.5

    def __init__(
        self, num_blocks: int, alpha: float = 0.05, *, window_s: float = 900.0, horizon_s: float = 30.0
    ) -> None:
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha must be in (0, 1), not {alpha}")
        super().__init__(num_blocks, window_s=window_s, horizon_s=horizon_s)
        self._alpha = alpha
        self._k = self.START_K
        self._reserved: deque[int] = deque()
        """What was reserved for each horizon that has not passed yet."""

    def _forecast(self, horizon_peak: int | None) -> float:
        if horizon_peak is not None and len(self._reserved) == self._horizon_bins:
            is_miss = horizon_peak > self._reserved.popleft()
            # Not below 0: a quiet night must not leave a debt of misses to the morning.
            self._k = max(0.0, self._k + self.GAIN * (is_miss - self._alpha))
        level = self.PRESENT_WEIGHT * self._held_blocks + (1.0 - self.PRESENT_WEIGHT) * self._mean
        forecast = level + self._k * self._deviation
        self._reserved.append(min(self._num_blocks, max(math.ceil(forecast), self._held_blocks)))
        return forecast


class TwoSpeedForecast(WindowForecast):
    """A fast level, and a slow memory of how far the peaks of horizons were above it.

    The level is between what is held now and its mean over ``FAST_S``, so that it follows a step in load within two
    minutes. How far above it the peak of the next horizon will be is the ``1 - alpha`` quantile of what it was in the
    last ``SLOW_S``: split conformal prediction on recent residuals. A step in load is one run of a horizon's length
    among these, so it does not raise what is reserved for long, as it does where misses push a factor that comes back
    slowly and multiplies a deviation that the step itself has widened (``ConformalForecast``).

    Raises:
        ValueError: alpha is not in (0, 1).
    """

    PRESENT_WEIGHT = 0.6
    """What is held falls back to its mean, but not all the way within a horizon."""
    FAST_S = 120.0
    SLOW_S = 1800.0
    RAMP_HORIZONS = 2
    """Of the first ones nothing is learned: a machine that fills from nothing is no burst."""

    def __init__(
        self, num_blocks: int, alpha: float = 0.05, *, window_s: float = 900.0, horizon_s: float = 30.0
    ) -> None:
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha must be in (0, 1), not {alpha}")
        super().__init__(num_blocks, window_s=window_s, horizon_s=horizon_s)
        self._alpha = alpha
        self._recent_means: deque[float] = deque()
        self._recent_sum = 0.0
        self._num_levels = 0
        self._levels: deque[float] = deque()
        """Of the horizons that have not passed yet."""
        self._residuals: deque[float] = deque()
        self._sorted_residuals: list[float] = []

    def _forecast(self, horizon_peak: int | None) -> float:
        if horizon_peak is not None and len(self._levels) == self._horizon_bins:
            self._learn(horizon_peak - self._levels.popleft())
        level = self.PRESENT_WEIGHT * self._held_blocks + (1.0 - self.PRESENT_WEIGHT) * self._fast_mean()
        self._num_levels += 1
        if self._num_levels > self.RAMP_HORIZONS * self._horizon_bins:
            self._levels.append(level)
        if not (count := len(self._sorted_residuals)):
            return level
        rank = min(count, math.ceil((1.0 - self._alpha) * (count + 1)))
        return max(0.0, level + self._sorted_residuals[rank - 1])

    @property
    def _is_warm(self) -> bool:
        return bool(self._residuals) and super()._is_warm

    @property
    def _asked_blocks(self) -> int:
        """Until it is warm what is held is expected to rise as much as within the last horizon.

        A tenth alone is nothing to an online load that already holds more: every block by which that grows would be
        taken from an offline request, to be computed again. The few residuals of a load that sets in tell of its
        beginning only: their largest reserves too much.
        """
        if self._is_warm:
            return self._forecast_blocks
        least_peak = min(self._peaks, default=self._held_blocks)
        return max(self._warm_up_blocks, self._held_blocks + self._held_blocks - least_peak)

    def _fast_mean(self) -> float:
        """With the bin that has just been closed."""
        mean, _ = self._bins[-1]
        self._recent_means.append(mean)
        self._recent_sum += mean
        if len(self._recent_means) > round(self.FAST_S / BIN_S):
            self._recent_sum -= self._recent_means.popleft()
        return self._recent_sum / len(self._recent_means)

    def _learn(self, residual: float) -> None:
        self._residuals.append(residual)
        insort(self._sorted_residuals, residual)
        if len(self._residuals) > round(self.SLOW_S / BIN_S):
            oldest = self._residuals.popleft()
            del self._sorted_residuals[bisect_left(self._sorted_residuals, oldest)]
