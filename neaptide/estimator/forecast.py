"""Forecasts how many KV blocks online work will hold, from the last minutes.

Each forecast bounds the most blocks held within the next ``horizon_s``. The observations form a step function of time
in bins of ``BIN_S``. An observation costs a few additions, and a forecast is made once per bin. The caller supplies all
times; no clock is read.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque

BIN_S = 1.0
WARM_UP_ARRIVALS = 200
WARM_UP_RATIO = 0.1
"""Fraction of the pool that is reserved until ``WARM_UP_ARRIVALS`` arrivals have been seen."""


class WindowForecast(ABC):
    """Implements ``HeadroomPredictor``: the window, the warm-up and the bounds that all forecasts share.

    num_blocks: blocks of the pool; no forecast is larger.
    window_s: length of the sample window. horizon_s: how far ahead the forecast must hold.
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
        """Records that online work holds ``online_held_blocks`` from ``now_s`` on. Times must not decrease.

        Repeating an unchanged value changes nothing, not even rounding, if it is repeated at least once per window. The
        step log omits such repeats.
        """
        now_bin = int(now_s // BIN_S)
        if self._bin < 0:
            # The first value counts from the beginning of the bin.
            self._bin, self._last_s, self._held_blocks = now_bin, now_bin * BIN_S, online_held_blocks
        elif now_bin > self._bin:
            self._close_bins_before(now_bin)
        if online_held_blocks != self._held_blocks:
            self._hold_until(now_s)
            self._held_blocks = online_held_blocks

    def observe_arrival(self, now_s: float) -> None:
        self._num_arrivals += 1

    def headroom_blocks(self, now_s: float) -> int:
        """Blocks to leave for online work: the last closed bin's forecast, or the blocks held now if that is more."""
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

        horizon_peak: most blocks held in the horizon that ends now; None before a whole horizon has passed.
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
        # A silence longer than the window fills the whole window.
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
    """Mean plus ``k`` standard deviations of the blocks held in the window.

    Echo, section 5.3: k = 2 is said to cover 95% of cases, assuming a normal distribution.
    """

    def __init__(self, num_blocks: int, k: float = 2.0, *, window_s: float = 900.0, horizon_s: float = 30.0) -> None:
        super().__init__(num_blocks, window_s=window_s, horizon_s=horizon_s)
        self._k = k

    def _forecast(self, horizon_peak: int | None) -> float:
        return self._mean + self._k * self._deviation


class QuantileForecast(WindowForecast):
    """The ``q`` quantile of the horizons' peaks in the window: the smallest peak that a fraction ``q`` does not
    exceed.

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
        # only horizons that began in the window
        if len(self._horizon_peaks) > self._window_bins - self._horizon_bins + 1:
            oldest = self._horizon_peaks.popleft()
            del self._sorted_peaks[bisect_left(self._sorted_peaks, oldest)]
        return self._sorted_peaks[math.ceil(self._q * len(self._sorted_peaks)) - 1]


class ConformalForecast(WindowForecast):
    """The middle of present and mean demand, plus k standard deviations, with k learned from hits and misses.

    After each horizon, ``k += GAIN * (miss - alpha)``; miss is 1 if its peak exceeded the reservation, else 0. Summed
    up, the fraction of misses differs from ``alpha`` by the change of k over ``GAIN`` times the number of horizons. So
    it approaches ``alpha`` for any demand, as long as k is above 0. This is the feedback of adaptive conformal
    inference (Gibbs and Candes, NeurIPS 2021, equation 2), one horizon late. It moves the threshold itself, as in
    quantile tracking (Angelopoulos, Candes and Tibshirani, NeurIPS 2023: no infinite sets).

    Raises:
        ValueError: alpha is not in (0, 1).
    """

    GAIN = 0.05
    """Standard deviations per miss. Every horizon that ends in a burst misses it, so up to 30 in a row."""
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
        """The reservation of each horizon that has not ended yet."""

    def _forecast(self, horizon_peak: int | None) -> float:
        if horizon_peak is not None and len(self._reserved) == self._horizon_bins:
            is_miss = horizon_peak > self._reserved.popleft()
            # Not below 0: a quiet night must not save up misses for the morning.
            self._k = max(0.0, self._k + self.GAIN * (is_miss - self._alpha))
        level = self.PRESENT_WEIGHT * self._held_blocks + (1.0 - self.PRESENT_WEIGHT) * self._mean
        forecast = level + self._k * self._deviation
        self._reserved.append(min(self._num_blocks, max(math.ceil(forecast), self._held_blocks)))
        return forecast


class TwoSpeedForecast(WindowForecast):
    """A fast level plus a slow memory of how far the horizons' peaks exceeded it.

    The level is between the blocks held now and their mean over ``FAST_S``, so it follows a step in load within two
    minutes. The excess of the next horizon's peak is the ``1 - alpha`` quantile of the excesses in the last ``SLOW_S``:
    split conformal prediction on recent residuals. A step in load adds one horizon's length of large residuals, so it
    raises the reservation only briefly. ``ConformalForecast`` reacts longer: misses raise a factor that recovers
    slowly, and it multiplies a deviation that the step has widened.

    Raises:
        ValueError: alpha is not in (0, 1).
    """

    PRESENT_WEIGHT = 0.6
    """Weight of the blocks held now. They fall back towards their mean, but not fully within a horizon."""
    FAST_S = 120.0
    SLOW_S = 1800.0
    RAMP_HORIZONS = 2
    """Number of first horizons without learning: a machine that fills up from empty is not a burst."""

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
        """Levels of the horizons that have not ended yet."""
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
        """The forecast if it is warm. Before, held blocks are expected to rise as much as within the last horizon.

        A fixed tenth is too little if online work already holds more: every further block would be taken from an
        offline request, which is recomputed later. The few residuals of a load's beginning describe only that
        beginning, and their largest reserves too much.
        """
        if self._is_warm:
            return self._forecast_blocks
        least_peak = min(self._peaks, default=self._held_blocks)
        return max(self._warm_up_blocks, self._held_blocks + self._held_blocks - least_peak)

    def _fast_mean(self) -> float:
        """Mean over ``FAST_S``, including the bin that was just closed."""
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
