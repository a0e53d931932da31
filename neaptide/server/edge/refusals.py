"""What is refused is paid for by who sent it: work on refused requests is a bounded share of the time.

A caller whose requests are refused at once can send the next one at once, so that a single connection would keep the
process busy that other callers' tokens go through. Told 429 instead it would do the same.
"""

import time
from collections.abc import Callable
from typing import TypeVar

SHARE = 0.1
"""Of one core, for the refused requests of each caller."""
GRACE_S = 2.0
"""Of waiting that is let off: who sends a bad request now and then is told at once."""
LEAST_COST_S = 2e-3
"""Of any request: its connection, its headers, its log line."""
LONGEST_WAIT_S = 5.0
"""Shorter than any client's patience."""


T = TypeVar("T")


class Cost:
    """Seconds of work on one request, without those in which it waits for others'."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, work: Callable[[], T]) -> Callable[[], T]:
        """The same work, which adds its time here, also where it raises."""

        def timed() -> T:
            begun_s = time.perf_counter()
            try:
                return work()
            finally:
                self.seconds += time.perf_counter() - begun_s

        return timed


class Refusals:
    """When each caller may hear of its next refusal: the virtual schedule of the generic cell rate algorithm (ITU-T
    I.371, with the cost of each request in place of a constant). Event loop only."""

    def __init__(self) -> None:
        self._due_s: dict[str | None, float] = {}
        """By caller, while it is to come: when the work on its refused requests is a share of the time again."""

    def wait_s(self, caller: str | None, cost_s: float, now_s: float) -> float:
        """How long the reply has to wait to a request that was refused after ``cost_s`` of work."""
        due_s = max(self._due_s.get(caller, now_s), now_s) + max(cost_s, LEAST_COST_S) / SHARE
        self._due_s[caller] = min(due_s, now_s + GRACE_S + LONGEST_WAIT_S)
        return max(self._due_s[caller] - now_s - GRACE_S, 0.0)
