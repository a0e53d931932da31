"""Plans the offline pool of an engine when a new plan is due."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from neaptide.engine.messages import EngineReady, PlanReady
from neaptide.engine.offline.planning.occasions import LEAST_ROWS, PERIOD_S, Occasions
from neaptide.server.batches.planning.request import JobRows, PlanRequest
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import BatchOutlooks

logger = logging.getLogger(__name__)


class MakesPlans(Protocol):
    async def plan(self, request: PlanRequest) -> PlanReady | None: ...


class RunningPlan(NamedTuple):
    """Lines of one batch that have output and have not ended, with their output tokens; raw arrays."""

    rows: bytes
    num_tokens: bytes


class Planning:
    """Schedules the plans. Event loop only; collects the jobs' lines in a thread.

    Args:
        rows: functions that return what is left of each job.
        now: seconds of any clock that runs evenly.
    """

    def __init__(
        self,
        planner: MakesPlans,
        engine: EngineClient,
        rows: Callable[[], Sequence[Callable[[], JobRows]]],
        period_s: float = PERIOD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._rows = rows
        self._period_s = period_s
        self._now = now
        self._occasions = Occasions(period_s)
        self._running: dict[str, RunningPlan] = {}
        """Running lines by batch, as last reported by the engine."""
        self._task: asyncio.Task[None] | None = None
        engine.subscribe(BatchOutlooks, self._hear)

    def engine_is_new(self) -> None:
        """Resets the state: a new engine follows no plan."""
        self._occasions.engine_is_new()

    def grown(self, num_rows: int) -> None:
        """Counts lines that were given to the engine."""
        self._occasions.grown(num_rows)
        self._begin_if_due()

    def ended(self, num_lines: int) -> None:
        """Counts ended lines."""
        self._occasions.ended(num_lines)
        self._begin_if_due()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _hear(self, heard: BatchOutlooks) -> None:
        self._running = {one.batch_id: RunningPlan(one.running_rows, one.running_tokens) for one in heard.outlooks}

    def _begin_if_due(self) -> None:
        if self._task is None and self._occasions.is_due(self._now()):
            self._task = asyncio.create_task(self._run(), name="offline planning")

    async def _run(self) -> None:
        """Plans until no plan is due."""
        try:
            while self._occasions.is_due(self._now()):
                await self._plan_once()
                await asyncio.sleep(self._period_s)
        except Exception:
            logger.exception("the offline pool could not be planned")
        finally:
            self._task = None

    async def _plan_once(self) -> None:
        self._occasions.begin(self._now())
        if not self._engine.is_ready:
            return
        info = self._engine.info
        if not info.planned_order:
            return
        request = await asyncio.to_thread(_request, info, self._rows(), dict(self._running))
        num_rows = sum(len(job.rows) for job in request.jobs) // 4
        self._occasions.planned(num_rows)
        if num_rows < LEAST_ROWS:
            return
        plan = await self._planner.plan(request)
        if plan is not None and self._engine.is_ready and self._engine.info is info:
            self._engine.follow(plan)
            logger.info("the offline pool is planned: %d rows", num_rows)


def _request(
    info: EngineReady, rows: Sequence[Callable[[], JobRows]], running: Mapping[str, RunningPlan]
) -> PlanRequest:
    return PlanRequest(
        jobs=[_with_running(of_job(), running) for of_job in rows],
        order=info.planned_order,
        token_s=info.token_s,
        kv_token_s=info.kv_token_s,
        kv_tokens=info.num_blocks * info.block_size,
        unit_tokens=info.block_size,
        tile_tokens=info.tile_tokens,
        pair_s=info.pair_s,
    )


def _with_running(job: JobRows, running: Mapping[str, RunningPlan]) -> JobRows:
    found = running.get(job.batch_id)
    if found is None:
        return job
    return msgspec.structs.replace(job, running_rows=found.rows, running_tokens=found.num_tokens)
