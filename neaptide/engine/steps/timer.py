"""Timer for the phases of a step."""

import math

from neaptide.engine.clock import Clock


class StepTimer:
    """Measures the phases of a step.

    If the step was planned while another was in flight, its time counts from the end of that one.
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
        """Ends the execution phase; the step before it ended at ``before_s``."""
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
