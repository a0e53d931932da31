"""``POST /admin/what-if``: who may ask, what is refused, and an answer from a real child process."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from neaptide.estimator.device_profile import profile_names
from neaptide.server.app import ServerState, create_app
from neaptide.server.counterfactual.ring import NoAnswerError
from neaptide.server.counterfactual.service import Shadow
from neaptide.server.http.auth import KeyRing
from neaptide.server.subprocesses.on_call import ChildDiedError
from neaptide.server.text.tokenizer import Tokenizer
from neaptide.simulation.simulator import simulate
from tests.server.asgi import Exchange, settle
from tests.server.conftest import Server, make_context
from tests.server.counterfactual.at_once import simulate_at_once
from tests.simulation.recorded.engines import Recorded, load, rows, scene

PATH = "/admin/what-if"
OPERATOR = {"Authorization": "Bearer op"}


def asking(tokenizer: Tokenizer) -> tuple[Shadow, httpx2.AsyncClient]:
    context = make_context(tokenizer)
    shadow = Shadow(context.client, CollectorRegistry(), context.clock)
    app = create_app(ServerState(context=context, keys=KeyRing(("op:admin", "user")), shadow=shadow))
    return shadow, httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test")


def with_pieces(shadow: Shadow, monkeypatch: pytest.MonkeyPatch, found: list[bytes] | Exception) -> None:
    async def pieces(since_s: float) -> list[bytes]:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(shadow.ring, "pieces", pieces)


async def test_a_question_is_answered_and_a_bad_one_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_at_once(monkeypatch)
    watch = Recorded()
    simulate(scene("neaptide", 6.0, online=load(6.0, rate=2.0), offline=[rows(20)]), observers=[watch])
    shadow, http = asking(tokenizer)
    with_pieces(shadow, monkeypatch, watch.pieces())
    try:
        reply = await http.post(PATH, json={"traffic": 2, "ttft_ms": 5000, "tpot_ms": 5000}, headers=OPERATOR)
        refused = await http.post(PATH, json={"profile": "abacus"}, headers=OPERATOR)
    finally:
        await shadow.stop()
    assert reply.status_code == 200
    assert reply.json()["attainment"] == {"ttft": 1.0, "tpot": 1.0, "both": 1.0}
    assert reply.json()["replicas"] == 1
    assert reply.json()["offline_tokens_per_second"] > 0
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "what_if_refused")
    message = refused.json()["error"]["message"]
    named, end = message.removeprefix("There is no device profile 'abacus'; there are: ").rsplit(", ", 1)
    assert (set(named.split(", ")) < set(profile_names()), end) == (True, "...")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"traffic": 0}, "traffic"),
        ({"traffic": "much"}, "traffic"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"tpot_ms": 0}, "tpot_ms"),
        ({"minutes": 61}, "minutes"),
        ({"attainment": 1.5}, "attainment"),
        ({"profile": ""}, "profile"),
    ],
)
async def test_bad_values_are_named(tokenizer: Tokenizer, body: dict[str, Any], param: str) -> None:
    _, http = asking(tokenizer)
    reply = await http.post(PATH, json=body, headers=OPERATOR)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_only_operators_may_ask(tokenizer: Tokenizer) -> None:
    _, http = asking(tokenizer)
    assert (await http.post(PATH, json={})).status_code == 401
    reply = await http.post(PATH, json={}, headers={"Authorization": "Bearer user"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_required")


async def test_a_server_that_records_nothing_says_so(server: Server) -> None:
    reply = await server.http.post(PATH, json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "shadow_off")


async def test_one_question_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow, http = asking(tokenizer)
    asked = asyncio.Event()

    async def pieces(since_s: float) -> list[bytes]:
        asked.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(shadow.ring, "pieces", pieces)
    first = asyncio.ensure_future(http.post(PATH, json={}, headers=OPERATOR))
    await asked.wait()
    second = await http.post(PATH, json={}, headers=OPERATOR)
    assert (second.status_code, second.json()["error"]["code"]) == (409, "what_if_busy")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    with_pieces(shadow, monkeypatch, NoAnswerError())
    assert (await http.post(PATH, json={}, headers=OPERATOR)).status_code == 503


async def test_who_leaves_takes_the_question_along(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow, http = asking(tokenizer)
    asked = asyncio.Event()

    async def pieces(since_s: float) -> list[bytes]:
        asked.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(shadow.ring, "pieces", pieces)
    first = Exchange(http._transport.app, PATH, {}, OPERATOR)  # type: ignore[attr-defined]
    await asked.wait()
    first.hang_up()
    await settle()
    assert first.task.done()
    with_pieces(shadow, monkeypatch, NoAnswerError())
    assert (await http.post(PATH, json={}, headers=OPERATOR)).status_code == 503


def killed() -> None:
    raise ChildDiedError(-27)


def silent() -> None:
    raise TimeoutError


@pytest.mark.parametrize("ends", [killed, silent])
async def test_a_child_that_takes_too_much_is_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ends: Callable[[], None]
) -> None:
    shadow, http = asking(tokenizer)
    with_pieces(shadow, monkeypatch, [])

    async def receive(timeout_s: float) -> bytes:
        ends()
        return b""

    monkeypatch.setattr(shadow.desk._child, "receive", receive)
    reply = await http.post(PATH, json={}, headers=OPERATOR)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "what_if_too_large")
    assert shadow.desk.pid is None
