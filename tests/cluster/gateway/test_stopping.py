"""Replicas that are about to end: what they refuse another one gets, and clients hear nothing of it."""

import json

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from neaptide.server.http.errors import server_stops
from tests.cluster.gateway.conftest import CHAT, TO_STREAM, Cluster, ScriptedReplica, say

UPLOAD = "/v1/files"


async def refuse(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    """As a server that drains."""
    replica.received.append((scope["method"], scope["path"], await Request(scope, receive).body()))
    await refuse_in_words(send, with_header=True)


async def cut(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    """As a server whose drain is over, of a request that it had begun."""
    await Request(scope, receive).body()
    await refuse_in_words(send, with_header=False)


async def refuse_in_words(send: Send, with_header: bool) -> None:
    error = server_stops()
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()] if with_header else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await say(send, json.dumps(error.body()), is_last=True)


async def test_what_a_draining_replica_refuses_another_one_gets(cluster: Cluster) -> None:
    draining = await cluster.add("a", slack_ms=9000.0)
    await cluster.add("b", slack_ms=500.0)
    draining.handler = refuse
    for path, body in ((CHAT, TO_STREAM), ("/v1/batches", {"endpoint": CHAT})):
        assert await cluster.asked(path, body) == (200, {"from": "b"})
    # It was asked once: by its own word it takes nothing more.
    assert [path for _, path, _ in draining.received] == [CHAT]
    assert list(cluster.states()) == ["b"]


async def test_without_another_one_there_is_a_clear_503(cluster: Cluster) -> None:
    draining = await cluster.add("a")
    draining.handler = refuse
    for path, body in ((CHAT, TO_STREAM), ("/v1/batches", {"endpoint": CHAT})):
        status, document = await cluster.asked(path, body)
        assert (status, document["error"]["code"]) == (503, "no_replica")
    assert len(draining.received) == 1


async def test_a_request_that_was_begun_is_not_given_to_another_one(cluster: Cluster) -> None:
    cutting = await cluster.add("a", slack_ms=9000.0)
    other = await cluster.add("b", slack_ms=500.0)
    cutting.handler = cut
    status, document = await cluster.asked(CHAT, TO_STREAM)
    assert (status, document["error"]["code"]) == (503, "server_shutdown")
    assert other.received == []


async def test_an_upload_cannot_be_made_again_so_its_client_hears_of_it(cluster: Cluster) -> None:
    draining = await cluster.add("a")
    draining.handler = refuse
    status, document = await cluster.asked(UPLOAD, {"some": "file"})
    assert (status, document["error"]["code"]) == (503, "server_shutdown")
    assert [body for _, _, body in draining.received] == [b'{"some": "file"}']


async def test_one_that_says_so_late_does_not_take_its_successor_along(cluster: Cluster) -> None:
    before = await cluster.add("a")
    (known,) = cluster.gateway.replicas.all
    cluster.gateway.replicas.join("a", before.url)
    cluster.gateway.replicas.stops(known)
    assert list(cluster.states()) == ["a"]
