"""What is passed on arrives as it was sent, when it was sent; and what a client hears of a replica that is lost."""

import asyncio
import json
import re
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from neaptide.cluster.gateway.replicas import ReplicaStatus
from neaptide.server.http.sse import KEEP_ALIVE
from neaptide.server.settings import Settings
from tests.cluster.gateway.conftest import CHAT, STORE, TO_STREAM, Cluster, ScriptedReplica, begin, say
from tests.patience import until
from tests.server.asgi import Exchange
from tests.server.engine_client.loop_clock import LoopClock

EVENTS = [f'data: {{"n": {n}}}\n\n' for n in range(4)]
LOST = {
    "error": {
        "message": "The replica that worked on this request is lost; try again.",
        "type": "server_error",
        "param": None,
        "code": "replica_lost",
    }
}


def pieces(exchange: Exchange) -> list[str]:
    """Of a reply's body, as they came."""
    bodies = [m.get("body", b"") for m in exchange.sent if m["type"] == "http.response.body"]
    return [body.decode() for body in bodies if body]


async def stream(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    """Each event when the test says so."""
    await begin(send, media_type="text/event-stream; charset=utf-8")
    for event in EVENTS:
        await replica.go_on.wait()
        replica.go_on.clear()
        await say(send, event, is_last=event is EVENTS[-1])


async def hang(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    replica.go_on.set()
    await asyncio.Event().wait()


async def test_an_event_is_there_before_the_next_one_is_made(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    replica.handler = stream
    exchange = cluster.request(CHAT, TO_STREAM)
    for event in EVENTS:
        replica.go_on.set()
        await exchange.until(event)
    await exchange.task
    assert pieces(exchange) == EVENTS
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_a_comment_is_passed_on_at_once(cluster: Cluster) -> None:
    async def wait(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, media_type="text/event-stream")
        await say(send, EVENTS[0] + KEEP_ALIVE.decode())
        await replica.go_on.wait()
        await say(send, EVENTS[1], is_last=True)

    replica = await cluster.add("a")
    replica.handler = wait
    exchange = cluster.request(CHAT, TO_STREAM)
    await exchange.until(KEEP_ALIVE.decode())
    replica.go_on.set()
    await exchange.task
    assert exchange.events == [{"n": 0}, {"n": 1}]


async def test_a_request_arrives_as_it_was_sent_but_for_its_connection(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    exchange = cluster.request(
        "/v1/batches",
        {"a": [1, "ü"]},
        x_request_id="mine",
        connection="close",
        te="x",
        idempotency_key="k",
        host="localhost",
    )
    await exchange.task
    assert (exchange.status, exchange.headers["x-request-id"]) == (200, "mine")
    ((method, target, body),) = replica.received
    assert (method, target, body) == ("POST", "/v1/batches", b'{"a": [1, "\\u00fc"]}')
    kept = {name: replica.headers.get(name) for name in ("x-request-id", "idempotency-key", "content-type", "te")}
    assert kept == {
        "x-request-id": "mine",
        "idempotency-key": "k",
        "content-type": "application/json",
        "te": None,
    }
    assert replica.headers["host"] == replica.url.removeprefix("http://")


PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("cluster", "origin", "status", "passed_on"),
    [
        (Settings(store=STORE, executor="sim"), "http://localhost", 200, None),
        (Settings(store=STORE, executor="sim"), PAGE, 403, None),
        (Settings(store=STORE, executor="sim", cors_origins=(PAGE,)), PAGE, 200, PAGE),
    ],
    indirect=["cluster"],
)
async def test_a_page_of_the_gateways_own_site_may_write_and_a_foreign_one_where_it_is_named(
    cluster: Cluster, origin: str, status: int, passed_on: str | None
) -> None:
    """The replica would take the gateway's own page for a foreign one, for it is called by another name itself."""
    replica = await cluster.add("a")
    assert (await cluster.asked("/v1/batches", {}, host="localhost", origin=origin))[0] == status
    assert len(replica.received) == (status == 200)
    assert replica.headers.get("origin") == passed_on


async def test_a_target_is_passed_on_byte_for_byte(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    target = "/v1/batches?limit=3&after=x%20y%2Fz"
    transport = httpx2.ASGITransport(app=cluster.gateway.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get(target)).json() == {"from": "a"}
    assert replica.received == [("GET", target, b"")]


async def test_an_upload_is_passed_on_while_it_is_sent(cluster: Cluster) -> None:
    """The replica has read the first piece before the client sends the second."""
    read: list[bytes] = []
    has_read = asyncio.Event()

    async def take(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        async for piece in Request(scope, receive).stream():
            read.append(piece)
            has_read.set()
        await begin(send)
        await say(send, "{}", is_last=True)

    async def pieces_of_a_file() -> AsyncIterator[bytes]:
        yield b"first"
        await has_read.wait()
        assert read == [b"first"]
        yield b"second"

    replica = await cluster.add("a")
    replica.handler = take
    transport = httpx2.ASGITransport(app=cluster.gateway.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.post("/v1/files", content=pieces_of_a_file())
    assert (reply.status_code, b"".join(read)) == (200, b"firstsecond")


async def test_a_client_that_leaves_is_gone_for_the_replica_too(cluster: Cluster) -> None:
    left = asyncio.Event()

    async def listen(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        replica.go_on.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    replica = await cluster.add("a")
    replica.handler = listen
    exchange = cluster.request(CHAT, TO_STREAM)
    await replica.go_on.wait()
    exchange.hang_up()
    await left.wait()
    await asyncio.gather(exchange.task, return_exceptions=True)
    assert [shown.num_in_flight for shown in cluster.gateway.replicas.all] == [0]


async def test_a_replica_that_dies_before_it_answers_is_a_503_and_the_log_says_how(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await cluster.add("a")
    replica.handler = hang
    exchange = cluster.request(CHAT, TO_STREAM)
    await replica.go_on.wait()
    replica.cut_connections()
    await exchange.task
    assert (exchange.status, exchange.headers["retry-after"]) == (503, "2")
    assert json.loads(exchange.text) == LOST
    (said,) = [record.getMessage() for record in caplog.records if "a request" in record.getMessage()]
    assert re.match(r"a lost a request before its answer: (RemoteProtocolError|ReadError): ", said)


async def test_what_is_only_read_is_read_from_another_one_once(cluster: Cluster) -> None:
    """A batch, say. Where that one dies of it as well, the client is told."""
    first = await cluster.add("a")
    second = await cluster.add("b")
    first.handler = second.handler = hang
    exchange = cluster.request("/v1/batches/batch_1", method="GET")
    await until(lambda: first.go_on.is_set() or second.go_on.is_set())
    dead, other = (first, second) if first.go_on.is_set() else (second, first)
    dead.cut_connections()
    await other.go_on.wait()
    other.cut_connections()
    await exchange.task
    assert (exchange.status, json.loads(exchange.text)) == (503, LOST)


async def test_a_stream_whose_replica_dies_says_so_after_its_last_whole_event(cluster: Cluster) -> None:
    async def half(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, media_type="text/event-stream")
        await say(send, EVENTS[0] + 'data: {"n"')
        await asyncio.Event().wait()

    replica = await cluster.add("a")
    replica.handler = half
    exchange = cluster.request(CHAT, TO_STREAM)
    await exchange.until(EVENTS[0])
    replica.cut_connections()
    await exchange.task
    assert exchange.events == [{"n": 0}, LOST, "[DONE]"]


async def test_a_reply_that_is_cut_is_not_ended(cluster: Cluster) -> None:
    """Whoever serves the app closes the connection then: what is missing is seen to be."""

    async def half(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        await say(send, '{"a":')
        await asyncio.Event().wait()

    replica = await cluster.add("a")
    replica.handler = half
    exchange = cluster.request("/v1/files/file-1/content", method="GET")
    await exchange.until('{"a":')
    replica.cut_connections()
    await exchange.task
    assert exchange.sent[-1]["more_body"]


async def test_what_a_silent_replica_had_fails_within_ten_seconds_and_what_others_have_goes_on(
    cluster: Cluster, loop_clock: LoopClock
) -> None:
    frozen = await cluster.add("a")
    frozen.handler = hang
    lost = cluster.request(CHAT, TO_STREAM)
    await frozen.go_on.wait()
    other = await cluster.add("b", slack_ms=5000.0)
    other.handler = stream
    kept = cluster.request(CHAT, TO_STREAM)
    other.go_on.set()
    await kept.until(EVENTS[0])
    frozen.is_silent = True
    loop, seconds = asyncio.get_running_loop(), 0
    began_s = loop.time()
    while not lost.task.done():
        await loop_clock.pass_s(1.0)
        seconds += 1
        # The other one has been heard again, and asked once more.
        asked = other.num_questions
        await until(lambda asked=asked: other.num_questions >= asked + 2)
    assert loop.time() - began_s >= 5.0
    assert seconds < 10
    assert (lost.status, json.loads(lost.text)) == (503, LOST)
    for event in EVENTS[1:]:
        other.go_on.set()
        await kept.until(event)
    await kept.task
    assert (kept.status, pieces(kept)) == (200, EVENTS)
    assert cluster.states() == {"a": ReplicaStatus.LOST, "b": ReplicaStatus.READY}


async def test_a_replica_that_wakes_is_one_of_them_again(cluster: Cluster, loop_clock: LoopClock) -> None:
    replica = await cluster.add("a")
    replica.is_silent = True
    while cluster.states()["a"] is not ReplicaStatus.LOST:
        await loop_clock.pass_s(1.0)
    assert (await cluster.asked("/v1/batches", method="GET"))[0] == 503
    replica.is_silent = False
    while cluster.states()["a"] is not ReplicaStatus.READY:
        await loop_clock.pass_s(1.0)
    assert await cluster.asked(CHAT, TO_STREAM) == (200, {"from": "a"})


async def test_a_target_that_is_no_url_is_passed_on_as_a_server_reads_it(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    assert (await cluster.asked("/v1/models/a#b", method="GET"))[0] == 200
    assert [target for _, target, _ in replica.received] == ["/v1/models/a%23b"]


async def test_headers_of_the_replicas_server_are_not_there_beside_the_gateways(cluster: Cluster) -> None:
    await cluster.add("a")
    exchange = cluster.request(CHAT, TO_STREAM)
    await exchange.task
    assert exchange.headers["x-neaptide-replica"] == "a"
    assert not {"date", "server"} & set(exchange.headers)


@pytest.mark.parametrize("cluster", [Settings(store=STORE, executor="sim", api_key=("key:admin",))], indirect=True)
@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/v1/batches", "/admin/offline"])
async def test_the_body_of_a_request_without_a_known_key_is_not_kept(cluster: Cluster, path: str) -> None:
    replica = await cluster.add("a")
    for key, passed_on in (("another", b""), ("key", b'{"a": 1}')):
        exchange = cluster.request(path, {"a": 1}, authorization=f"Bearer {key}", content_length="8")
        await exchange.task
        assert exchange.status == 200
        method, _, body = replica.received.pop()
        assert (method, body) == ("POST", passed_on)
        assert replica.headers["content-length"] == str(len(passed_on))
