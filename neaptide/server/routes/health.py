"""Probes, the version, and the metrics. All open, all answer HEAD."""

from fastapi import APIRouter, Request, Response

import neaptide
from neaptide.engine.params import RequestClass
from neaptide.server.context import ServingContext
from neaptide.server.errors import UnavailableError, engine_unavailable
from neaptide.server.metrics import ServerMetrics

router = APIRouter()


@router.api_route("/livez", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engine lives: the supervisor detaches one that is dead or silent. Costs no generation."""
    context: ServingContext = request.app.state.context
    if not context.client.is_ready:
        raise engine_unavailable()
    return Response()


@router.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/ready", methods=["GET", "HEAD"], include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 while new work is welcome: weights loaded, warmed up, not shutting down."""
    context: ServingContext = request.app.state.context
    if context.draining:
        raise UnavailableError("The server is shutting down.", code="server_shutdown")
    if not context.client.is_ready:
        raise engine_unavailable()
    return Response()


@router.api_route("/version", methods=["GET", "HEAD"], include_in_schema=False)
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": neaptide.__version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Online requests at work."""
    context: ServingContext = request.app.state.context
    return {"server_load": context.admission.count(RequestClass.ONLINE)}


@router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    server_metrics: ServerMetrics = request.app.state.metrics
    content, media_type = server_metrics.render(request.headers.get("accept", ""))
    # The media type carries its charset; Starlette would add a second one.
    return Response(content, headers={"content-type": media_type})
