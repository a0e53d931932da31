"""Load and cache of a server, for the router that chooses among several."""

import base64

from fastapi import APIRouter, Request

from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.faults import storage_faults
from neaptide.server.context import ServingContext
from neaptide.server.engine_client.capacity_queries import CapacityQueries
from neaptide.server.openai.openapi import replies
from neaptide.server.openai.replies import Backlogs, ReplicaFigures

router = APIRouter()


@router.get("/figures", responses=replies(ReplicaFigures, 503), response_model=None)
async def figures(request: Request, cached: bool = False) -> ReplicaFigures:
    """Online capacity of the engine; with `cached=true`, also a digest of its prefix cache. 503 while new work is
    refused."""
    context: ServingContext = request.app.state.context
    desk: CapacityQueries = request.app.state.capacity_queries
    context.check_open()
    room, at_s = await desk.ask(cached)
    return {
        "age_ms": 1e3 * max(context.clock() - at_s, 0.0),
        "free_slack_ms": 1e3 * room.free_slack_s,
        "ttft_slo_ms": 1e3 * context.ttft_slo_s,
        "prompt_token_ms": 1e3 * room.prompt_token_s,
        "block_size": context.client.info.block_size,
        "online_load": room.online_load,
        "cached": base64.b64encode(room.cached).decode() if cached and room.cached is not None else None,
    }


def backlog_router(service: BatchService) -> APIRouter:
    """Remaining batch work of one service, for an autoscaler."""
    of_batches = APIRouter()

    @of_batches.get("/backlog", responses=replies(Backlogs, 503), response_model=None)
    async def backlog() -> Backlogs:
        """Batches in progress of this model that servers share: time until each is due, and its remaining work. The
        work was estimated when the file was checked; 0 if the device was unknown."""
        with storage_faults(service.health):
            jobs = await service.backlog()
        now_s = service.now_s
        return {"jobs": [{"left_seconds": one.expires_at_s - now_s, "work_seconds": one.work_s} for one in jobs]}

    return of_batches
