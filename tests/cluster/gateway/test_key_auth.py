"""The key with which a gateway asks: any that its replicas accept, also while a changed file spreads."""

import httpx

from neaptide.cluster.gateway.key_auth import KeyAuth
from neaptide.server.http.auth import KeyRing


def asked(ring: KeyRing, accepted: str | None) -> tuple[int, list[str | None]]:
    """The answer of a replica that accepts this key only, or every request, and the headers that it saw."""
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200 if accepted is None or seen[-1] == f"Bearer {accepted}" else 401)

    with httpx.Client(transport=httpx.MockTransport(answer), auth=KeyAuth(ring)) as http:
        return http.get("http://replica/figures").status_code, seen


def test_without_keys_none_is_sent() -> None:
    assert asked(KeyRing(), None) == (200, [None])


def test_the_first_key_is_sent_without_its_marks() -> None:
    assert asked(KeyRing(("one:batch", "two")), "one") == (200, ["Bearer one"])


def test_the_others_are_tried_where_it_is_refused() -> None:
    ring = KeyRing(("one", "two:admin", "three"))
    assert asked(ring, "two") == (200, ["Bearer one", "Bearer two"])
    assert asked(ring, "gone") == (401, ["Bearer one", "Bearer two", "Bearer three"])
