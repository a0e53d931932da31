"""Whose turn it is in the offline pool: which lane the next request comes from."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

from neaptide.engine.offline.lanes import Lane

QUANTUM_TOKENS = 8192
"""A lane keeps its turn for so long: requests of a job that share a prefix run one after another."""
RATE_WINDOW_S = 60.0
"""Of the rate at which offline work gets done."""
PERIOD_S = 1.0
"""Between two measurements of the rate; then it is settled anew which jobs are urgent."""
LEAD_TOKENS = 1 << 18
"""A plan may hand out so much more of one share, or of one job of a share, than of another: some seconds of a GPU, a
minute of a CPU. Over time each has what its turns would have given it."""
GUARD_S = 600.0
"""After so long a job goes before younger ones, where nothing else keeps it from waiting for ever."""
LAX_FACTOR = 1.25
"""A job is urgent when what is left of it, at its own share, would take this much of the time until its deadline ..."""
CUSHION_S = 10.0
"""... less so many seconds: what is left to the last moment is late with the first burst of online work."""


class Turns(ABC):
    """An order of lanes, which may depend on what was taken from each."""

    @abstractmethod
    def key(self, lane: Lane) -> Any:
        """The lane with the smallest comes next."""

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        """Of these lanes those of which a plan may choose the next row."""
        first = min(map(self.key, lanes))
        return [lane for lane in lanes if self.key(lane) == first]

    @property
    def rate_tokens_per_s(self) -> float | None:
        """At which offline work was done of late; None if that is not known."""
        return None

    def copy(self) -> Self:
        """To look ahead with."""
        return self

    def charge(self, share: str, lane: Lane | None, num_tokens: int) -> None:  # noqa: B027 (an order may not care)
        """So many tokens of prompts or answers were done for a share; the lane that they were of may be gone."""

    def join(self, lane: Lane, others: Collection[Lane]) -> None:  # noqa: B027
        """The lane has got requests."""

    def leave(self, lane: Lane) -> None:  # noqa: B027
        """The lane has none left."""

    def begin_step(self, now_s: float, lanes: Collection[Lane]) -> None:  # noqa: B027
        """A step is to be planned; these lanes have requests."""


class ByDeadline(Turns):
    """Flex requests first, for a caller waits, then jobs by deadline."""

    def key(self, lane: Lane) -> float:
        return lane.deadline_s if lane.is_job else -math.inf


class ByAge(ByDeadline):
    """The same; but a plan may choose among all jobs, until one has been there for long: no order puts it off for ever.

    Our guard: BatchLLM and BlendServe plan a pool that nothing is added to.
    """

    def __init__(self) -> None:
        self._came_s: dict[Lane, float] = {}
        self._now_s = 0.0

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        jobs = [lane for lane in lanes if lane.is_job]
        return [lane for lane in jobs if self._came_s[lane] <= self._now_s - GUARD_S] or jobs

    def join(self, lane: Lane, others: Collection[Lane]) -> None:
        self._came_s[lane] = self._now_s

    def leave(self, lane: Lane) -> None:
        del self._came_s[lane]

    def begin_step(self, now_s: float, lanes: Collection[Lane]) -> None:
        self._now_s = now_s


class ByShares(Turns):
    """Jobs that would be late first; else shares take turns by their weights, and in a share its jobs.

    A share is what an API key may have of the offline work. Flex requests of a share count as one of its jobs. Turns
    are deficit round robin in its stateless form: the lane goes next that has had the fewest whole quanta.

    Args:
        weights: of shares; 1 unless given.
        knows_urgency: without it no job goes before turns.
    """

    def __init__(self, weights: Mapping[str, float], knows_urgency: bool = True) -> None:
        self._weights, self._knows_urgency = weights, knows_urgency
        self._of_share: dict[str, float] = {}
        """Tokens that every share has had, by its weight."""
        self._of_lane: dict[Lane, float] = {}
        self._laxity_s: dict[Lane, float] = {}
        """Of the jobs that are urgent: time that could be lost until they are late whatever is done."""
        self._rate: float | None = None
        """Tokens per second, all offline work."""
        self._served_tokens = 0
        """Since it was measured last."""
        self._measured_at_s: float | None = None
        """None while no lane has requests."""

    @property
    def rate_tokens_per_s(self) -> float | None:
        return self._rate

    def copy(self) -> Self:
        other = type(self)(self._weights, self._knows_urgency)
        other._of_share, other._of_lane = dict(self._of_share), dict(self._of_lane)
        other._laxity_s = self._laxity_s
        return other

    def key(self, lane: Lane) -> tuple[float, float, float, bool]:
        laxity_s = self._laxity_s.get(lane, math.inf)
        share_quanta, quanta = self._of_share[lane.share] // QUANTUM_TOKENS, self._of_lane[lane] // QUANTUM_TOKENS
        return laxity_s, share_quanta, quanta, lane.is_job

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        """A job that is urgent by itself; else all that are not too far ahead of others."""
        if (first := min(lanes, key=self.key)) in self._laxity_s:
            return [first]
        least_of_share = min(self._of_share[lane.share] for lane in lanes)
        least: dict[str, float] = {}
        for lane in lanes:
            least[lane.share] = min(least.get(lane.share, math.inf), self._of_lane[lane])
        return [
            lane
            for lane in lanes
            if self._of_share[lane.share] <= least_of_share + LEAD_TOKENS
            and self._of_lane[lane] <= least[lane.share] + LEAD_TOKENS
        ]

    def charge(self, share: str, lane: Lane | None, num_tokens: int) -> None:
        self._served_tokens += num_tokens
        self._of_share[share] = self._of_share.get(share, 0.0) + num_tokens / self._weights.get(share, 1.0)
        if lane in self._of_lane:
            self._of_lane[lane] += num_tokens

    def join(self, lane: Lane, others: Collection[Lane]) -> None:
        """What a share or a job did not use while it had nothing to do, it does not get later."""
        waiting = [self._of_share[other.share] for other in others]
        here = self._of_share.get(lane.share, 0.0)
        if not any(other.share == lane.share for other in others):
            here = max(here, min(waiting, default=0.0))
        self._of_share[lane.share] = here
        siblings = [self._of_lane[other] for other in others if other.share == lane.share]
        self._of_lane[lane] = min(siblings, default=0.0)

    def leave(self, lane: Lane) -> None:
        del self._of_lane[lane]
        self._laxity_s.pop(lane, None)
        if len(self._of_share) > 2 * len(self._of_lane) + 100:  # shares that have not been here for long
            present = {other.share for other in self._of_lane}
            self._of_share = {share: had for share, had in self._of_share.items() if share in present}

    def begin_step(self, now_s: float, lanes: Collection[Lane]) -> None:
        if not lanes:  # what is done says nothing of what could be
            self._measured_at_s, self._served_tokens, self._laxity_s = None, 0, {}
        elif self._measured_at_s is None:
            self._measured_at_s, self._served_tokens = now_s, 0
        elif now_s >= self._measured_at_s + PERIOD_S:
            self._measure(now_s - self._measured_at_s)
            self._measured_at_s, self._served_tokens = now_s, 0
            self._laxity_s = dict(self._urgent(now_s, lanes))

    def _measure(self, passed_s: float) -> None:
        rate, weight = self._served_tokens / passed_s, -math.expm1(-passed_s / RATE_WINDOW_S)
        self._rate = rate if self._rate is None else self._rate + weight * (rate - self._rate)

    def _urgent(self, now_s: float, lanes: Collection[Lane]) -> Iterator[tuple[Lane, float]]:
        """Jobs that would be late if they only had their shares and can be in time, each with its laxity."""
        if not self._rate or not self._knows_urgency:
            return
        num_lanes = Counter(lane.share for lane in lanes)
        total_weight = sum(self._weights.get(share, 1.0) for share in num_lanes)
        for lane in lanes:
            own = self._weights.get(lane.share, 1.0) / total_weight / num_lanes[lane.share]
            left_s, work_s = lane.deadline_s - now_s, lane.num_tokens_left / self._rate
            # The last row may be handed out no later than it takes from there to its end.
            alone_s, shared_s = work_s + lane.row_s, work_s / own + lane.row_s
            if alone_s <= left_s < LAX_FACTOR * shared_s + CUSHION_S:
                yield lane, left_s - alone_s
