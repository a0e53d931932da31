"""What the marks behind a key allow: tiers and the operator's routes. And Azure's way to send a key."""

from typing import Any

import httpx2
import pytest

from neaptide.engine.params import Tier
from neaptide.server.http.auth import ANONYMOUS, KeyRing
from neaptide.server.http.errors import PermissionDeniedError
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import USER, make_server

CHAT = "/v1/chat/completions"
SWITCH = "/admin/offline"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("entry", "key", "tier", "is_admin"),
    [
        ("k", "k", Tier.DEFAULT, False),
        ("k:priority", "k", Tier.PRIORITY, False),
        ("k:default", "k", Tier.DEFAULT, False),
        ("k:flex", "k", Tier.FLEX, False),
        ("k:batch", "k", Tier.BATCH, False),
        ("k:admin", "k", Tier.DEFAULT, True),
        ("k:flex:admin", "k", Tier.FLEX, True),
        ("k:admin:flex", "k", Tier.FLEX, True),
        ("flex", "flex", Tier.DEFAULT, False),
    ],
)
def test_known_words_at_the_end_of_a_key_are_its_marks(entry: str, key: str, tier: Tier, is_admin: bool) -> None:
    principal = KeyRing((entry,)).identify(f"Bearer {key}")
    assert (principal.tier, principal.ceiling, principal.is_admin) == (tier, tier, is_admin)


@pytest.mark.parametrize(
    ("entry", "key", "weight"),
    [("k", "k", 1.0), ("k:x3", "k", 3.0), ("k:batch:x0.5:admin", "k", 0.5)],
)
def test_a_keys_weight_is_its_part_of_the_offline_work(entry: str, key: str, weight: float) -> None:
    keys = KeyRing((entry,))
    principal = keys.identify(f"Bearer {key}")
    assert principal.weight == weight
    assert keys.share_weights == ({} if weight == 1.0 else {principal.share: weight})


@pytest.mark.parametrize(
    "entry", ["", ":flex", ":admin", "k:flex:priority", "k:flex:flex", "k:admin:admin", "k:x1:x2", "k:x0"]
)
def test_keys_that_are_empty_or_marked_twice_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="an API key"):
        KeyRing((entry,))


@pytest.mark.parametrize(
    "words", ["bacth", "admn", "FLEX", "x", "3", "x0.5.1", "admn:flex", "flex:admn", "", "admin:", "b:c", "x 2"]
)
def test_a_mark_that_there_is_not_is_refused_without_a_word_of_the_key(words: str) -> None:
    """It would be part of the key, which then may do what the mark was to forbid."""
    with pytest.raises(ValueError, match="colon") as caught:
        KeyRing(("first", f"secret:{words}", "third:batch"))
    assert str(caught.value) == (
        "API key 2 of 3 has a colon that is not followed by a mark; the marks are batch, flex, default, "
        "priority, admin and xN, and a key itself has no colon"
    )


@pytest.mark.parametrize(
    ("ceiling", "allowed"),
    [
        (Tier.PRIORITY, {Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX, Tier.BATCH}),
        (Tier.DEFAULT, {Tier.DEFAULT, Tier.FLEX, Tier.BATCH}),
        (Tier.FLEX, {Tier.FLEX, Tier.BATCH}),
        (Tier.BATCH, {Tier.BATCH}),
    ],
)
def test_the_tier_of_a_key_is_its_ceiling(ceiling: Tier, allowed: set[Tier]) -> None:
    principal = KeyRing((f"k:{ceiling.value}",)).identify("Bearer k")
    for tier in Tier:
        if tier in allowed:
            principal.require(tier)
        else:
            with pytest.raises(PermissionDeniedError):
                principal.require(tier)


def test_without_keys_every_tier_may_be_asked_for() -> None:
    for tier in Tier:
        ANONYMOUS.require(tier)


@pytest.mark.parametrize("asked", ["priority", "fast", "default", "scale"])
async def test_a_flex_key_that_asks_for_more_gets_403_before_the_engine(tokenizer: Tokenizer, asked: str) -> None:
    server = make_server(tokenizer, ("k:flex",))
    body = {"messages": USER, "max_tokens": 1, "service_tier": asked}
    reply = await server.http.post(CHAT, json=body, headers=bearer("k"))
    assert reply.status_code == 403
    assert reply.json()["error"] == {
        "message": "This key's highest service tier is flex.",
        "type": "permission_error",
        "param": "service_tier",
        "code": "tier_not_allowed",
    }
    assert server.engine.requests == []


async def test_a_priority_key_may_ask_for_less(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, ("k:priority",))
    for asked in ("auto", "default", "flex"):
        body = {"messages": USER, "max_tokens": 1, "service_tier": asked}
        assert (await server.http.post(CHAT, json=body, headers=bearer("k"))).status_code == 200
    assert [request.tier for request in server.engine.requests] == [Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX]


@pytest.mark.parametrize("more", [{}, {"service_tier": "flex"}, {"stream": True}])
async def test_a_batch_key_answers_nothing_online(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    server = make_server(tokenizer, ("k:batch",))
    reply = await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1, **more}, headers=bearer("k"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "tier_not_allowed")
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("keys", "host", "headers", "status"),
    [
        ((), "127.0.0.1", {}, 200),
        ((), "::1", {}, 200),
        ((), "10.0.0.9", {}, 403),
        ((), "not an address", {}, 403),
        (("k:admin",), "10.0.0.9", bearer("k"), 200),
        (("k:flex:admin",), "10.0.0.9", bearer("k"), 200),
        (("k",), "10.0.0.9", bearer("k"), 403),
        (("k",), "127.0.0.1", bearer("k"), 403),
        (("k:priority",), "127.0.0.1", bearer("k"), 403),
        (("k:admin",), "127.0.0.1", {}, 401),
    ],
)
async def test_the_offline_switch_needs_an_admin_key_or_loopback_without_keys(
    tokenizer: Tokenizer, keys: tuple[str, ...], host: str, headers: dict[str, str], status: int
) -> None:
    app = make_server(tokenizer, keys).app
    transport = httpx2.ASGITransport(app=app, client=(host, 5))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.post(SWITCH, json={"state": "paused"}, headers=headers)
    assert reply.status_code == status
    if status == 403:  # who was refused for where he calls from needs no other key
        assert reply.json()["error"]["code"] == ("admin_key_required" if keys else "local_callers_only")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"api-key": "k"}, 200),
        ({"api-key": "K"}, 401),
        ({"api-key": ""}, 401),
        ({"api-key": "Bearer k"}, 401),
        ({"api-key": "other", **bearer("k")}, 200),
        ({"api-key": "k", **bearer("other")}, 401),
    ],
)
async def test_azures_header_is_read_where_there_is_no_other(
    tokenizer: Tokenizer, headers: dict[str, str], status: int
) -> None:
    server = make_server(tokenizer, ("k",))
    assert (await server.http.get("/v1/models", headers=headers)).status_code == status
