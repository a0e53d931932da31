"""The controller behind the time budget: shrinks it when steps overrun, lets it recover when they do not."""

from collections import deque


class OverrunController:
    """A factor in [0.6, 1] on the time budget: x0.9 while more than 5% of the last 50 steps overran, else +0.01."""

    WINDOW_STEPS = 50
    OVERRUN_SHARE = 0.05
    FLOOR = 0.6

    def __init__(self) -> None:
        self.factor = 1.0
        self._overran: deque[bool] = deque(maxlen=self.WINDOW_STEPS)

    def observe(self, duration_s: float, budget_s: float) -> None:
        self._overran.append(duration_s > budget_s)
        if sum(self._overran) > self.OVERRUN_SHARE * self.WINDOW_STEPS:
            self.factor = max(self.FLOOR, self.factor * 0.9)
            if self.factor == self.FLOOR:
                self._overran.clear()
        else:
            self.factor = min(1.0, self.factor + 0.01)
