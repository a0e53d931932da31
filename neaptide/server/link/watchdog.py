"""Decides when an engine that says nothing hangs. Reads no clock: times are passed in, in seconds of one clock."""

from collections import deque
from collections.abc import Iterable

from neaptide.engine.messages import StepStats

LEAST_SILENCE_S = 9.0
"""An engine that is silent for so long hangs, unless its step takes long. It speaks after every step, and twice a
second when it is idle."""
SILENCE_STEPS = 3.0
"""Its step may take this many times what it was predicted to take."""
LONGEST_SILENCE_S = 120.0
"""Whatever the step was predicted to take; the server has a setting for it."""
WINDOW_STEPS = 200
LEAST_STEPS = 20
SLOW_QUANTILE = 0.95
"""Of the last steps' times over their predictions. One pause of the machine is one step of many, and changes nothing;
a machine that is slow in one step of twenty is slow."""


class Watchdog:
    """Watches one life of an engine.

    Args:
        longest_silence_s: means a hang whatever a step was predicted to take.
        now_s: when the engine became ready.
    """

    def __init__(self, longest_silence_s: float, now_s: float) -> None:
        self._longest_silence_s = longest_silence_s
        self._heard_s = now_s
        self._slowness: deque[float] = deque(maxlen=WINDOW_STEPS)

    def hear(self, now_s: float, steps: Iterable[StepStats] = ()) -> None:
        """The engine has spoken, perhaps of steps that it has done."""
        self._heard_s = now_s
        self._slowness += (s.duration_s / s.predicted_s for s in steps if s.predicted_s > 0.0)

    def excuse(self, seconds: float) -> None:
        """This process stood still for so long. The machine may have, so it counts for no silence of the engine."""
        self._heard_s += max(seconds, 0.0)

    def left_s(self, predicted_s: float, now_s: float) -> float:
        """How long the engine may go on to be silent; 0 or less: it hangs.

        Args:
            predicted_s: of the step that it is in; 0: it is in none.
        """
        return self._heard_s + self.limit_s(predicted_s) - now_s

    def limit_s(self, predicted_s: float) -> float:
        """The silence that means a hang in a step that was predicted to take so long."""
        limit_s = max(LEAST_SILENCE_S, SILENCE_STEPS * self._usual_slowness() * predicted_s)
        return min(limit_s, self._longest_silence_s)

    def _usual_slowness(self) -> float:
        """How many times their predictions steps take; at least 1."""
        ordered = sorted(self._slowness)
        if len(ordered) < LEAST_STEPS:
            return 1.0
        return max(1.0, ordered[int(SLOW_QUANTILE * (len(ordered) - 1))])
