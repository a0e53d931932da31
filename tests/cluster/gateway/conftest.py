"""A gateway as ``neaptide cluster`` has it, and replicas that do what a test says, over real sockets."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from neaptide.cluster.gateway.replicas import ReplicaStatus
from neaptide.cluster.launch.gateway import RunningGateway, build_gateway
from neaptide.server.observe.overview import Report, encoder
from neaptide.server.settings import Settings
from tests.patience import until
from tests.server.asgi import Exchange
from tests.server.live import Live, serving

CHAT = "/v1/chat/completions"
TO_STREAM = {"messages": [{"role": "user", "content": "What is 2+2?"}], "stream": True}
STORE = "postgresql://nobody@/none"
"""Only its name is looked at: a gateway has no database."""

Handler = Callable[["ScriptedReplica", Scope, Receive, Send], Awaitable[None]]


class ScriptedReplica:
    """An ASGI app. Says of itself what stands in its attributes, and answers anything else by its handler."""

    def __init__(self, name: str, slack_ms: float) -> None:
        self.name = name
        self.slack_ms = slack_ms
        self.cached = b""
        self.num_questions = 0
        self.question_key = ""
        """The key of the last one."""
        self.online_load = 0.0
        self.backlog: list[tuple[float, float]] | None = []
        """Seconds left and seconds of work of each batch; None: the database is away."""
        self.is_silent = False
        """Questions are not answered."""
        self.page: str | None = ""
        self.report: Report | None = None
        """What it says of itself for the dashboard; None: an error."""
        """Its series; None: it fails to say them."""
        self.status = 200
        """Of what it says of itself."""
        self.words: str | None = None
        """In place of its figures."""
        self.received: list[tuple[str, str, bytes]] = []
        """Method, target and body of every request but for questions."""
        self.headers: dict[str, str] = {}
        """Of the last one."""
        self.handler: Handler = answer
        self.go_on = asyncio.Event()
        self.state = SimpleNamespace()
        self.live: Live | None = None

    @property
    def url(self) -> str:
        assert self.live is not None
        return f"http://127.0.0.1:{self.live.port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/dashboard/data":
            await begin(send, 200 if self.report is not None else 500)
            await say(send, "" if self.report is None else encoder.encode(self.report).decode(), is_last=True)
            return
        if scope["path"] == "/metrics":
            status = 500 if self.page is None else 200
            await begin(send, status, media_type="text/plain; version=0.0.4; charset=utf-8")
            await say(send, self.page or "", is_last=True)
            return
        if scope["path"] == "/backlog":
            jobs = [{"left_seconds": left_s, "work_seconds": work_s} for left_s, work_s in self.backlog or []]
            await begin(send, 503 if self.backlog is None else 200)
            await say(send, json.dumps({"jobs": jobs}), is_last=True)
            return
        if scope["path"] != "/figures":
            await self.handler(self, scope, receive, send)
            return
        self.num_questions += 1
        self.question_key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.is_silent:
            await asyncio.Event().wait()
        figures = {
            "age_ms": 0.0,
            "free_slack_ms": self.slack_ms,
            "ttft_slo_ms": 1000.0,
            "prompt_token_ms": 1.0,
            "block_size": 16,
            "online_load": self.online_load,
            "cached": base64.b64encode(self.cached).decode() if b"cached" in scope["query_string"] else None,
        }
        await begin(send, self.status)
        await say(send, json.dumps(figures) if self.words is None else self.words, is_last=True)

    def cut_connections(self) -> None:
        """As if its process had been killed."""
        assert self.live is not None
        for connection in list(self.live.runner.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


async def begin(send: Send, status: int = 200, media_type: str = "application/json") -> None:
    headers = [(b"content-type", media_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def say(send: Send, text: str, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


async def answer(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    """Its own name."""
    request = Request(scope, receive)
    target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
    replica.received.append((scope["method"], target, await request.body()))
    replica.headers = dict(request.headers)
    await begin(send)
    await say(send, json.dumps({"from": replica.name}), is_last=True)


class Cluster:
    """A gateway, and replicas that have joined it."""

    def __init__(self, gateway: RunningGateway, stack: AsyncExitStack) -> None:
        self.gateway = gateway
        self._stack = stack
        self.replicas: dict[str, ScriptedReplica] = {}

    async def add(self, name: str, slack_ms: float = 1000.0, cached: bytes = b"") -> ScriptedReplica:
        """One that is ready."""
        replica = self.replicas[name] = ScriptedReplica(name, slack_ms)
        replica.cached = cached
        replica.live = await self._stack.enter_async_context(serving(replica, timeout_graceful_shutdown=0))  # type: ignore[arg-type]
        self.gateway.replicas.join(name, replica.url)
        await self.until(name, ReplicaStatus.READY)
        return replica

    async def until(self, name: str, state: ReplicaStatus) -> None:
        await until(lambda: self.states().get(name) is state)

    def states(self) -> dict[str, ReplicaStatus]:
        return {replica.name: replica.state for replica in self.gateway.replicas.all}

    def request(self, path: str, body: object = None, method: str = "POST", **headers: str) -> Exchange:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Exchange(self.gateway.app, path, body, named, method)

    async def asked(self, path: str, body: object = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status and document of a whole reply."""
        exchange = self.request(path, body, method, **headers)
        await exchange.task
        assert exchange.status is not None
        return exchange.status, json.loads(exchange.text) if exchange.text else None


@pytest.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Without replicas so far; its settings may be a parameter."""
    settings: Settings = getattr(request, "param", Settings(store=STORE, executor="sim"))
    async with AsyncExitStack() as stack:
        gateway = build_gateway(settings)
        stack.push_async_callback(gateway.close)
        yield Cluster(gateway, stack)
