"""Composition root on Ray: an application of Ray Serve, ``neaptide.cluster.ray.application:build`` (``deploy/ray``).

    gateway    the ingress: the ASGI app that also stands before the replicas of one machine
    replica    an actor that has started the process pair of ``neaptide serve`` on its node, and says where it listens

Ray places and restarts both, and its proxies take the connections. Which replica gets a request is decided in the
gateway: a request router of Ray's own decides before the body is there, and our routing reads the prompt.
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

from neaptide.cluster.gateway.replicas import Replicas
from neaptide.cluster.launch.gateway import build_gateway, check_shared, question_headers
from neaptide.cluster.launch.process import LAST_S, ReplicaProcess, replica_settings
from neaptide.cluster.ray.scaling import said
from neaptide.launch.serve import LaunchError
from neaptide.server.settings_sources import data_path, load_settings

logger = logging.getLogger(__name__)

MAX_ONGOING_REQUESTS = 10_000
"""In one gateway. Replicas bound what they take themselves, by words that clients know."""
HEALTH_S, HEALTH_TIMEOUT_S = 2.0, 20.0
STOP_MARGIN_S = 15.0
"""What Ray lets an actor have beyond what its server has to stop in good order."""
FIRST_REPLICA_S = 20.0
"""A new gateway waits so long at most to have heard of a replica that takes work, before requests are given to it."""
FOLLOW_S, FOLLOW_TIMEOUT_S = 1.0, 5.0
"""Between two looks at which replicas there are."""
LAST_WORK_S = 3.0
"""A replica that is to stop takes requests for so long: in an update Serve stops it as soon as another has started, and
gateways hear of that one with their next look, and then how it is."""


class Replica:
    """A deployment: one process pair."""

    _process: ReplicaProcess | None = None
    _lock: IO[bytes] | None = None

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = load_settings(arguments)
        check_shared(settings)
        name, self._lock = take_place(settings.data_dir)
        # By its node, too: names are the cluster's.
        host = get_node_ip_address()
        self._name = f"{host}-{name}"
        # The server has the place for as long as it lives: where this actor is killed, that is a little longer.
        own = replica_settings(settings, name, host)
        self._process = await ReplicaProcess.start(own, kept_fds=[self._lock.fileno()])
        self._questions = httpx.AsyncClient(
            base_url=self._process.url, headers=question_headers(settings), trust_env=False
        )
        await self._process.until_ready()

    @property
    def _server(self) -> ReplicaProcess:
        assert self._process is not None
        return self._process

    def where(self) -> tuple[str, str]:
        """Its name, and where it listens."""
        return self._name, self._server.url

    async def check_health(self) -> None:
        """The server restarts its own engine, so only its own end is a reason to begin anew."""
        status = self._server.process.returncode
        if status is not None:
            raise RuntimeError(f"the server {self._name} ended with status {status}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray asks for it where the number of replicas is its to decide."""
        return await said(self._questions)

    async def __del__(self) -> None:
        # Ray asks for it also where the server could not be started.
        if self._process is not None:
            await asyncio.sleep(LAST_WORK_S)
            await self._process.stop()
            await self._questions.aclose()
        if self._lock is not None:
            self._lock.close()


class Gateway:
    """A deployment: what clients reach through Ray's proxies."""

    async def __init__(self, replicas: Any, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        """``replicas`` is the handle of their deployment."""
        self._gateway = build_gateway(load_settings(arguments))
        self._gateway.app.add_middleware(RequestIdByRay)
        self._following = asyncio.create_task(follow(replicas, self._gateway.replicas))
        # Another one has the requests until this one is ready; one that knows nobody would refuse them.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPLICA_S):
                await self._gateway.replicas.until_ready(1)

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._gateway.app

    async def __del__(self) -> None:
        self._following.cancel()
        await self._gateway.close()


class RequestIdByRay:
    """Takes the request's id off replies: Serve's proxy, which has given it to requests without one, puts it on."""

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
    """Keeps a gateway's replicas those that the deployment has. One that does not answer keeps the others unknown for
    a while, and the gateway notices by itself that it is silent."""
    while True:
        try:
            answers = await handle.broadcast("where").results_async(timeout_s=FOLLOW_TIMEOUT_S, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError) as error:
            logger.warning("which replicas there are is not known: %s", error)
        else:
            update(replicas, dict(answer for answer in answers if not isinstance(answer, BaseException)))
        await asyncio.sleep(FOLLOW_S)


def update(replicas: Replicas, found: dict[str, str]) -> None:
    """Those found, by name with where they listen, and those that Serve stops until they take no work any more."""
    known = {replica.name: replica.url for replica in replicas.all}
    for name in known.keys() - found.keys():
        if not replicas.is_ready(name):
            replicas.leave(name)
    for name, url in found.items():
        if known.get(name) != url:
            replicas.join(name, url)


def take_place(data_dir: str) -> tuple[str, IO[bytes]]:
    """The first of ``replica-1``, ``replica-2`` ... that no other on this node has, and the lock that keeps it: what a
    replica has measured and copied is there for the next one.

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
    """The application. ``arguments`` are settings of ``neaptide serve`` by name; what they do not say, the variables of
    the environment of the nodes may.

    Raises:
        SettingsError: they make no sense.
    """
    stop_s = LAST_WORK_S + load_settings(arguments).drain_timeout_s + LAST_S + STOP_MARGIN_S
    replica = serve.deployment(
        name="replica",
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=stop_s,
        ray_actor_options={"num_cpus": 1},
    )(Replica)
    gateway = serve.deployment(
        name="gateway",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        # An update starts the next one first. A replica's device has room for one: it stops before the next one starts.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=stop_s,
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress()(Gateway))
    return gateway.bind(replica.bind(arguments), arguments)
