"""When the phases of a step ended."""

import math

from neaptide.engine.clock import Clock


class StepTimer:
    """When the phases of a step ended.

    With a step in flight while the next is planned, a step's time counts from the end of the one before it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start_s = clock.now()
        self.schedule_s = self.execute_s = self.commit_s = 0.0
        self.scheduled_at_s = self.executed_at_s = self._mark_s = self.start_s

    def scheduled(self) -> None:
        self.schedule_s = self._lap_s()
        self.scheduled_at_s = self._mark_s

    def executed(self, before_s: float = -math.inf) -> None:
        """The step is done; the one before it was at ``before_s``."""
        self._mark_s = max(self._mark_s, before_s)
        self.execute_s = self._lap_s()
        self.executed_at_s = self._mark_s

    def committed(self) -> None:
        self.commit_s = self._lap_s()

    @property
    def end_s(self) -> float:
        return self._mark_s

    def _lap_s(self) -> float:
        now_s = self._clock.now()
        lap_s, self._mark_s = now_s - self._mark_s, now_s
        return lap_s
