"""Composition root of ``neaptide gateway``: one address for servers that something else starts."""

import asyncio
import logging
import os
import socket

from neaptide.cluster.gateway.addresses import LookUp, follow
from neaptide.cluster.launch.gateway import RunningGateway, build_gateway
from neaptide.cluster.launch.scaling import WantedReplicas
from neaptide.extras import check_part
from neaptide.launch.collector import pass_over_start_up
from neaptide.launch.connections import Server, uvicorn_config
from neaptide.launch.serve import listen, url_of
from neaptide.launch.stopping import Drain, cut
from neaptide.server.observe.logs import configure_logging
from neaptide.server.settings import Settings

logger = logging.getLogger(__name__)


def serve_gateway(settings: Settings, find: LookUp) -> int:
    """Serves until a stop signal; returns the exit status.

    Args:
        find: where the servers are. They may come, go and fail while the gateway runs.

    Raises:
        SettingsError, LaunchError: the model or the address cannot be had.
        MissingPartError: a package that the settings need is not installed.
    """
    # No executor and no database.
    for package in ("zmq", "llguidance"):
        check_part(package)
    configure_logging(settings.log_level, settings.log_format)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = listen(settings.host, settings.port)
    try:
        return asyncio.run(_serve(settings, find, listener))
    finally:
        listener.close()


async def _serve(settings: Settings, find: LookUp, listener: socket.socket) -> int:
    gateway = build_gateway(settings, has_engines=False)
    server = Server(uvicorn_config(settings, gateway.app, gateway.metrics))
    Drain(server, gateway.context, None, settings.drain_timeout_s, settings.drain_min_s).install(gateway.reloader)
    beside = [
        asyncio.create_task(follow(find, gateway.replicas)),
        asyncio.create_task(WantedReplicas(gateway.replicas, gateway.registry).run()),
        asyncio.create_task(_tell(settings, gateway, listener.getsockname()[1])),
    ]
    pass_over_start_up()
    try:
        await server.serve(sockets=[listener])
        await cut(server.server_state.tasks)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await gateway.close()
    return 0


async def _tell(settings: Settings, gateway: RunningGateway, port: int) -> None:
    logger.info("listening on %s; waiting for a server that is ready", url_of(settings.host, port))
    await gateway.replicas.until_ready(1)
    logger.info("serving %s on %s", gateway.context.model_id, url_of(settings.host, port))
