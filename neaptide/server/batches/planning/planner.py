"""Runs the planning process. If it dies, hangs or answers nonsense, only the plan is missing."""

import asyncio
import logging

import msgspec

from neaptide.engine.messages import PlanReady
from neaptide.server.batches.planning.request import (
    PlanRequest,
    answer_decoder,
    check_plan,
    failure_decoder,
    request_encoder,
)
from neaptide.server.subprocesses.frames import framed, receive_frame
from neaptide.server.subprocesses.start import end_child, start_child

logger = logging.getLogger(__name__)

PATIENCE_S = 900.0
"""Longest time of a plan: the process runs only while no other wants the core."""
ROW_BYTES = 64
"""Largest size of a plan per line."""
OTHER_BYTES = 1 << 20


class Planner:
    """Starts a process for each plan, which then returns all of its memory. One at a time; event loop only.

    ``module`` is the program that is run.
    """

    def __init__(self, patience_s: float = PATIENCE_S, module: str = "neaptide.launch.planner") -> None:
        self._patience_s = patience_s
        self._module = module

    async def plan(self, request: PlanRequest) -> PlanReady | None:
        """The plan, or None without one; the log says why."""
        try:
            return await self._ask(request)
        except asyncio.IncompleteReadError:
            reason = "its process ended"
        except TimeoutError:
            reason = f"it took longer than {self._patience_s:.0f} s"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = str(error)
        logger.warning("the offline pool could not be planned: %s", reason)
        return None

    async def _ask(self, request: PlanRequest) -> PlanReady:
        process = await start_child(self._module)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            async with asyncio.timeout(self._patience_s):
                process.stdin.write(framed(await asyncio.to_thread(request_encoder.encode, request)))
                num_rows = sum(len(job.rows) for job in request.jobs) // 4
                frame = await receive_frame(process.stdout, ROW_BYTES * num_rows + OTHER_BYTES)
            return await asyncio.to_thread(_checked, frame, request)
        finally:
            await end_child(process)


def _checked(frame: bytes, request: PlanRequest) -> PlanReady:
    """The plan in the answer. Raises ValueError or msgspec.MsgspecError if it is no plan of the requested lines."""
    try:
        plan = answer_decoder.decode(frame)
    except msgspec.ValidationError:
        raise ValueError(f"its process says: {failure_decoder.decode(frame).reason}") from None
    check_plan(plan, request)
    return plan
