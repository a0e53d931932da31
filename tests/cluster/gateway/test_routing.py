"""Which replica gets what: online work by slack and cached prefixes, everything else any, the switch all of them."""

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from neaptide.cluster.gateway.replicas import Replica, ReplicaStatus
from neaptide.cluster.launch.gateway import block_hashes
from neaptide.cluster.routing import Prompt
from neaptide.engine.kv.cache_digest import digest_of
from neaptide.server.http.auth import KeyRing
from neaptide.server.settings import Settings
from tests.cluster.gateway.conftest import CHAT, STORE, TO_STREAM, Cluster, ScriptedReplica, begin, say
from tests.patience import until
from tests.server.asgi import Exchange

COMPLETIONS = "/v1/completions"
PROMPT = [7 + k % 300 for k in range(640)]
"""Token ids: 40 blocks."""
KEY = "key-of-one"


def told(cached: bytes = b"", tokens: list[int] = PROMPT, salt: bytes = b"") -> bytes:
    """What a replica that has computed these tokens says of its cache."""
    return cached + b"".join(digest_of(block_hashes(tokens, 16, salt)))


def to_complete(tokens: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": 1, **fields}


async def who(cluster: Cluster, path: str, body: object = None, method: str = "POST", **headers: str) -> str:
    """The replica that answered."""
    status, document = await cluster.asked(path, body, method, **headers)
    assert status == 200, document
    return str(document["from"])


async def test_a_chat_goes_to_the_replica_with_the_most_slack(cluster: Cluster) -> None:
    first = await cluster.add("a", slack_ms=900.0)
    await cluster.add("b", slack_ms=2000.0)
    assert await who(cluster, CHAT, TO_STREAM) == "b"
    first.slack_ms = 8000.0
    await until(lambda: cluster.gateway.replicas.all[0].figures.free_slack_ms > 7000.0)  # type: ignore[union-attr]
    assert await who(cluster, CHAT, TO_STREAM) == "a"


async def test_among_replicas_with_slack_the_one_that_has_the_prefix_gets_it(cluster: Cluster) -> None:
    await cluster.add("a", slack_ms=1040.0)
    await cluster.add("b", slack_ms=1000.0, cached=told())
    await until(lambda: cluster.gateway.replicas.block_size == 16)
    assert await who(cluster, COMPLETIONS, to_complete()) == "b"
    assert await who(cluster, COMPLETIONS, to_complete([k + 1 for k in PROMPT])) == "a"


@pytest.mark.parametrize("cluster", [Settings(store=STORE, executor="sim", api_key=(KEY,))], indirect=True)
async def test_a_prefix_counts_for_the_key_that_may_find_it(cluster: Cluster) -> None:
    (principal,) = KeyRing((KEY,)).principals
    await cluster.add("a", slack_ms=1040.0, cached=told())
    await cluster.add("b", slack_ms=1000.0, cached=told(salt=principal.salt))
    assert await who(cluster, COMPLETIONS, to_complete(), authorization=f"Bearer {KEY}") == "b"
    assert await who(cluster, COMPLETIONS, to_complete(cache_salt="x"), authorization=f"Bearer {KEY}") == "a"


@pytest.mark.parametrize(
    "cluster", [Settings(store=STORE, executor="sim", api_key=(f"{KEY}:batch:x2", "another"))], indirect=True
)
async def test_replicas_are_asked_with_a_key(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    assert replica.question_key == f"Bearer {KEY}"


def test_a_prompt_on_its_way_is_not_forgotten_by_the_next_report() -> None:
    """640 tokens of a millisecond each, sent at 10 s; the report is 20 ms old."""
    figures = {"age_ms": 20.0, "free_slack_ms": 1000.0, "ttft_slo_ms": 1000.0, "prompt_token_ms": 1.0, "cached": None}
    for now_s, slack_ms in ((10.01, 360.0), (10.06, 360.0), (10.08, 1000.0)):
        replica = Replica("a", "http://a")
        replica.sent(10.0, Prompt(640))
        assert replica.take_figures(figures, now_s).free_slack_ms == slack_ms


async def test_what_will_be_refused_is_refused_by_a_replica(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    for raw in ({"messages": "none"}, {"messages": [], "stream": 7}, []):
        assert await who(cluster, CHAT, raw) == "a"
    assert [json.loads(body) for _, _, body in replica.received] == [
        {"messages": "none"},
        {"messages": [], "stream": 7},
        [],
    ]


async def test_files_and_batches_go_to_any_replica_also_to_one_without_an_engine(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    replica.status = 503
    await cluster.until("a", ReplicaStatus.CLOSED)
    assert await who(cluster, "/v1/batches", method="GET") == "a"
    status, document = await cluster.asked(CHAT, TO_STREAM)
    assert (status, document["error"]["code"]) == (503, "no_replica")
    assert (await cluster.asked("/ready", method="GET"))[0] == 503
    assert (await cluster.asked("/health", method="GET"))[0] == 200


async def test_a_replica_that_takes_no_connection_costs_nobody_an_answer(cluster: Cluster) -> None:
    gone = await cluster.add("a", slack_ms=9000.0)
    await cluster.add("b", slack_ms=500.0)
    assert gone.live is not None
    gone.is_silent = True  # so that it is not noticed by a question
    gone.live.runner.servers[0].close()
    gone.cut_connections()
    found = await asyncio.gather(*(who(cluster, CHAT, TO_STREAM) for _ in range(5)))
    assert found == ["b"] * 5
    assert await who(cluster, "/v1/models", method="GET") == "b"
    assert cluster.states() == {"a": ReplicaStatus.LOST, "b": ReplicaStatus.READY}


async def test_without_replicas_there_is_a_clear_503(cluster: Cluster) -> None:
    assert (await cluster.asked("/livez", method="GET"))[0] == 200
    assert (await cluster.asked("/health", method="GET"))[0] == 503
    for path, method in ((CHAT, "POST"), ("/v1/batches", "GET"), ("/v1/files", "POST"), ("/admin/offline", "POST")):
        status, document = await cluster.asked(path, TO_STREAM, method)
        assert (status, document["error"]["code"]) == (503, "no_replica"), path


async def test_a_replica_that_leaves_may_finish_and_gets_nothing_new(cluster: Cluster) -> None:
    async def wait(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
        replica.received.append(("", "", b""))
        await replica.go_on.wait()
        await begin(send)
        await say(send, '{"from": "a"}', is_last=True)

    replica = await cluster.add("a")
    replica.handler = wait
    exchange = cluster.request(CHAT, TO_STREAM)
    await until(lambda: replica.received)
    cluster.gateway.replicas.leave("a")
    assert (await cluster.asked(CHAT, TO_STREAM))[0] == 503
    replica.go_on.set()
    await exchange.task
    assert (exchange.status, exchange.text) == (200, '{"from": "a"}')


async def test_the_switch_is_every_replicas(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await cluster.add(name)
    assert (await cluster.asked("/admin/offline", {"state": "paused"}))[0] == 200
    found = [replica.received for replica in cluster.replicas.values()]
    assert found == [[("POST", "/admin/offline", b'{"state": "paused"}')]] * 2


async def not_here(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    await begin(send, 404)
    await say(send, json.dumps({"not at": replica.name}), is_last=True)


async def breaks_off(replica: ScriptedReplica, scope: Scope, receive: Receive, send: Send) -> None:
    await begin(send, 200)
    replica.cut_connections()


async def test_why_a_chat_was_late_is_told_by_the_replica_that_had_it(cluster: Cluster) -> None:
    path = "/admin/why/chatcmpl-1%2F2"
    replicas = {name: await cluster.add(name) for name in ("a", "b", "c")}
    replicas["a"].handler, replicas["c"].handler = not_here, breaks_off
    assert await who(cluster, path, method="GET") == "b"
    assert [sent[:2] for sent in replicas["b"].received] == [("GET", path)]
    replicas["b"].handler = not_here
    assert (await cluster.asked(path, method="GET"))[0] == 404
    replicas["a"].handler = replicas["b"].handler = breaks_off
    assert (await cluster.asked(path, method="GET"))[0] == 503


async def test_without_keys_only_callers_of_this_machine_are_operators(cluster: Cluster) -> None:
    """A replica sees the gateway, which is on this machine, as its caller."""
    replica = await cluster.add("a")
    app = cluster.gateway.app

    async def from_afar(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": ("192.0.2.7", 1)}, receive, send)

    for path in ("/admin/offline", "/admin/what-if", "/admin/why/x"):
        exchange = Exchange(from_afar, path, {"state": "paused"}, method="GET" if "why" in path else "POST")
        await exchange.task
        assert (exchange.status, json.loads(exchange.text)["error"]["code"]) == (403, "local_callers_only")
    assert replica.received == []


async def test_a_gateway_says_how_its_replicas_are(cluster: Cluster) -> None:
    await cluster.add("a", slack_ms=750.0)
    assert await cluster.asked("/cluster", method="GET") == (
        200,
        {
            "replicas": [
                {
                    "name": "a",
                    "url": cluster.replicas["a"].url,
                    "state": "ready",
                    "requests": 0,
                    "free_slack_ms": 750.0,
                }
            ]
        },
    )
    await who(cluster, "/v1/models", method="GET")
    exchange = cluster.request("/metrics", method="GET")
    await exchange.task
    for line in (
        'neaptide_cluster_replicas{state="ready"} 1.0',
        'neaptide_cluster_replicas{state="lost"} 0.0',
        'neaptide_cluster_requests_total{replica="a"} 1.0',
        'neaptide_cluster_free_slack_seconds{replica="a"} 0.75',
    ):
        assert line in exchange.text.splitlines()


@pytest.mark.parametrize("cluster", [Settings(store=STORE, executor="sim", api_key=(KEY,))], indirect=True)
async def test_with_keys_only_they_are_told_how_replicas_are(cluster: Cluster) -> None:
    assert (await cluster.asked("/cluster", method="GET"))[0] == 401
    status, document = await cluster.asked("/cluster", method="GET", authorization=f"Bearer {KEY}")
    assert (status, document) == (200, {"replicas": []})


async def test_neither_questions_nor_what_is_passed_on_stand_in_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await cluster.add("a")
        await who(cluster, "/v1/batches", method="GET")
    assert [record.name for record in caplog.records] == ["neaptide.cluster.gateway.replicas"]


@pytest.mark.parametrize("words", ["hello", "[]", "{}", '{"block_size": 16, "age_ms": "soon"}'])
async def test_a_replica_whose_figures_cannot_be_read_gets_nothing_until_they_can(cluster: Cluster, words: str) -> None:
    replica = await cluster.add("a")
    replica.words = words
    await cluster.until("a", ReplicaStatus.CLOSED)
    assert (await cluster.asked("/ready", method="GET"))[0] == 503
    replica.words = None
    await cluster.until("a", ReplicaStatus.READY)


async def test_a_backlog_that_cannot_be_read_is_not_known(cluster: Cluster) -> None:
    replica = await cluster.add("a")
    replica.backlog = [("soon", 1.0)]  # type: ignore[list-item]
    assert await cluster.gateway.replicas.backlog() is None
