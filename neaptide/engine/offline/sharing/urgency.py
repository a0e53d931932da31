"""Which jobs go before turns, because they would be late without."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from neaptide.engine.offline.lanes import Lane

RATE_WINDOW_S = 60.0
"""Of the rate at which offline work gets done."""
PERIOD_S = 1.0
"""Between two measurements of the rate; then it is settled anew which jobs are urgent."""
LAX_FACTOR = 1.25
"""A job is urgent when what is left of it, at its own share, would take this much of the time until its deadline ..."""
CUSHION_S = 10.0
"""... less so many seconds: what is left to the last moment is late with the first burst of online work."""
LANES_AT_ONCE = 256
"""Judged in one step; where there are more, settling takes several."""


class Urgency:
    """In the order of their deadlines, jobs that would be late if they only had their shares, and can be in time behind
    those due before them.

    A job that cannot be in time is not urgent, whatever it lacks: in overload the jobs due first are in time, and not
    all of them late. What is due before a job is all that can be in time, urgent already or not, as for the outlooks.

    Args:
        weights: of shares; 1 unless given.
        lanes: with requests, those that came earlier first.
        is_wanted: without it no job is urgent, and only the rate is measured.
    """

    def __init__(self, weights: Mapping[str, float], lanes: Collection[Lane], is_wanted: bool) -> None:
        self._weights, self._lanes, self._is_wanted = weights, lanes, is_wanted
        self.places: dict[Lane, int] = {}
        """Of the urgent ones, in their order."""
        self.rate_tokens_per_s: float | None = None
        """All offline work."""
        self._served_tokens = 0
        """Since it was measured last."""
        self._measured_at_s: float | None = None
        """None while nothing waits."""
        self._judging: Iterator[None] | None = None

    def served(self, num_tokens: int) -> None:
        """So many tokens of prompts or answers were done."""
        self._served_tokens += num_tokens

    def place(self, lane: Lane) -> float:
        """Infinite of one that is not urgent."""
        return self.places.get(lane, math.inf)

    def leave(self, lane: Lane) -> None:
        self.places.pop(lane, None)

    def begin_step(self, now_s: float, is_paused: bool) -> None:
        """A step is to be planned; with nothing to do, what is done says nothing of what could be."""
        if is_paused or not self._lanes:
            self._measured_at_s, self._served_tokens, self.places, self._judging = None, 0, {}, None
        elif self._measured_at_s is None:
            self._measured_at_s, self._served_tokens = now_s, 0
        elif now_s >= self._measured_at_s + PERIOD_S:
            self._measure(now_s - self._measured_at_s)
            self._measured_at_s, self._served_tokens = now_s, 0
            if self._judging is None and self._is_wanted and self.rate_tokens_per_s:
                self._judging = self._judge(now_s, self.rate_tokens_per_s)
        if self._judging is not None and next(self._judging, self) is self:
            self._judging = None

    def _measure(self, passed_s: float) -> None:
        rate, weight = self._served_tokens / passed_s, -math.expm1(-passed_s / RATE_WINDOW_S)
        known = self.rate_tokens_per_s
        self.rate_tokens_per_s = rate if known is None else known + weight * (rate - known)

    def _judge(self, now_s: float, rate: float) -> Iterator[None]:
        """Some of the jobs until each stop; the result counts when all have been judged."""
        num_lanes = Counter(lane.share for lane in self._lanes)
        total_weight = sum(self._weights.get(share, 1.0) for share in num_lanes)
        jobs = sorted((lane for lane in self._lanes if lane.is_job), key=lambda lane: lane.deadline_s)
        urgent: list[Lane] = []
        before_s = 0.0
        for number, lane in enumerate(jobs):
            if number and number % LANES_AT_ONCE == 0:
                yield
            own = self._weights.get(lane.share, 1.0) / total_weight / num_lanes[lane.share]
            left_s, work_s = lane.deadline_s - now_s, lane.num_tokens_left / rate
            # The last row may be handed out no later than it takes from there to its end.
            if before_s + work_s + lane.row_s <= left_s:
                before_s += work_s
                if left_s < LAX_FACTOR * (work_s / own + lane.row_s) + CUSHION_S:
                    urgent.append(lane)
        self.places = {lane: place for place, lane in enumerate(urgent) if lane in self._lanes}
