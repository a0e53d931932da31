"""How long chats wait in the API process itself, and whether a further chat would be late for that alone.

One thread does the work of all connections. Above its ceiling chats wait between the steps of their way to the engine,
and their first tokens wait on the way back, although the engine has time. Chats are then refused before they are
parsed, while a refusal costs little. The wait in the engine does not count: the scheduler deals with it.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from neaptide.server.http.errors import OverloadedError

OWN_SHARE = 0.5
"""Largest share of the TTFT target for the waits in this process; the engine needs the rest."""
NUM_RECENT = 31
"""Number of chats whose median counts, so that the pause of a few changes nothing."""
MOST_GROWTH = 2.0
"""A forecast is at most so many times the median of recent waits. With few chats on the way a wait is mostly what a
busy processor makes anyone wait, and does not grow with their number."""
OWN_WAIT = "own_wait"
"""Key in a request's state: its ``OwnWait``."""


class OwnWait:
    """The wait of one chat in this process, from its arrival on."""

    __slots__ = ("_arrival_s", "_is_counted", "_num_waiting", "_waits")

    def __init__(self, waits: "OwnWaits", arrival_s: float, num_waiting: int) -> None:
        self._waits = waits
        self._arrival_s = arrival_s
        self._num_waiting = num_waiting
        self._is_counted = True

    def leave(self) -> None:
        """Ends the way to the engine, if it has not ended."""
        if self._is_counted:
            self._is_counted = False
            self._waits.num_waiting -= 1

    def note(self, first_s: float, engine_s: float) -> None:
        """Notes the time of the first token, of which the engine took ``engine_s``."""
        self._waits.note(first_s - self._arrival_s - engine_s, self._num_waiting)


class OwnWaits:
    """Waits of chats in this process. Event loop only. Times are seconds of ``clock``.

    A chat waits longer the more chats are on the way to the engine. So its wait is forecast from their number now and
    from what recent chats waited for each. The number reacts at once; a measured wait is as old as it is long. And it
    ends by itself: while no chat is on the way, the next one is let in and measured.

    Args:
        ttft_slo_s: the server's target for first tokens.
    """

    def __init__(self, ttft_slo_s: float, clock: Callable[[], float]) -> None:
        self._longest_s = OWN_SHARE * ttft_slo_s
        self._clock = clock
        self.num_waiting = 0
        """Number of chats on the way to the engine."""
        self.on_refused: Callable[[str, str], None] = lambda endpoint, request_id: None
        """Told of each refused chat."""
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)
        """Waits of recent chats."""
        self._for_each_s: deque[float] = deque(maxlen=NUM_RECENT)
        """The same for each chat that was on the way."""
        self._late_since_s = math.inf
        self._last_late_s = -math.inf
        """Begin and end of the period in which chats would be late."""

    @property
    def forecast_s(self) -> float:
        """Wait of a chat that comes now for those on the way."""
        if not (self.num_waiting and self._recent_s):
            return 0.0
        return min(self.num_waiting * median(self._for_each_s), MOST_GROWTH * median(self._recent_s))

    def enter(self, arrival_s: float) -> OwnWait:
        """Counts a chat whose last byte came at ``arrival_s``, until it leaves."""
        self.num_waiting += 1
        return OwnWait(self, arrival_s, self.num_waiting)

    def note(self, wait_s: float, num_waiting: int) -> None:
        """Notes a chat's wait, and how many chats were on the way when it came, itself included."""
        self._recent_s.append(wait_s)
        self._for_each_s.append(wait_s / num_waiting)

    def check(self, arrival_s: float) -> None:
        """Raises OverloadedError if a chat would be late, as chats have been for some time.

        A burst that ends is served: refusing a part of it would make no other chat earlier.
        """
        now_s = self._clock()
        if arrival_s - self._last_late_s > self._longest_s:
            self._late_since_s = math.inf
        if now_s - arrival_s + self.forecast_s <= self._longest_s:
            return
        self._late_since_s = min(self._late_since_s, now_s)
        self._last_late_s = now_s
        if now_s - self._late_since_s >= self._longest_s:
            raise OverloadedError(online=True, retry_after_s=1)
