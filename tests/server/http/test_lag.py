"""Requests that have waited too long for this process while many others wait are refused."""

import json
from contextlib import ExitStack

import pytest

from neaptide.engine.params import Tier
from neaptide.server.http import lag, transport
from neaptide.server.http.errors import OverloadedError
from neaptide.server.http.lag import LEAST_WAITING, Lag
from tests.server.conftest import USER, Server
from tests.server.live import request_bytes, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server."""
    monkeypatch.setattr(lag, "LEAST_WAITING", LEAST_WAITING)


def refusal(crowd: int, tier: Tier, waited_s: float, ttft_slo_s: float = 1.0) -> tuple[int, str] | None:
    """Status and ``Retry-After`` for a request in a crowd of so many; None if it is served."""
    found = Lag()
    with ExitStack() as others:
        for _ in range(crowd):
            others.enter_context(found.waiting())
        try:
            found.check(tier, waited_s, ttft_slo_s)
        except OverloadedError as error:
            return error.status, error.headers["Retry-After"]
    return None


@pytest.mark.parametrize(
    ("tier", "allowed_s", "status"), [(Tier.PRIORITY, 0.75, 503), (Tier.DEFAULT, 0.5, 503), (Tier.FLEX, 0.25, 429)]
)
def test_higher_tiers_are_refused_last(tier: Tier, allowed_s: float, status: int) -> None:
    assert refusal(LEAST_WAITING, tier, allowed_s) is None
    assert refusal(LEAST_WAITING, tier, allowed_s + 0.01) == (status, "1")


def test_short_targets_wait_less_and_long_ones_no_more() -> None:
    assert refusal(LEAST_WAITING, Tier.DEFAULT, 0.11, ttft_slo_s=0.2) is not None
    assert refusal(LEAST_WAITING, Tier.DEFAULT, 0.09, ttft_slo_s=0.2) is None
    assert refusal(LEAST_WAITING, Tier.DEFAULT, 0.51, ttft_slo_s=20.0) is not None


def test_a_late_request_without_a_crowd_is_served() -> None:
    assert refusal(LEAST_WAITING - 1, Tier.DEFAULT, 100.0) is None


def test_who_has_left_waits_no_more() -> None:
    found = Lag()
    for _ in range(LEAST_WAITING):
        with found.waiting():
            pass
    found.check(Tier.DEFAULT, 100.0, 1.0)


async def test_the_reply_says_when_to_come_again_and_the_engine_hears_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "LEAST_WAITING", 1)
    monkeypatch.setattr(transport, "waited_s", lambda _: 100.0)
    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT, json.dumps({"messages": USER}).encode()))
        status, headers, body = await client.reply()
    assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "overloaded")
    assert server.engine.requests == []
    metrics = (await server.http.get("/metrics")).text
    assert 'neaptide_admission_rejected_total{reason="overloaded",tier="default"} 1.0' in metrics


async def test_work_that_waited_for_a_thread_is_refused_before_it_is_done(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "LEAST_WAITING", 1)
    now_s = iter([0.0, 0.0, *[100.0] * 50])
    monkeypatch.setattr(server.context, "clock", lambda: next(now_s))
    reply = await server.http.post(CHAT, json={"messages": USER})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
    assert server.engine.requests == []
