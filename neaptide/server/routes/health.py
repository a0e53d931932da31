"""Probes, the version, and the metrics. All open."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

import neaptide
from neaptide.engine.params import RequestClass
from neaptide.server.context import ServingContext
from neaptide.server.edge.errors import engine_unavailable
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.openai.openapi import replies
from neaptide.server.openai.replies import Load, Version

router = APIRouter()

Handler = TypeVar("Handler", bound=Callable[..., Any])


def _probe(*paths: str, responses: dict[int | str, dict[str, Any]]) -> Callable[[Handler], Handler]:
    """A handler for GET on these paths."""

    def register(handler: Handler) -> Handler:
        for path in paths:
            router.get(path, responses=responses, response_class=Response, response_model=None)(handler)
        return handler

    return register


@_probe("/livez", responses=replies(None, 503))
async def live(request: Request) -> Response:
    """200 while the server works, also while it replaces a dead engine; 503 once five engines failed to start."""
    context: ServingContext = request.app.state.context
    if context.client.has_given_up:
        raise engine_unavailable()
    return Response()


@_probe("/health", responses=replies(None, 503))
async def health(request: Request) -> Response:
    """200 while the engine lives: the supervisor detaches one that is dead or silent. Costs no generation."""
    context: ServingContext = request.app.state.context
    if not context.client.is_ready:
        raise engine_unavailable()
    return Response()


@_probe("/ready", "/readyz", responses=replies(None, 503))
async def ready(request: Request) -> Response:
    """200 while new work is welcome: weights loaded, warmed up, not shutting down."""
    context: ServingContext = request.app.state.context
    context.check_open()
    if not context.client.is_ready:
        raise engine_unavailable()
    return Response()


@_probe("/version", responses=replies(Version))
async def version() -> Response:
    """The server's version."""
    return JSONResponse(Version(version=neaptide.__version__))


@router.get("/load", responses=replies(Load), response_model=None)
async def load(request: Request) -> Load:
    """Online requests at work."""
    context: ServingContext = request.app.state.context
    return {"server_load": context.admission.count(RequestClass.ONLINE)}


@_probe(
    "/metrics", responses=replies(None, raw=dict.fromkeys(("text/plain", "application/openmetrics-text"), "Series."))
)
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    server_metrics: ServerMetrics = request.app.state.metrics
    content, media_type = await server_metrics.scrapes.exposition(", ".join(request.headers.getlist("accept")))
    # The media type carries its charset; Starlette would add a second one.
    return Response(content, headers={"content-type": media_type})
