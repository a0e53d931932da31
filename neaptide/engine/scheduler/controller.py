"""The controller behind the time budget: shrinks it while steps overrun, lets it recover when they do not."""

from collections import deque


class OverrunController:
    """A factor in [0.6, 1] on the time budget.

    A step that overran the whole budget, not only what the factor left of it, takes 0.9 of the factor if more than 10%
    of the last 50 did; a step that kept the budget gives back 0.01. The cost model's margin lets 5% of them overrun
    and follows the machine by itself: this is for the moments when it does not keep that promise.
    """

    WINDOW_STEPS = 50
    OVERRUN_SHARE = 0.1
    """Twice what the margin promises. At just that share, a model that is exactly right would be punished for half of
    the time."""
    FLOOR = 0.6

    def __init__(self) -> None:
        self.factor = 1.0
        self._overran: deque[bool] = deque(maxlen=self.WINDOW_STEPS)

    def observe(self, duration_s: float, budget_s: float) -> None:
        overran = duration_s > budget_s
        self._overran.append(overran)
        if not overran:
            self.factor = min(1.0, self.factor + 0.01)
        elif sum(self._overran) > self.OVERRUN_SHARE * self.WINDOW_STEPS:
            self.factor = max(self.FLOOR, self.factor * 0.9)
