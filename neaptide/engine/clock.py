"""The only place where the engine reads time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now(self) -> float: ...

    def sleep_until(self, t_s: float) -> None:
        """Returns when ``now() >= t_s``."""
        ...


class MonotonicClock:
    """``CLOCK_MONOTONIC``, comparable between the processes of one machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, t_s: float) -> None:
        delay_s = t_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)


class VirtualClock:
    """Time that moves only in ``sleep_until``."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def sleep_until(self, t_s: float) -> None:
        self._now_s = max(self._now_s, t_s)
