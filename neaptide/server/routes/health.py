"""Probes, version and metrics; none needs a key."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

import neaptide
from neaptide.engine.params import RequestClass
from neaptide.server.batches.service import BatchService
from neaptide.server.context import ServingContext
from neaptide.server.http.errors import UnavailableError, engine_unavailable
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.openai.openapi import replies
from neaptide.server.openai.replies import Load, Version

router = APIRouter()

Handler = TypeVar("Handler", bound=Callable[..., Any])


def _probe(*paths: str, responses: dict[int | str, dict[str, Any]]) -> Callable[[Handler], Handler]:
    """Registers a handler for GET on these paths."""

    def register(handler: Handler) -> Handler:
        for path in paths:
            router.get(path, responses=responses, response_class=Response, response_model=None)(handler)
        return handler

    return register


@_probe("/livez", responses=replies(None, 503))
async def live(request: Request) -> Response:
    """200 while the server works, even while it replaces a dead engine; 503 after five failed engine starts in a
    row."""
    context: ServingContext = request.app.state.context
    if context.client.has_given_up:
        raise engine_unavailable()
    return Response()


@_probe("/health", responses=replies(None, 503))
async def health(request: Request) -> Response:
    """200 while an engine is attached; the supervisor detaches one that is dead or silent. Generates nothing."""
    context: ServingContext = request.app.state.context
    if not context.client.is_ready:
        raise engine_unavailable()
    return Response()


@_probe("/ready", "/readyz", responses=replies(None, 503))
async def ready(request: Request) -> Response:
    """200 while new work is accepted: weights loaded, warmed up, not shutting down, data directory in place."""
    context: ServingContext = request.app.state.context
    context.check_open()
    if not context.client.is_ready:
        raise engine_unavailable()
    batches: BatchService | None = request.app.state.batches
    if batches is not None and batches.health.missing is not None:
        raise UnavailableError("The server's data directory is missing.", code="storage_unavailable")
    return Response()


@_probe("/version", responses=replies(Version))
async def version() -> Response:
    """Version of the server."""
    return JSONResponse(Version(version=neaptide.__version__))


@router.get("/load", responses=replies(Load), response_model=None)
async def load(request: Request) -> Load:
    """Number of running and waiting choices of online requests."""
    context: ServingContext = request.app.state.context
    return {"server_load": context.admission.count(RequestClass.ONLINE)}


@_probe(
    "/metrics", responses=replies(None, raw=dict.fromkeys(("text/plain", "application/openmetrics-text"), "Series."))
)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus format."""
    server_metrics: ServerMetrics = request.app.state.metrics
    content, media_type = await server_metrics.scrapes.exposition(", ".join(request.headers.getlist("accept")))
    # The media type includes its charset; Starlette would add a second one.
    return Response(content, headers={"content-type": media_type})
