"""Limits the time spent on refused requests of each caller.

A caller whose requests are refused at once can send the next one at once. A single connection could keep the process
busy that sends other callers' tokens. Replying 429 would not slow it down.
"""

import time
from collections.abc import Callable
from typing import TypeVar

SHARE = 0.1
"""Fraction of one core for the refused requests of each caller."""
GRACE_S = 2.0
"""Delay that is waived, so that an occasional bad request is refused at once."""
LEAST_COST_S = 2e-3
"""Least cost of a request: its connection, its headers, its log line."""
LONGEST_WAIT_S = 5.0
"""Longest delay of a refusal; shorter than any client's timeout."""


T = TypeVar("T")


class Cost:
    """Seconds of work on one request, without its waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, work: Callable[[], T]) -> Callable[[], T]:
        """A wrapper of ``work`` that adds its time, even if it raises."""

        def timed() -> T:
            begun_s = time.perf_counter()
            try:
                return work()
            finally:
                self.seconds += time.perf_counter() - begun_s

        return timed


class Refusals:
    """Delays of each caller's refusals. Event loop only.

    Uses the virtual schedule of the generic cell rate algorithm (ITU-T I.371), with the cost of each request in place
    of a constant.
    """

    def __init__(self) -> None:
        self._due_s: dict[str | None, float] = {}
        """Virtual finish time of each caller's refused work at the allowed rate."""

    def wait_s(self, caller: str | None, cost_s: float, now_s: float) -> float:
        """Delay of the reply to a request that was refused after ``cost_s`` of work."""
        due_s = max(self._due_s.get(caller, now_s), now_s) + max(cost_s, LEAST_COST_S) / SHARE
        self._due_s[caller] = min(due_s, now_s + GRACE_S + LONGEST_WAIT_S)
        return max(self._due_s[caller] - now_s - GRACE_S, 0.0)
