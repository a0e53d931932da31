"""The HTTP server's connections and their limits."""

import contextlib
import logging
import resource
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from neaptide.launch.stopping import LAST_REPLIES_S, ends_quietly
from neaptide.server.http.middleware import MAX_HEADER_BYTES
from neaptide.server.http.own_waits import OwnWaits
from neaptide.server.http.transport import TransportLimits, protocol_class
from neaptide.server.observe.metrics_http import HttpMetrics
from neaptide.server.settings import Settings

logger = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 256
"""Descriptors reserved for other uses: database, files, the engine's socket, closing connections."""


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Disables uvicorn's signal handling, because ``Drain`` installs our handlers.

        The original raises the signal again after serving, which would end the process before results are durable.
        """
        yield


def uvicorn_config(
    settings: Settings, app: ASGIApp, metrics: HttpMetrics, own_waits: OwnWaits | None = None
) -> uvicorn.Config:
    limits = TransportLimits(
        max_connections=room_for(settings.max_connections),
        header_s=settings.header_timeout_s,
        body_idle_s=settings.body_timeout_s,
        write_idle_s=settings.send_timeout_s,
    )
    return uvicorn.Config(
        ends_quietly(app),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=protocol_class(limits, metrics, own_waits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,  # strangers need not know what serves them
        lifespan="off",  # this package starts and stops what the app needs
        timeout_keep_alive=75,
        timeout_graceful_shutdown=LAST_REPLIES_S,  # ``Drain`` has already waited for the rest
    )


def room_for(max_connections: int) -> int:
    """Raises this process's descriptor limit as far as needed. Returns the number of connections that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_DESCRIPTORS
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        logger.warning("the limit of open files allows %d connections", soft - OTHER_DESCRIPTORS)
    return min(max_connections, soft - OTHER_DESCRIPTORS)
