"""Limits of keys over HTTP: exact counts, headers, refusals, and what a request is counted for. On a virtual clock."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import openai
import pytest

from neaptide.durations import DAY_S
from neaptide.server.app import ServerState, create_app
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import AcceptedKey, KeyRing, principal_for
from neaptide.server.limits.limiter import duration_text
from neaptide.server.limits.usage import KeyLimits
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import until
from tests.server.conftest import USER, Server, make_context
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
NOON_S = 20_000 * DAY_S + DAY_S / 2
PROMPT_TOKENS = 11
"""Number of prompt tokens of ``USER`` in the model's template."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def steady(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return NOON_S + self.now_s


class Limited(Server):
    """A server whose keys have limits, and its clock."""

    clock: Clock


Make = Callable[..., Limited]


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[Make]:
    made: list[Limited] = []

    def make_limited(**limits: KeyLimits) -> Limited:
        client, clock = EngineClient(), Clock()
        context = make_context(tokenizer, client)
        context.clock, context.wall_clock = clock.steady, clock.wall
        engine = FakeEngine(client)
        engine.attach()
        ring = KeyRing()
        ring.accept([AcceptedKey(key, principal_for(key, name=key, limits=limit)) for key, limit in limits.items()])
        app = create_app(ServerState(context=context, keys=ring))
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://test"
        )
        sdk = openai.AsyncOpenAI(base_url="http://test/v1", api_key="one", http_client=http, max_retries=0)
        server = Limited(app, context, engine, http, sdk)
        server.clock = clock
        made.append(server)
        return server

    yield make_limited
    for server in made:
        await server.openai.close()


async def chat(server: Server, key: str = "one", **fields: Any) -> httpx2.Response:
    body = {"messages": USER, "max_tokens": 2, **fields}
    return await server.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})


async def burst(server: Server, key: str, count: int) -> int:
    """How many of so many requests at once are admitted; the others are refused as they should be."""
    replies = await asyncio.gather(*(chat(server, key) for _ in range(count)))
    codes = Counter(reply.status_code for reply in replies)
    assert codes.keys() <= {200, 429}
    return codes[200]


async def test_ten_keys_get_exactly_their_requests_of_a_minute_in_bursts(make: Make) -> None:
    limits = {f"key{number}": number + 1 for number in range(10)}
    server = make(**{key: KeyLimits(requests_per_minute=limit) for key, limit in limits.items()})
    admitted = Counter[str]()
    for second in (0, 1, 30, 59):
        server.clock.now_s = 1_000.0 + second
        for key in limits:
            admitted[key] += await burst(server, key, 4)
    assert admitted == {key: min(limit, 16) for key, limit in limits.items()}
    # Up to four were admitted in each of the first bursts, and their places are free a minute later.
    server.clock.now_s = 1_060.0
    assert [await burst(server, key, 10) for key in limits] == [min(limit, 4) for limit in limits.values()]


async def test_tokens_count_with_the_longest_answer_at_first_and_with_the_real_one_at_the_end(make: Make) -> None:
    server = make(one=KeyLimits(tokens_per_minute=2 * PROMPT_TOKENS + 100))
    server.engine.script = [10, 11]
    server.engine.released.clear()
    first = asyncio.ensure_future(chat(server, max_tokens=100))
    await until(lambda: server.engine.requests)
    refused = await chat(server, max_tokens=2)
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == (
        f"Rate limit reached on tokens per min (TPM): Limit {2 * PROMPT_TOKENS + 100}, Used {PROMPT_TOKENS + 100}, "
        f"Requested {PROMPT_TOKENS + 2}. Please try again in 1m0s."
    )
    server.engine.released.set()
    usage = (await first).json()["usage"]
    assert usage["prompt_tokens"] == PROMPT_TOKENS
    second = await chat(server, max_tokens=2)
    left = 2 * PROMPT_TOKENS + 100 - usage["total_tokens"] - PROMPT_TOKENS - 2
    assert (second.status_code, second.headers["x-ratelimit-remaining-tokens"]) == (200, str(left))


async def test_an_answer_without_a_limit_counts_as_it_comes(make: Make) -> None:
    server = make(one=KeyLimits(tokens_per_minute=PROMPT_TOKENS + 20))
    server.engine.script = [10] * 30
    reply = await chat(server, max_tokens=None)
    assert reply.json()["usage"]["completion_tokens"] > 20
    assert (await chat(server)).status_code == 429
    server.clock.now_s += 60.0
    assert (await chat(server)).status_code == 200


async def test_replies_say_what_is_left(make: Make) -> None:
    server = make(one=KeyLimits(requests_per_minute=3, tokens_per_minute=1_000), two=KeyLimits(tokens_per_day=500))
    expected = {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": str(1_000 - PROMPT_TOKENS - 2),
        "x-ratelimit-reset-tokens": "1m0s",
    }
    streamed = await chat(server, stream=True)
    assert {name: streamed.headers[name] for name in expected} == expected
    other = (await chat(server, "two")).headers
    assert "x-ratelimit-limit-requests" not in other
    assert (other["x-ratelimit-limit-tokens"], other["x-ratelimit-reset-tokens"]) == ("500", "11h43m20s")


async def test_a_key_without_limits_has_no_headers(make: Make) -> None:
    reply = await chat(make(one=KeyLimits()))
    assert (reply.status_code, [name for name in reply.headers if "ratelimit" in name]) == (200, [])


async def test_the_openai_client_sees_a_rate_limit_error(make: Make) -> None:
    server = make(one=KeyLimits(requests_per_minute=1))
    await server.openai.chat.completions.create(model="", messages=USER, max_tokens=1)
    server.clock.now_s += 20.0
    with pytest.raises(openai.RateLimitError) as caught:
        await server.openai.chat.completions.create(model="", messages=USER, max_tokens=1)
    assert (caught.value.type, caught.value.code, caught.value.param) == ("requests", "rate_limit_exceeded", None)
    assert caught.value.response.headers["retry-after"] == "40"
    assert "x-should-retry" not in caught.value.response.headers


async def test_the_openai_clients_own_retry_succeeds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make(one=KeyLimits(requests_per_minute=1))
    waits_s: list[float] = []

    async def wait(seconds: float) -> None:
        waits_s.append(seconds)
        server.clock.now_s += seconds

    monkeypatch.setattr("openai._base_client.anyio.sleep", wait)
    client = server.openai.with_options(max_retries=1)
    for _ in range(2):
        await client.chat.completions.create(model="", messages=USER, max_tokens=1)
    assert waits_s == [60.0]


async def test_what_can_never_pass_is_not_to_be_repeated(make: Make) -> None:
    server = make(one=KeyLimits(tokens_per_minute=PROMPT_TOKENS), two=KeyLimits(tokens_per_day=PROMPT_TOKENS + 2))
    large = await chat(server)
    assert (large.status_code, large.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in large.headers
    assert large.json()["error"]["message"].startswith("Request too large on tokens per min (TPM): Limit 11")
    assert (await chat(server, "two")).status_code == 200
    used_up = await chat(server, "two")
    # Until midnight: clients would follow no such wait, and try again at once.
    assert (used_up.headers["retry-after"], used_up.headers["x-should-retry"]) == ("42200", "false")


async def test_a_bad_request_and_a_fault_of_ours_cost_nothing(make: Make) -> None:
    server = make(one=KeyLimits(requests_per_minute=1, tokens_per_minute=200))
    assert (await chat(server, temperature=9)).status_code == 400
    server.engine.fail_after = 1
    assert (await chat(server, max_tokens=100)).status_code == 500
    server.engine.fail_after = None
    assert (await chat(server, max_tokens=100)).status_code == 200


async def test_a_client_that_leaves_pays_for_its_prompt(make: Make) -> None:
    server = make(one=KeyLimits(tokens_per_minute=PROMPT_TOKENS + 100))
    server.engine.released.clear()
    leaving = asyncio.ensure_future(chat(server, max_tokens=100))
    await until(lambda: server.engine.requests)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    server.engine.released.set()
    left = (await chat(server, max_tokens=1)).headers["x-ratelimit-remaining-tokens"]
    assert left == str(100 - PROMPT_TOKENS - 1)


async def test_metrics_count_each_key_by_its_name(make: Make) -> None:
    server = make(one=KeyLimits(requests_per_minute=1), two=KeyLimits())
    for key in ("one", "one", "two"):
        await chat(server, key)
    shown = (await server.http.get("/metrics")).text.splitlines()
    assert 'neaptide_key_requests_total{key="one"} 1.0' in shown
    assert 'neaptide_key_requests_total{key="two"} 1.0' in shown
    assert 'neaptide_key_refused_total{key="one",limit="requests_per_minute"} 1.0' in shown
    assert f'neaptide_key_tokens_total{{key="one"}} {PROMPT_TOKENS + 2}.0' in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (7.66, "7.66s"),
        (60.0, "1m0s"),
        (86.4, "1m26.4s"),
        (3_603.0, "1h0m3s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
