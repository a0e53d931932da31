"""Middlewares of an app that serves clients."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from neaptide.server.http.audit import AuditMiddleware
from neaptide.server.http.auth import AuthMiddleware, KeyRing
from neaptide.server.http.head_requests import HeadMiddleware
from neaptide.server.http.hosts import HostFilter
from neaptide.server.http.middleware import EdgeMiddleware
from neaptide.server.limits.limiter import HEADERS
from neaptide.server.observe.metrics_http import HttpMetrics


def add_layers(
    app: Starlette,
    keys: KeyRing,
    metrics: HttpMetrics,
    clock: Callable[[], float],
    hosts: HostFilter | None,
    cors_origins: Sequence[str],
) -> None:
    """Adds them around the app's routes.

    Args:
        hosts: accepted ``Host`` headers; None accepts all.
        cors_origins: sites whose pages may call this server from a browser; ``*`` is any.
    """
    app.add_middleware(HeadMiddleware)
    # The last one added is the outermost. So replies of the key check also get a request id, and a browser's CORS
    # preflight, which has no key, is answered before the check.
    app.add_middleware(AuthMiddleware, keys=keys)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "openai-processing-ms", *HEADERS),
        )
    app.add_middleware(AuditMiddleware, clock=clock)
    app.add_middleware(EdgeMiddleware, metrics=metrics, clock=clock, hosts=hosts, cors_origins=cors_origins)
