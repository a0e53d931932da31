"""API keys: who calls, at which tier by default, and whose cached prefixes they may meet."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from neaptide.engine.params import Tier
from neaptide.server.edge.errors import ApiError, AuthenticationError, error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/livez", "/readyz", "/metrics", "/version"})
"""Probes and scrapers have no key. Every other path needs one, also paths that do not exist."""

KEY_ID_CHARS = 8
"""Enough to tell an operator's keys apart, and no more of a key than that."""
_KEY_TIERS = (Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX)


@dataclass(slots=True, frozen=True)
class Principal:
    """The caller of one request."""

    tenant: str = ""
    """Owner of files and batches; derived from the key, which it does not reveal."""
    salt: bytes = b""
    """Cache salt: prompts of different keys never share cached blocks, so their timing tells nothing."""
    tier: Tier = Tier.DEFAULT
    """What ``service_tier`` auto means for this key."""

    @property
    def key_id(self) -> str | None:
        """The key's fingerprint, by which logs name it; None without one."""
        return self.tenant[:KEY_ID_CHARS] or None

    def salt_for(self, cache_salt: str | None) -> bytes:
        """The salt of one request: the caller may divide what the key sees, never leave it."""
        if cache_salt is None:
            return self.salt
        return hashlib.sha256(b"neaptide/caller-salt\0" + self.salt + b"\0" + cache_salt.encode()).digest()[:16]


ANONYMOUS = Principal()


class KeyRing:
    """The keys that an operator accepts, each ``KEY`` or ``KEY:tier``; none at all means everyone is let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raises ValueError for an empty key."""
        self._entries: list[tuple[bytes, Principal]] = []
        for entry in keys:
            key, tier = split_tier(entry)
            if not key:
                raise ValueError("an API key is empty")
            self._entries.append((_digest(b"key", key), _principal(key, tier)))

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._entries)

    @property
    def principals(self) -> list[Principal]:
        """The callers behind the keys, in their order."""
        return [principal for _, principal in self._entries]

    def identify(self, authorization: str | None) -> Principal:
        """The caller behind an ``Authorization`` header.

        Raises:
            AuthenticationError: no bearer key, or none that is known.
        """
        if not self._entries:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        challenge = {"WWW-Authenticate": "Bearer"}
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("An API key is required: 'Authorization: Bearer KEY'.", headers=challenge)
        presented = _digest(b"key", key)
        found: Principal | None = None
        for digest, principal in self._entries:
            # No early exit: the time must not tell how far down the list a key stands.
            if hmac.compare_digest(digest, presented):
                found = principal
        if found is None:
            raise AuthenticationError("Incorrect API key provided.", code="invalid_api_key", headers=challenge)
        return found


class AuthMiddleware:
    """Lets a request pass with its ``Principal`` in ``scope["state"]``, or answers 401. Deny by default."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        principal = ANONYMOUS
        if scope["path"] not in OPEN_PATHS:
            try:
                principal = self._keys.identify(Headers(scope=scope).get("authorization"))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def principal_of(request: Request) -> Principal:
    """Who sent this request; anonymous where the app runs without the middleware."""
    return cast(Principal, request.scope.get("state", {}).get("principal", ANONYMOUS))


def split_tier(entry: str) -> tuple[str, Tier]:
    """Key and tier of an entry ``KEY`` or ``KEY:tier``."""
    key, separator, suffix = entry.rpartition(":")
    if separator and suffix in _KEY_TIERS:
        return key, Tier(suffix)
    return entry, Tier.DEFAULT


def _digest(purpose: bytes, key: str) -> bytes:
    return hashlib.sha256(b"neaptide/" + purpose + b"\0" + key.encode()).digest()


def _principal(key: str, tier: Tier) -> Principal:
    return Principal(tenant=_digest(b"tenant", key).hex()[:32], salt=_digest(b"cache-salt", key)[:16], tier=tier)
