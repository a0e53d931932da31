"""Composition root of ``neaptide cluster``: several replicas on this machine, behind one address."""

import asyncio
import logging
import os
import signal
import socket

import msgspec

from neaptide.cluster.autoscaling import Scale
from neaptide.cluster.launch.fleet import Fleet
from neaptide.cluster.launch.gateway import RunningGateway, build_gateway, check_shared
from neaptide.cluster.launch.scaling import Scaling
from neaptide.launch.collector import pass_over_start_up
from neaptide.launch.connections import Server, uvicorn_config
from neaptide.launch.early_checks import check_parts
from neaptide.launch.serve import listen, url_of
from neaptide.launch.stopping import Drain, cut
from neaptide.server.observe.logs import configure_logging
from neaptide.server.settings import Settings
from neaptide.server.settings_sources import data_path

logger = logging.getLogger(__name__)

ROLL_SIGNAL = signal.SIGUSR2
"""Replaces the replicas one by one, as in other servers. SIGHUP is not used, because closing a terminal sends it."""


def serve_cluster(settings: Settings, scale: Scale) -> int:
    """Serves until a stop signal; returns the exit status. The fleet starts with ``min_replicas``.

    Raises:
        SettingsError, LaunchError: there is no data directory, no database for all, or a replica or the address cannot
            be had.
        MissingPartError: a package that the settings need is not installed.
    """
    check_parts(settings)
    configure_logging(settings.log_level, settings.log_format)
    check_shared(settings)
    if settings.blobs is None:
        data_dir = data_path(settings.data_dir)
        settings = msgspec.structs.replace(settings, blobs=(data_dir / "blobs").as_uri())
    # The gateway's tokenizer must not take the cores that engines need.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = listen(settings.host, settings.port)
    try:
        return asyncio.run(_serve(settings, scale, listener))
    finally:
        listener.close()


async def _serve(settings: Settings, scale: Scale, listener: socket.socket) -> int:
    gateway = build_gateway(settings)
    fleet = Fleet(settings, scale.min_replicas, scale.max_replicas, gateway.replicas)
    server = Server(uvicorn_config(settings, gateway.app, gateway.metrics))
    Drain(server, gateway.context, fleet, settings.drain_timeout_s, settings.drain_min_s).install(gateway.reloader)
    asyncio.get_running_loop().add_signal_handler(ROLL_SIGNAL, fleet.roll_soon)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    running = asyncio.create_task(fleet.run())
    beside = [asyncio.create_task(_tell(settings, scale.min_replicas, gateway, listener.getsockname()[1]))]
    if scale.min_replicas < scale.max_replicas:
        beside.append(asyncio.create_task(Scaling(scale, fleet, gateway.replicas).run()))
    pass_over_start_up()
    try:
        await asyncio.wait({serving, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and running.exception() is not None:
            server.should_exit = True
        await serving
        await cut(server.server_state.tasks)
        fleet.suspend()
        await asyncio.wait({running}, timeout=settings.drain_timeout_s)
        if running.done():
            running.result()
    finally:
        for task in (*beside, running):
            task.cancel()
        await asyncio.gather(*beside, running, return_exceptions=True)
        await gateway.close()
    return 0


async def _tell(settings: Settings, count: int, gateway: RunningGateway, port: int) -> None:
    await gateway.replicas.until_ready(count)
    address = url_of(settings.host, port)
    logger.info("serving %s on %s with %d replicas", gateway.context.model_id, address, count)
