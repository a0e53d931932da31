"""Line about the work of the last ten seconds, in the log; none while the server is idle."""

import asyncio
import logging
from collections.abc import Callable

from neaptide.engine.messages import Occupancy
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.observe.history import History, Interval, Targets, quantile, since, total
from neaptide.server.observe.status import percent, short

logger = logging.getLogger(__name__)

PERIOD_S = 10


def work_line(work: Interval, seconds: float, occupancy: Occupancy) -> str | None:
    """The line, or None if there was no work.

    Args:
        work: sums of ``seconds`` seconds.
    """
    if not (work.online_tokens or work.offline_tokens or work.outcomes):
        return None
    now = occupancy
    blocks = now.blocks_free + now.blocks_cached + now.blocks_online + now.blocks_offline
    parts = [
        f"{work.online_tokens / seconds:.0f} online + {work.offline_tokens / seconds:.0f} offline tokens/s",
        f"running {now.running_online} + {now.running_offline}",
        f"waiting {now.waiting_online} + {now.waiting_offline}",
        f"KV {percent(now.blocks_online + now.blocks_offline, blocks)}",
    ]
    judged = Targets()
    for targets in work.targets.values():
        judged.add(targets)
    if count := judged.ttft_met + judged.ttft_missed:
        met = f"met TTFT {percent(judged.ttft_met, count)}, TPOT {percent(judged.tpot_met, count)} of {count}"
        p99_s = quantile(work.ttft, 0.99)
        parts.append(met if p99_s is None else f"{met} (TTFT p99 {short(p99_s)})")
    return "; ".join(parts)


class WorkLog:
    """Writes the line every ``PERIOD_S`` seconds of work, from ``start`` to ``stop``."""

    def __init__(self, history: History, engine: EngineState, say: Callable[[str], None] = logger.info) -> None:
        self._history = history
        self._engine = engine
        self._say = say
        self._until_s = history.now_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="work log")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """Writes the line about the whole intervals that have ended since the last call."""
        began_s, self._until_s = self._until_s, self._history.whole_until_s
        ended = [one for one in since(self._history.intervals, began_s) if one.start_s < self._until_s]
        now = self._engine.occupancy
        occupancy = Occupancy(*(getattr(now, name) for name in Occupancy.__struct_fields__))
        line = work_line(total(ended), max(self._until_s - began_s, 1.0), occupancy)
        if line is not None:
            self._say(line)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look()
