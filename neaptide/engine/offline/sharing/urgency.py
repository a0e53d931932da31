"""Urgent jobs: those that go first because they would be late otherwise."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from neaptide.engine.offline.lanes import Lane

RATE_WINDOW_S = 60.0
"""Time constant of the measured rate of offline work."""
PERIOD_S = 1.0
"""Time between two measurements of the rate, each followed by a new choice of urgent jobs."""
LAX_FACTOR = 1.25
"""A job is urgent when its remaining work, at its own share, takes the time left divided by this factor."""
CUSHION_S = 10.0
"""Time subtracted from the time left: a job on time to the second is late with the first burst of online work."""
LANES_AT_ONCE = 256
"""Number of lanes judged in one step; more lanes take several steps."""


class Urgency:
    """Jobs that would be late at their own share and can still be in time, ordered by deadline.

    A job that cannot be in time is not urgent. So in overload the earliest deadlines are met, instead of all jobs being
    late. As for the deadline status, work ahead of a job is that of all earlier jobs that can be in time.

    Args:
        weights: of the tenants; 1 unless given.
        lanes: lanes with requests, in order of arrival.
        is_wanted: False makes no job urgent; only the rate is measured.
    """

    def __init__(self, weights: Mapping[str, float], lanes: Collection[Lane], is_wanted: bool) -> None:
        self._weights, self._lanes, self._is_wanted = weights, lanes, is_wanted
        self.places: dict[Lane, int] = {}
        """Rank of each urgent job."""
        self.rate_tokens_per_s: float | None = None
        """Rate of all offline work."""
        self._served_tokens = 0
        """Tokens since the last measurement."""
        self._measured_at_s: float | None = None
        """None while nothing waits."""
        self._judging: Iterator[None] | None = None

    def served(self, num_tokens: int) -> None:
        """Counts computed prompt tokens and output tokens."""
        self._served_tokens += num_tokens

    def place(self, lane: Lane) -> float:
        """Rank of the lane; infinite if it is not urgent."""
        return self.places.get(lane, math.inf)

    def leave(self, lane: Lane) -> None:
        self.places.pop(lane, None)

    def begin_step(self, now_s: float, is_paused: bool) -> None:
        """Measures the rate and updates the urgent jobs. Idle or paused time is not measured."""
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
        """Judges some jobs up to each yield; the result counts once all are judged."""
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
            # The last line must be admitted early enough for its own run time.
            if before_s + work_s + lane.row_s <= left_s:
                before_s += work_s
                if left_s < LAX_FACTOR * (work_s / own + lane.row_s) + CUSHION_S:
                    urgent.append(lane)
        self.places = {lane: place for place, lane in enumerate(urgent) if lane in self._lanes}
