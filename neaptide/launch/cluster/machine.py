"""Composition root of ``neaptide cluster``: several replicas on this machine, behind one address."""

import asyncio
import logging
import os
import socket
from pathlib import Path

import msgspec

from neaptide.launch.cluster.gateway import Gateway, build_gateway, check_shared
from neaptide.launch.cluster.process import ReplicaProcess, devices_of, replica_settings
from neaptide.launch.connections import Server, uvicorn_config
from neaptide.launch.serve import LaunchError, listen
from neaptide.launch.stopping import Drain, cut
from neaptide.server.gateway.replicas import Replicas
from neaptide.server.observe.logs import configure_logging
from neaptide.server.settings import Settings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_S = 60.0
"""A replica that lived so long starts the back-off anew."""


class Fleet:
    """Keeps replicas running, from ``run`` to a stop. Implements ``Suspendable``."""

    def __init__(self, settings: Settings, count: int, replicas: Replicas) -> None:
        self._settings = settings
        self._count = count
        self._replicas = replicas
        self._running: dict[int, ReplicaProcess] = {}
        self._stopping = asyncio.Event()

    def suspend(self) -> None:
        """As in ``Suspendable``: all replicas drain, none is started any more."""
        self._stopping.set()
        for replica in self._running.values():
            replica.stop_soon()

    async def run(self) -> None:
        """Returns after ``suspend``, when all of them have ended.

        Raises:
            LaunchError: one of them refused to start.
        """
        lives = [asyncio.ensure_future(self._keep(number)) for number in range(self._count)]
        try:
            await asyncio.gather(*lives)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """One replica, life after life."""
        name = f"replica-{number + 1}"
        settings = replica_settings(self._settings, name, LOOPBACK)
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        has_served = False
        while not self._stopping.is_set():
            started_s = loop.time()
            served, status = await self._one_life(number, name, settings)
            has_served |= served
            if self._stopping.is_set():
                return
            if not has_served:
                raise LaunchError(f"{name} ended with status {status} before it was ready")
            if loop.time() - started_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            logger.warning("%s ended with status %d; it is started again in %.1f s", name, status, backoff_s)
            await self._rest(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _one_life(self, number: int, name: str, settings: Settings) -> tuple[bool, int]:
        """Whether it ever took work, and its exit status."""
        replica = self._running[number] = await ReplicaProcess.start(settings, devices_of(number, self._count))
        self._replicas.join(name, replica.url)
        try:
            if self._stopping.is_set():
                replica.stop_soon()
            status = await replica.process.wait()
            return self._replicas.has_served(name), status
        finally:
            del self._running[number]
            self._replicas.leave(name)
            await replica.stop()

    async def _rest(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


def serve_cluster(settings: Settings, count: int) -> int:
    """Serves until a stop signal; returns the exit status.

    Raises:
        LaunchError: there is no database for all, or a replica or the address cannot be had.
    """
    configure_logging(settings.log_level, settings.log_format)
    check_shared(settings)
    if settings.blobs is None:
        data_dir = Path(settings.data_dir).expanduser().absolute()
        settings = msgspec.structs.replace(settings, blobs=(data_dir / "blobs").as_uri())
    # Its own tokenizer is not to take the cores that engines need.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = listen(settings.host, settings.port)
    try:
        return asyncio.run(_serve(settings, count, listener))
    finally:
        listener.close()


async def _serve(settings: Settings, count: int, listener: socket.socket) -> int:
    gateway = build_gateway(settings)
    fleet = Fleet(settings, count, gateway.replicas)
    server = Server(uvicorn_config(settings, gateway.app, gateway.metrics))
    Drain(server, gateway.context, fleet, settings.drain_timeout_s).install()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    running = asyncio.create_task(fleet.run())
    telling = asyncio.create_task(_tell(settings, count, gateway, listener.getsockname()[1]))
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
        telling.cancel()
        running.cancel()
        await asyncio.gather(telling, running, return_exceptions=True)
        await gateway.close()
    return 0


async def _tell(settings: Settings, count: int, gateway: Gateway, port: int) -> None:
    await gateway.replicas.until_ready(count)
    address = f"http://{settings.host}:{port}"
    logger.info("serving %s on %s with %d replicas", gateway.context.model_id, address, count)
