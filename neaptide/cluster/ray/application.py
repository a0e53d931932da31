"""Composition root on Ray: an application of Ray Serve, ``neaptide.cluster.ray.application:build`` (``deploy/ray``).

  gateway    the ingress: the gateway's ASGI app, as on one machine
  replica    an actor that starts the process pair of ``neaptide serve`` on its node, and reports its address

Ray places and restarts both, and its proxies accept connections. The gateway chooses the replica of a request. Ray's
own request router could not: it decides before the body has arrived, and our routing reads the prompt.
"""

import asyncio
import fcntl
import logging
from contextlib import suppress
from typing import IO, Any

import httpx
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util import get_node_ip_address
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.cluster.gateway.key_auth import KeyAuth
from neaptide.cluster.gateway.replicas import Replicas
from neaptide.cluster.launch.gateway import build_gateway, check_shared
from neaptide.cluster.launch.process import LAST_S, ReplicaProcess, replica_settings
from neaptide.cluster.ray.scaling import said
from neaptide.launch.serve import LaunchError, key_ring
from neaptide.server.settings_sources import data_path, load_settings

logger = logging.getLogger(__name__)

MAX_ONGOING_REQUESTS = 10_000
"""Limit of one gateway. Replicas limit their own load, with errors that clients know."""
HEALTH_S, HEALTH_TIMEOUT_S = 2.0, 20.0
STOP_MARGIN_S = 15.0
"""Time that Ray allows an actor beyond its server's own time to stop."""
FIRST_REPLICA_S = 20.0
"""Longest time that a new gateway waits for a ready replica before it takes requests."""
FOLLOW_S, FOLLOW_TIMEOUT_S = 1.0, 5.0
"""Interval and timeout of looking up the replicas."""
LAST_WORK_S = 3.0
"""How long a stopping replica still takes requests. In an update, Serve stops it as soon as another one has started.
Gateways find that one at their next look-up."""


class RayReplica:
    """The deployment of one process pair."""

    _process: ReplicaProcess | None = None
    _lock: IO[bytes] | None = None

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = load_settings(arguments)
        check_shared(settings)
        name, self._lock = take_place(settings.data_dir)
        # With its node, because names must be unique in the cluster.
        host = get_node_ip_address()
        self._name = f"{host}-{name}"
        # The server keeps the lock while it lives, which is a little longer than this actor if that is killed.
        own = replica_settings(settings, name, host)
        self._process = await ReplicaProcess.start(own, kept_fds=[self._lock.fileno()])
        self._questions = httpx.AsyncClient(
            base_url=self._process.url, auth=KeyAuth(key_ring(settings)), trust_env=False
        )
        await self._process.until_ready()

    @property
    def _server(self) -> ReplicaProcess:
        assert self._process is not None
        return self._process

    def where(self) -> tuple[str, str]:
        """Its name and its URL."""
        return self._name, self._server.url

    async def check_health(self) -> None:
        """Raises only if the server has ended: it restarts its own engine."""
        status = self._server.process.returncode
        if status is not None:
            raise RuntimeError(f"the server {self._name} ended with status {status}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The values that Ray asks for if it decides the number of replicas."""
        return await said(self._questions)

    async def __del__(self) -> None:
        # Ray calls this even if the server could not start.
        if self._process is not None:
            await asyncio.sleep(LAST_WORK_S)
            await self._process.stop()
            await self._questions.aclose()
        if self._lock is not None:
            self._lock.close()


class RayGateway:
    """The deployment that clients reach through Ray's proxies."""

    async def __init__(self, replicas: Any, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        """``replicas`` is the handle of their deployment."""
        self._gateway = build_gateway(load_settings(arguments))
        self._gateway.app.add_middleware(RequestIdByRay)
        self._following = asyncio.create_task(follow(replicas, self._gateway.replicas))
        # The old gateway serves until this one is ready. Without replicas it would refuse all requests.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPLICA_S):
                await self._gateway.replicas.until_ready(1)

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._gateway.app

    async def __del__(self) -> None:
        self._following.cancel()
        await self._gateway.close()


class RequestIdByRay:
    """Removes the request id from replies. Serve's proxy adds it, and also gives one to requests without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_on)


async def follow(handle: Any, replicas: Replicas) -> None:
    """Keeps a gateway's replicas those of the deployment. A replica that does not answer delays news of the others; the
    gateway itself notices its silence."""
    while True:
        try:
            answers = await handle.broadcast("where").results_async(timeout_s=FOLLOW_TIMEOUT_S, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError) as error:
            logger.warning("cannot look up the replicas: %s", error)
        else:
            # A replica that Serve stops stays until it is no longer ready.
            replicas.update(dict(answer for answer in answers if not isinstance(answer, BaseException)))
        await asyncio.sleep(FOLLOW_S)


def take_place(data_dir: str) -> tuple[str, IO[bytes]]:
    """The first of ``replica-1``, ``replica-2`` and so on that is free on this node, with the lock that reserves it.
    The next replica in this place finds the measurements and copies of the one before.

    Raises:
        SettingsError, LaunchError: the directory cannot be used.
    """
    directory = data_path(data_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = 1
        while True:
            lock = (directory / f"replica-{number}.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                number += 1
            else:
                return f"replica-{number}", lock
    except OSError as error:
        raise LaunchError(f"data_dir = {data_dir!r} cannot be used: {error}") from error


def build(arguments: dict[str, Any]) -> Any:
    """The application. ``arguments`` are settings of ``neaptide serve`` by name; the nodes' environment variables
    supply the rest.

    Raises:
        SettingsError: the settings are invalid.
    """
    stop_s = LAST_WORK_S + load_settings(arguments).drain_timeout_s + LAST_S + STOP_MARGIN_S
    replica = serve.deployment(
        name="replica",
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=stop_s,
        ray_actor_options={"num_cpus": 1},
    )(RayReplica)
    gateway = serve.deployment(
        name="gateway",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        # An update starts the next gateway first. A device has room for one replica only, so that one stops first.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=stop_s,
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress()(RayGateway))
    return gateway.bind(replica.bind(arguments), arguments)
