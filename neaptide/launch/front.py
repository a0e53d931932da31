"""Composition root of a front process: it answers generation requests, and forwards all others to the owner.

The owner starts it with ``python -m neaptide.launch.front LINK_FD FORWARD_PATH SETTINGS_JSON``.
"""

import asyncio
import logging
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

from neaptide.launch.collector import pass_over_start_up
from neaptide.launch.connections import Server, uvicorn_config
from neaptide.launch.serve import listen_too, model_context
from neaptide.launch.stopping import Drain, cut
from neaptide.server.context import ServingContext
from neaptide.server.fronts.front import (
    FrontAdmission,
    FrontCounts,
    FrontKeyMetrics,
    FrontMetrics,
    OwnerPeer,
    Tallies,
)
from neaptide.server.http.auth import KeyRing
from neaptide.server.http.error_replies import install_handlers
from neaptide.server.http.forwarding import Forwarder
from neaptide.server.http.hosts import HostFilter
from neaptide.server.http.layers import add_layers
from neaptide.server.limits.limiter import RateLimiter
from neaptide.server.observe.logs import configure_logging
from neaptide.server.openai.endpoints import ENDPOINTS
from neaptide.server.routes import chat, completions, responses
from neaptide.server.settings import Settings
from neaptide.server.settings_sources import data_path
from neaptide.server.text.native_memory import keep_little

logger = logging.getLogger("neaptide.launch.front")  # this module is the main one


def main(link: socket.socket, forward_path: Path, settings: Settings) -> int:
    """Serves until the owner says otherwise. Returns the exit status."""
    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # It logs each forwarded request.
    keep_little()
    logging.disable(logging.WARNING)  # The owner has logged what the model's files say.
    context, _ = model_context(settings, data_path(settings.data_dir))
    logging.disable(logging.NOTSET)
    asyncio.run(_serve(link, forward_path, settings, context))
    return 0


class StopSignals:
    """Stop signals that the owner passes on."""

    def __init__(self) -> None:
        self.drain: Drain | None = None
        """Set when there may be something to drain."""

    def on_signal(self) -> None:
        if self.drain is None:
            sys.exit()
        self.drain.on_signal()


async def _serve(link: socket.socket, forward_path: Path, settings: Settings, context: ServingContext) -> None:
    keys = KeyRing()
    stop = StopSignals()
    owner = OwnerPeer(context.client, keys, stop.on_signal)
    await asyncio.get_running_loop().create_connection(lambda: owner.link, sock=link)
    await owner.has_keys.wait()
    tallies = Tallies(owner, lambda: len(server.server_state.connections))
    metrics = FrontMetrics(owner, tallies)
    context.admission = FrontAdmission(owner, settings.max_online_requests, settings.max_offline_requests)
    context.waits.on_refused = partial(metrics.on_refused_unread, context.model_id)
    app = _app(context, keys, metrics, RateLimiter(FrontCounts(owner, tallies), FrontKeyMetrics(owner)), settings)
    forwarder = Forwarder(app, ENDPOINTS, forward_path)
    server = Server(uvicorn_config(settings, forwarder, metrics.http, context.waits))
    stop.drain = Drain(server, context, None, settings.drain_timeout_s, settings.drain_min_s)
    pass_over_start_up()
    tallies.start()
    logger.info("a further API process serves %s", context.model_id)
    await server.serve(sockets=[listen_too(settings.host, settings.port)])
    await cut(server.server_state.tasks)
    await tallies.stop()
    await forwarder.close()
    context.grammars.close()
    context.tokenizer.close()
    owner.link.close()
    await owner.link.closed


def _app(
    context: ServingContext, keys: KeyRing, metrics: FrontMetrics, limiter: RateLimiter, settings: Settings
) -> FastAPI:
    app = FastAPI(redirect_slashes=False, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = context
    app.state.metrics = metrics
    app.state.limiter = limiter
    install_handlers(app, RequestValidationError)
    hosts = HostFilter.of_settings(settings.allowed_hosts, bound_to=settings.host, keys_required=keys.required)
    add_layers(app, keys, metrics.http, context.clock, hosts, settings.cors_origins)
    for module in (chat, completions, responses):
        app.include_router(module.router)
    return app


if __name__ == "__main__":
    _, link_fd, path, settings_json = sys.argv
    sys.exit(
        main(
            socket.socket(fileno=int(link_fd)),
            Path(path),
            msgspec.json.decode(settings_json, type=Settings),
        )
    )
