"""When the offline pool is planned anew: after it has grown, and not too often."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from neaptide.engine.messages import EngineReady, PlanReady
from neaptide.server.batches.planning.request import JobRows, PlanRequest
from neaptide.server.link.engine_client import EngineClient

logger = logging.getLogger(__name__)

LEAST_ROWS = 500
"""A smaller pool is as well off in the order of its prefix trees."""
GROWTH = 0.1
"""Of the rows of the last plan: so many new ones are worth another."""
PERIOD_S = 20.0
"""Between two plans, at least."""


class MakesPlans(Protocol):
    async def plan(self, request: PlanRequest) -> PlanReady | None: ...


class Planning:
    """Event loop only; what is asked of jobs is found out in a thread.

    Args:
        rows: what is left of every job, for a planner.
    """

    def __init__(
        self,
        planner: MakesPlans,
        engine: EngineClient,
        rows: Callable[[], Sequence[Callable[[], JobRows]]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._rows = rows
        self._period_s = period_s
        self._num_new = 0
        """Rows given to the engine since the last plan was begun."""
        self._num_planned = 0
        self._task: asyncio.Task[None] | None = None

    def engine_is_new(self) -> None:
        """It follows no plan yet."""
        self._num_new = self._num_planned = 0

    def grown(self, num_rows: int) -> None:
        """So many more rows were given to the engine."""
        self._num_new += num_rows
        if self._task is None and self._is_due:
            self._task = asyncio.create_task(self._run(), name="offline planning")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def _is_due(self) -> bool:
        return self._num_new >= max(LEAST_ROWS, GROWTH * self._num_planned)

    async def _run(self) -> None:
        """Until the pool has not grown any more."""
        try:
            while self._is_due:
                await self._plan_once()
                await asyncio.sleep(self._period_s)
        except Exception:
            logger.exception("the offline pool is not planned")
        finally:
            self._task = None

    async def _plan_once(self) -> None:
        self._num_new = 0
        if not self._engine.is_ready:
            return
        info = self._engine.info
        if not info.planned_order:
            return
        request = await asyncio.to_thread(_request, info, self._rows())
        num_rows = sum(len(job.rows) for job in request.jobs) // 4
        self._num_planned = num_rows
        if num_rows < LEAST_ROWS:
            return
        plan = await self._planner.plan(request)
        if plan is not None and self._engine.is_ready and self._engine.info is info:
            self._engine.follow(plan)
            logger.info("the offline pool is planned: %d rows", num_rows)


def _request(info: EngineReady, rows: Sequence[Callable[[], JobRows]]) -> PlanRequest:
    return PlanRequest(
        jobs=[of_job() for of_job in rows],
        order=info.planned_order,
        token_s=info.token_s,
        kv_token_s=info.kv_token_s,
        kv_tokens=info.num_blocks * info.block_size,
        unit_tokens=info.block_size,
    )
