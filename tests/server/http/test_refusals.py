"""Refused requests take a bounded share of the time, for each caller."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.server.context import Admission
from neaptide.server.http.refusals import GRACE_S, LEAST_COST_S, LONGEST_WAIT_S, SHARE, Refusals
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import until
from tests.server.conftest import USER, Server, make_server
from tests.server.engine_client.loop_clock import LoopClock

CHAT = "/v1/chat/completions"
BAD = {"messages": USER, "max_tokens": -1}


def test_who_sends_a_bad_request_now_and_then_does_not_wait() -> None:
    refusals = Refusals()
    assert [refusals.wait_s("a", 0.1, now_s) for now_s in (0.0, 1.0, 2.0)] == [0.0, 0.0, 0.0]


def test_what_is_beyond_the_grace_waits() -> None:
    refusals = Refusals()
    # Each takes 3 s of the schedule; 2 are let off.
    assert [refusals.wait_s("a", 0.3, 10.0) for _ in range(2)] == pytest.approx([1.0, 4.0])
    assert refusals.wait_s("a", 0.3, 14.0) == pytest.approx(3.0)


def test_one_callers_refusals_are_not_anothers() -> None:
    refusals = Refusals()
    assert refusals.wait_s("a", 0.3, 0.0) == pytest.approx(1.0)
    assert refusals.wait_s(None, 0.1, 0.0) == 0.0


def test_nobody_waits_longer_than_clients_do() -> None:
    refusals = Refusals()
    assert refusals.wait_s("a", 1e6, 0.0) == LONGEST_WAIT_S
    # and when the time has passed, nothing is owed any more
    assert refusals.wait_s("a", 0.1, GRACE_S + LONGEST_WAIT_S) == 0.0


@pytest.mark.acceptance("A25", "refused requests one after another, as fast as answers come: a tenth of a core")
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200))
def test_one_who_waits_for_each_answer_takes_no_more_than_the_share(costs_s: list[float]) -> None:
    refusals, now_s, spent_s = Refusals(), 0.0, 0.0
    for cost_s in costs_s:
        now_s += cost_s
        spent_s += max(cost_s, LEAST_COST_S)
        now_s += refusals.wait_s("a", cost_s, now_s)
        assert spent_s <= SHARE * (now_s + GRACE_S) + 1e-9


class NextRefusal(Refusals):
    """Whom it was asked for, and a long time for each."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str | None] = []

    def wait_s(self, caller: str | None, cost_s: float, now_s: float) -> float:
        assert 0.0 <= cost_s < now_s
        self.callers.append(caller)
        return 1_000.0


@pytest.fixture
def refusals(server: Server) -> NextRefusal:
    found = server.context.refusals = NextRefusal()
    return found


async def test_a_refusal_comes_when_its_time_has_come(
    server: Server, refusals: NextRefusal, loop_clock: LoopClock
) -> None:
    asked = asyncio.ensure_future(server.http.post(CHAT, json=BAD))
    await until(lambda: refusals.callers)
    await loop_clock.pass_s(900.0)
    assert not asked.done()
    # Meanwhile others are served, and the same caller's good requests.
    assert (await server.http.post(CHAT, json=BAD | {"max_tokens": 2})).status_code == 200
    await loop_clock.pass_s(200.0)
    assert (await asked).status_code == 400
    assert refusals.callers == [None]


async def test_a_server_that_has_no_place_or_stops_says_so_at_once(server: Server, refusals: NextRefusal) -> None:
    server.context.admission = Admission(max_online=0, max_offline=0)
    full = [await server.http.post(CHAT, json=BAD | {"service_tier": tier}) for tier in ("default", "flex")]
    server.context.draining = True
    full.append(await server.http.post(CHAT, json=BAD))
    assert [reply.status_code for reply in full] == [503, 429, 503]
    assert refusals.callers == []


async def test_a_key_pays_for_its_own(tokenizer: Tokenizer, loop_clock: LoopClock) -> None:
    server = make_server(tokenizer, keys=("one", "two"))
    refusals = server.context.refusals = NextRefusal()
    asked = [
        asyncio.ensure_future(server.http.post(CHAT, json=BAD, headers={"authorization": f"Bearer {key}"}))
        for key in ("one", "two")
    ]
    await until(lambda: len(refusals.callers) == 2)
    assert len(set(refusals.callers)) == 2
    await loop_clock.pass_s(1_100.0)
    assert [(await one).status_code for one in asked] == [400, 400]
