"""Counterfactual replay: the last minutes simulated under the policies that operators would otherwise use.

A child process at idle priority simulates them repeatedly, for one sixtieth of the time. Without traffic it does
nothing, and after a while the child is ended.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from neaptide.server.counterfactual.frames import ShadowAnswer, ShadowTask, answer_decoder, encoder
from neaptide.server.counterfactual.metrics import POLICIES, ShadowMetrics
from neaptide.server.counterfactual.ring import NoAnswerError, TrafficRing
from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.subprocesses.on_call import Child, ChildDiedError

logger = logging.getLogger(__name__)

CHILD = "neaptide.launch.simulating"
IDLE_S = 600.0
"""Idle time after which the child is ended; starting one takes a second of a core."""


@dataclass(slots=True, frozen=True)
class ReplayPace:
    """Length and frequency of the simulations, in seconds."""

    warm_s: float = 60.0
    """Warm-up before the window, because a simulation begins with an empty cache."""
    window_s: float = 300.0
    least_window_s: float = 60.0
    least_requests: int = 20
    """Fewest online requests over which policies are compared. With less the difference is chance, and over an idle
    window it is the edge of the window."""
    work_s: float = 6.0
    """Target for the processor time of one round. On a device with short steps the window is shorter."""
    rest_factor: float = 60.0
    """Time from the start of one round to the next, relative to its processor time: below 2% of a core."""
    least_rest_s: float = 30.0
    fault_rest_s: float = 600.0
    timeout_s: float = 1800.0
    """Longest time of a round, which works in bursts and may wait long at idle priority."""


class ShadowGauge:
    """Runs the simulations from ``start`` to ``stop``. Event loop only.

    Args:
        clock: ``CLOCK_MONOTONIC``.
        temporary: parent of the child's temporary files.
    """

    def __init__(
        self,
        ring: TrafficRing,
        metrics: ShadowMetrics,
        clock: Callable[[], float],
        pace: ReplayPace | None = None,
        temporary: Path | None = None,
    ) -> None:
        self._ring = ring
        self._metrics = metrics
        self._clock = clock
        self._pace = pace or ReplayPace()
        self._window_s = self._pace.least_window_s
        """Window of the next round. The first round measures the speed of the simulation."""
        self.shown: ShadowAnswer | None = None
        """The last comparison over enough requests."""
        self._end_s = -math.inf
        """End of the window that is shown."""
        self._child = Child(CHILD, None, IDLE_S, temporary)
        self._task: asyncio.Task[None] | None = None
        metrics.age.set_function(self._age_s)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return self._child.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="shadow gauge")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._child.close()

    @property
    def age_s(self) -> float:
        """Time since the end of the window that is shown; NaN before the first."""
        return self._age_s()

    def _age_s(self) -> float:
        return math.nan if self._end_s == -math.inf else self._clock() - self._end_s

    async def _run(self) -> None:
        while True:
            try:
                rest_s = await self._round()
            except (ChildDiedError, TimeoutError, msgspec.MsgspecError, OSError) as error:
                logger.warning("the counterfactual replay failed: %s", error or type(error).__name__)
                self._metrics.rounds.labels("failed").inc()
                await self._child.close()
                rest_s = self._pace.fault_rest_s
            await asyncio.sleep(rest_s)

    async def _round(self) -> float:
        """Runs one round; returns the time until the next."""
        pace = self._pace
        now_s = self._clock()
        since_s = now_s - pace.warm_s - self._window_s
        is_short = now_s - self._ring.first_s < pace.warm_s + pace.least_window_s
        if is_short or self._ring.last_s < since_s:
            return pace.least_rest_s
        with contextlib.suppress(NoAnswerError, EngineUnavailableError):
            answer = await self._ask(await self._ring.pieces(since_s - pace.least_rest_s))
            self._take(answer)
            return max(pace.least_rest_s, pace.rest_factor * answer.cpu_s - (self._clock() - now_s))
        return pace.least_rest_s

    async def _ask(self, pieces: list[bytes]) -> ShadowAnswer:
        pace, child = self._pace, self._child
        task = ShadowTask(pieces, POLICIES, pace.warm_s, self._window_s, self._ring.since_s)
        await child.wake()
        child.send(encoder.encode(task))
        answer = answer_decoder.decode(await child.receive(pace.timeout_s))
        child.rest()
        return answer

    def _take(self, answer: ShadowAnswer) -> None:
        pace, metrics = self._pace, self._metrics
        metrics.cpu.inc(answer.cpu_s)
        if answer.fault:
            logger.warning("the counterfactual replay failed: %s", answer.fault)
        outcome = "failed" if answer.fault else "too_short" if answer.real is None else "compared"
        if answer.real is not None and answer.requests < pace.least_requests:
            outcome = "too_few"
        metrics.rounds.labels(outcome).inc()
        if answer.real is None:
            return
        if outcome == "compared":
            metrics.show(answer)
            self.shown = answer
            self._end_s = answer.end_s
        simulated_s = pace.warm_s + answer.end_s - answer.start_s
        affordable_s = simulated_s * pace.work_s / max(answer.cpu_s, 1e-3) - pace.warm_s
        self._window_s = min(max(affordable_s, pace.least_window_s), pace.window_s)
