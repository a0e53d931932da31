"""Decides when a silent engine hangs. Reads no clock: callers pass times of one clock, in seconds."""

from collections import deque
from collections.abc import Iterable

from neaptide.engine.messages import StepStats

LEAST_SILENCE_S = 9.0
"""Silence that means a hang unless the step is long. An engine reports after every step, and twice a second when
idle."""
SILENCE_STEPS = 3.0
"""A step may take this many times its predicted time."""
LONGEST_SILENCE_S = 120.0
"""Longest silence, whatever the step's prediction; the server has a setting for it."""
WINDOW_STEPS = 200
LEAST_STEPS = 20
SLOW_QUANTILE = 0.95
"""Quantile of the last steps' times relative to their predictions. One pause of the machine is one step of many and
changes nothing. A machine that is slow in one step of 20 counts as slow."""


class Watchdog:
    """Watches one engine process.

    Args:
        longest_silence_s: silence that means a hang whatever a step was predicted to take.
        now_s: when the engine became ready.
    """

    def __init__(self, longest_silence_s: float, now_s: float) -> None:
        self._longest_silence_s = longest_silence_s
        self._heard_s = now_s
        self._slowness: deque[float] = deque(maxlen=WINDOW_STEPS)

    def hear(self, now_s: float, steps: Iterable[StepStats] = ()) -> None:
        """Notes a message of the engine, with the steps that it reports."""
        self._heard_s = now_s
        self._slowness += (s.duration_s / s.predicted_s for s in steps if s.predicted_s > 0.0)

    def excuse(self, seconds: float) -> None:
        """Excludes a time in which this process was stopped: the whole machine may have been."""
        self._heard_s += max(seconds, 0.0)

    def left_s(self, predicted_s: float, now_s: float) -> float:
        """Time that the engine may still be silent; 0 or less means a hang.

        Args:
            predicted_s: predicted time of its running step; 0 if none runs.
        """
        return self._heard_s + self.limit_s(predicted_s) - now_s

    def limit_s(self, predicted_s: float) -> float:
        """Silence that means a hang in a step with this predicted time."""
        limit_s = max(LEAST_SILENCE_S, SILENCE_STEPS * self._usual_slowness() * predicted_s)
        return min(limit_s, self._longest_silence_s)

    def _usual_slowness(self) -> float:
        """Usual ratio of step times to their predictions; at least 1."""
        ordered = sorted(self._slowness)
        if len(ordered) < LEAST_STEPS:
            return 1.0
        return max(1.0, ordered[int(SLOW_QUANTILE * (len(ordered) - 1))])
