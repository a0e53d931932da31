"""Refuses requests that this process itself would answer too late.

Beyond some rate of requests the event loop and the threads for bodies are the bottleneck, not the engine. Requests then
wait before anything of theirs is known, and every one of them would be late. Refusing some costs little and keeps the
others in time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from neaptide.engine.params import RequestClass, Tier, request_class
from neaptide.server.http.errors import OverloadedError

SHARES = {Tier.PRIORITY: 0.75, Tier.DEFAULT: 0.5, Tier.FLEX: 0.25}
"""Part of the TTFT target that a request may wait before work on it begins. The higher tiers are refused last."""
LONGEST_S = 1.0
"""Largest TTFT target in this sum: a longer wait shows overload, whatever the target."""
LEAST_WAITING = 64
"""With fewer requests waiting, one that is late has met a pause, and no overload: it is served."""


class Lag:
    """Requests between their arrival and the engine. Event loop only, but for ``check``."""

    def __init__(self) -> None:
        self._num_waiting = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a request that is not with the engine yet."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def check(self, tier: Tier, waited_s: float, ttft_slo_s: float) -> None:
        """Raises OverloadedError if a request has waited for too long, and many others wait."""
        allowed_s = SHARES.get(tier, SHARES[Tier.FLEX]) * min(ttft_slo_s, LONGEST_S)
        if self._num_waiting >= LEAST_WAITING and waited_s > allowed_s:
            raise OverloadedError(online=request_class(tier) is RequestClass.ONLINE, retry_after_s=1)
