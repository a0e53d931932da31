"""The gateway's ASGI application: it answers some requests for several servers, and forwards the rest.

chats, completions, responses    the replica that the router chooses
files, batches, everything else  any replica, because all of them read the same database
/admin/offline                   every replica
/admin/why                       the replica that had the chat: all are asked
probes, /metrics, /cluster       answered here
/dashboard/data                  merged from the reports of all replicas
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from neaptide.cluster.gateway.metrics import GatewayMetrics, ReplicaLives
from neaptide.cluster.gateway.passing import (
    Content,
    NotSentError,
    RefusedError,
    ReplicaLostError,
    pass_on,
    replica_lost,
)
from neaptide.cluster.gateway.prompts import PromptReader
from neaptide.cluster.gateway.replicas import Chosen, Replica, Replicas, ReplicaStatus, no_replica
from neaptide.cluster.gateway.series import ReplicaSeries
from neaptide.cluster.routing import Prompt
from neaptide.server.context import ServingContext
from neaptide.server.http.auth import KeyRing
from neaptide.server.http.error_replies import install_handlers
from neaptide.server.http.errors import AuthenticationError, UnavailableError, local_callers_only
from neaptide.server.http.forwarding import body_as_it_comes
from neaptide.server.http.hosts import HostFilter, is_loopback
from neaptide.server.http.jsonbody import read_body
from neaptide.server.http.middleware import EdgeMiddleware
from neaptide.server.observe.exposition import Scrapes
from neaptide.server.observe.metrics_http import HttpMetrics
from neaptide.server.observe.overview import (
    OncePerSecond,
    Report,
    encoder,
    figures_of,
    merged_report,
    report_decoder,
    view,
)
from neaptide.server.observe.status import Severity, Status, status
from neaptide.server.openai.endpoints import ENDPOINTS

UPLOADS = "/v1/files"
SWITCH = "/admin/offline"
WHY = "/admin/why/{id}"
PASSED_ON = (
    *ENDPOINTS,
    *(f"/v1/{things}{which}" for things in ("files", "batches", "models") for which in ("", "/{which:path}")),
)
"""Routes that metrics name; all others share one name."""
REPORT_S = 2.0
"""Timeout of a replica's report for the dashboard."""
NO_ANSWER = Status(Severity.BAD, "It does not answer.")
OPERATOR_S = 10.0
"""Timeout of a replica's reply to an operator's request that all of them get."""


@dataclass(slots=True, kw_only=True)
class GatewayState:
    """What the composition root hands to the app."""

    context: ServingContext
    """The context of the model that all replicas serve. Its engine client is unused."""
    keys: KeyRing
    hosts: HostFilter | None
    cors_origins: Sequence[str] = ()
    """Origins that may call from a page; replicas answer the preflight requests."""
    replicas: Replicas
    reader: PromptReader
    http: httpx.AsyncClient
    """Client of forwarded requests: it limits neither connections nor time, except the time to connect."""
    registry: CollectorRegistry


def create_gateway(state: GatewayState, metrics: HttpMetrics) -> Starlette:
    """The app for one address. ``metrics`` counts its exchanges; no replica counts what the gateway answers itself."""
    gateway = Gateway(state)
    app = Starlette(
        routes=[
            Route("/health", gateway.health),
            Route("/livez", gateway.live),
            Route("/ready", gateway.ready),
            Route("/readyz", gateway.ready),
            Route("/metrics", gateway.metrics),
            Route("/dashboard/data", gateway.overview),
            Route("/cluster", gateway.cluster),
            Route(SWITCH, gateway.switch, methods=["POST"]),
            Route(WHY, gateway.why, methods=["GET"]),
            *(Route(path, PassedOn(gateway)) for path in PASSED_ON),
            Mount("/", app=gateway.pass_on),
        ]
    )
    app.router.redirect_slashes = False
    install_handlers(app)
    app.add_middleware(
        EdgeMiddleware,
        metrics=metrics,
        clock=state.context.clock,
        hosts=state.hosts,
        cors_origins=state.cors_origins,
    )
    return app


class PassedOn:
    """A route's endpoint as an ASGI app, for every method."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.pass_on(scope, receive, send)


class Gateway:
    def __init__(self, state: GatewayState) -> None:
        self._s = state
        self._metrics = GatewayMetrics(state.registry)
        ReplicaLives(state.registry, state.replicas.num_lives)
        self._series = ReplicaSeries(state.registry, state.http)
        self._scrapes = Scrapes(state.registry, self._refresh)
        self._shown = OncePerSecond(self._overview)

    # ---- answered here ----

    async def health(self, request: Request) -> Response:
        """200 while a replica answers."""
        if all(replica.state is ReplicaStatus.LOST for replica in self._s.replicas.all):
            raise no_replica()
        return Response()

    async def live(self, request: Request) -> Response:
        """200 while the gateway works, even if all replicas are restarting."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """200 while a replica takes new work."""
        self._s.context.check_open()
        if not self._s.replicas.num_ready:
            raise no_replica()
        return Response()

    async def metrics(self, request: Request) -> Response:
        """The gateway's own series and the replicas'."""
        content, media_type = await self._scrapes.exposition(", ".join(request.headers.getlist("accept")))
        return Response(content, headers={"content-type": media_type})

    async def _refresh(self) -> None:
        self._metrics.refresh(self._s.replicas.all)
        await self._series.refresh(self._s.replicas.all)

    async def overview(self, request: Request) -> Response:
        """What the dashboard shows of all replicas."""
        return Response(await self._shown.get(), media_type="application/json")

    async def _overview(self) -> bytes:
        asked = [replica for replica in self._s.replicas.all if replica.state is not ReplicaStatus.LOST]
        found = zip(asked, await asyncio.gather(*map(self._report, asked)), strict=True)
        reports = {replica.name: report for replica, report in found if report is not None}
        shown = view(merged_report(reports, self._s.context.wall_clock()), reports)
        shown["replicas"] = [_overview(replica, reports.get(replica.name)) for replica in self._s.replicas.all]
        return encoder.encode(shown)

    async def _report(self, replica: Replica) -> Report | None:
        try:
            async with asyncio.timeout(REPORT_S):
                reply = await self._s.http.get(f"{replica.url}/dashboard/data", params={"raw": "true"})
            return report_decoder.decode(reply.raise_for_status().content)
        except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError):
            return None

    async def cluster(self, request: Request) -> Response:
        """State of each replica."""
        self._s.keys.identify(request.headers.get("authorization"), request.headers.get("api-key"))
        return JSONResponse({"replicas": [_shown(replica) for replica in self._s.replicas.all]})

    async def switch(self, request: Request) -> Response:
        """Sends the operator's switch to every replica that answers. Returns the first refusal, or else one of the
        replies."""
        replies, num_silent = await self._ask_all(request)
        if num_silent:
            raise no_replica()
        return _passed_on(max(replies, key=lambda one: one.status_code))

    async def why(self, request: Request) -> Response:
        """Why a chat was late. Only the replica that had it knows, so all are asked."""
        replies, _ = await self._ask_all(request)
        if not replies:
            raise no_replica()
        return _passed_on(min(replies, key=lambda one: (one.status_code != HTTPStatus.OK, -one.status_code)))

    async def _ask_all(self, request: Request) -> tuple[list[httpx.Response], int]:
        """Sends an operator's request to every replica that answers; returns the replies and how many are missing.

        Raises:
            PermissionDeniedError: no keys are set, and the caller is on another machine.
            UnavailableError: no replica answers.
        """
        self._check_operator(request.scope)
        content = await self._body(request)
        alive = [replica for replica in self._s.replicas.all if replica.state is not ReplicaStatus.LOST]
        if not alive:
            raise no_replica()
        names = ("authorization", "api-key", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        path = request.scope["raw_path"].replace(b"#", b"%23")
        asked = (
            self._s.http.request(
                request.method,
                httpx.URL(replica.url).copy_with(raw_path=path),
                content=content,
                headers=headers,
                timeout=OPERATOR_S,
            )
            for replica in alive
        )
        found = await asyncio.gather(*asked, return_exceptions=True)
        replies = [reply for reply in found if isinstance(reply, httpx.Response)]
        return replies, len(found) - len(replies)

    # ---- forwarded ----

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards any other request, as an ASGI app."""
        self._check_operator(scope)
        request = Request(scope, receive)
        if scope["method"] == "POST" and scope["path"] == UPLOADS and self._is_known(request):
            # Streamed, because it may have gigabytes. Once begun, it cannot be sent to another replica.
            await self._to_any(scope, None, send, lambda: body_as_it_comes(receive))
            return
        content = await self._body(request)
        if scope["method"] == "POST" and scope["path"] in ENDPOINTS:
            self._s.context.check_open()
            block_size = self._s.replicas.block_size
            prompt = await self._s.reader.read(scope["path"], content, request.headers, block_size)
            await self._to_best(prompt, scope, receive, send, content)
        else:
            await self._to_any(scope, receive, send, lambda: content)

    async def _to_best(self, prompt: Prompt, scope: Scope, receive: Receive, send: Send, content: bytes) -> None:
        while True:
            chosen = self._s.replicas.choose(prompt)
            if await self._to(chosen, scope, receive, send, content):
                return

    async def _to_any(self, scope: Scope, receive: Receive | None, send: Send, content: Callable[[], Content]) -> None:
        may_repeat = scope["method"] in ("GET", "HEAD")
        failed: Replica | None = None
        while True:
            chosen = self._s.replicas.any(besides=failed)
            try:
                if await self._to(chosen, scope, receive, send, content()):
                    return
            except UnavailableError:
                # Another replica can answer a read; once, so that a request that kills its server kills two at most.
                if not may_repeat:
                    raise
                may_repeat, failed = False, chosen.replica

    async def _to(self, chosen: Chosen, scope: Scope, receive: Receive | None, send: Send, content: Content) -> bool:
        """Forwards a request to a replica. False: it did not take the request, so another one may get it."""
        replica = chosen.replica
        self._metrics.passed_on(replica)
        try:
            await pass_on(self._s.http, replica, scope, receive, send, content)
        except NotSentError:
            self._s.replicas.refused(replica)
            return False
        except RefusedError:
            self._s.replicas.stops(replica)
            return False
        except ReplicaLostError as error:
            self._metrics.lost(replica)
            if not error.is_told:
                raise replica_lost() from None
        finally:
            self._s.replicas.ended(chosen)
        return True

    async def _body(self, request: Request) -> bytes:
        """The body as it was sent, but empty for a request without a known key: a replica refuses that request
        itself."""
        return await read_body(request) if self._is_known(request) else b""

    def _is_known(self, request: Request) -> bool:
        """Whether its key is one of ours, or none is needed."""
        try:
            self._s.keys.identify(request.headers.get("authorization"), request.headers.get("api-key"))
        except AuthenticationError:
            return False
        return True

    def _check_operator(self, scope: Scope) -> None:
        """Refuses operator requests from other machines if no keys are set. A replica cannot check this, since all its
        requests come from the gateway."""
        client = scope.get("client")
        is_local = client is not None and is_loopback(client[0])
        if scope["path"].startswith("/admin") and not self._s.keys.required and not is_local:
            raise local_callers_only()


def _passed_on(reply: httpx.Response) -> Response:
    return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))


def _overview(replica: Replica, report: Report | None) -> dict[str, Any]:
    judged = NO_ANSWER if report is None else status(figures_of(report))
    return {
        "name": replica.name,
        "ready": replica.state is ReplicaStatus.READY,
        "in_flight": replica.num_in_flight,
        "free_slack_s": None if replica.figures is None else replica.figures.free_slack_ms / 1e3,
        "sentence": judged.sentence,
        "severity": judged.severity.value,
    }


def _shown(replica: Replica) -> dict[str, Any]:
    figures = replica.figures
    return {
        "name": replica.name,
        "url": replica.url,
        "state": replica.state.value,
        "requests": replica.num_in_flight,
        "free_slack_ms": None if figures is None else round(figures.free_slack_ms, 3),
    }
