"""API keys: the tenant of a request, the tiers that it may use, and the cached prefixes that it may share."""

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from neaptide.engine.params import Tier
from neaptide.server.http.error_replies import error_response
from neaptide.server.http.errors import ApiError, AuthenticationError, PermissionDeniedError
from neaptide.server.limits.usage import NO_LIMITS, KeyLimits

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/livez", "/readyz", "/metrics", "/version"}
    | {"/", "/dashboard", "/dashboard/data", "/docs", "/openapi.json"}
)
"""Paths that need no key: probes and scrapers have none, and a browser cannot send one for a page. The dashboard is the
same for all, has no text of callers, and requests batches with a key. The description of the API is the same for all,
too. Every other path needs a key, even unknown ones."""

KEY_ID_CHARS = 8
"""Length of a key's fingerprint: enough to tell an operator's keys apart."""
_FROM_LOWEST = (Tier.BATCH, Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY)
_ADMIN = "admin"
_WEIGHT = re.compile(r"x(\d{1,4}(?:\.\d{1,3})?)")


@dataclass(slots=True, frozen=True)
class Principal:
    """The caller of one request."""

    tenant: str = ""
    """Owner of files and batches; derived from the key without revealing it."""
    salt: bytes = b""
    """Cache salt. Prompts of different keys never share cached blocks, so response times reveal nothing."""
    tier: Tier = Tier.DEFAULT
    """Tier that ``service_tier`` auto stands for."""
    ceiling: Tier = Tier.PRIORITY
    """Highest tier that it may use."""
    is_admin: bool = False
    """Whether it may use the operator's routes."""
    weight: float = 1.0
    """Weight of its offline work relative to that of other keys."""
    name: str = ""
    """Name that the operator has given the key."""
    limits: KeyLimits = NO_LIMITS
    """Limits of its online and flex requests."""

    def require(self, tier: Tier) -> None:
        """Raises PermissionDeniedError for a tier above the ceiling."""
        if _FROM_LOWEST.index(tier) > _FROM_LOWEST.index(self.ceiling):
            text = f"This key's highest service tier is {self.ceiling.value}."
            if self.ceiling is Tier.BATCH:
                text = "This key is for batches only; it cannot be used for chat."
            raise PermissionDeniedError(text, param="service_tier", code="tier_not_allowed")

    @property
    def share(self) -> str:
        """Name of the tenant that its offline work is charged to."""
        return share_of(self.tenant)

    @property
    def key_id(self) -> str | None:
        """Fingerprint of the key, which names it in logs; None without a key."""
        return self.tenant[:KEY_ID_CHARS] or None

    @property
    def label(self) -> str:
        """The key in metrics: its name, or its fingerprint; empty without a key."""
        return self.name or self.tenant[:KEY_ID_CHARS]

    @property
    def shown(self) -> str:
        """Name, rights and limits, for the log."""
        limits = (f"{name.value} {limit}" for name, limit in self.limits.items())
        marks = [f"tier {self.tier.value}", *limits]
        if self.name:
            marks.insert(0, f"name {self.name}")
        if self.is_admin:
            marks.append("admin")
        if self.weight != 1.0:
            marks.append(f"weight {self.weight:g}")
        return ", ".join(marks)

    @property
    def is_limited(self) -> bool:
        """Whether the key has a limit."""
        return self.limits != NO_LIMITS

    def salt_for(self, cache_salt: str | None) -> bytes:
        """Salt of one request. The caller's salt can only divide what the key shares, never leave it."""
        if cache_salt is None:
            return self.salt
        return hashlib.sha256(b"neaptide/caller-salt\0" + self.salt + b"\0" + cache_salt.encode()).digest()[:16]


def share_of(tenant: str) -> str:
    """Name of a tenant's share; it reveals no more of the key than logs do."""
    return tenant[:KEY_ID_CHARS]


ANONYMOUS = Principal()


@dataclass(slots=True, frozen=True)
class AcceptedKey:
    """A key, and the caller that it stands for."""

    key: str
    principal: Principal


def parse_keys(entries: Sequence[str]) -> list[AcceptedKey]:
    """Keys of ``--api-key``: each is ``KEY`` followed by optional ``:TIER``, ``:admin`` and ``:xWEIGHT``.

    The tier is what ``auto`` stands for and the highest that the key may use; it defaults to ``default``. A key of tier
    ``batch`` may only use files and batches. A key of weight 2 gets twice as much offline work as one without a weight.
    A key itself has no colon.

    Raises:
        ValueError: an empty key or wrong marks; the message does not contain the key.
    """
    found: list[AcceptedKey] = []
    for number, entry in enumerate(entries, 1):
        key, marks = split_marks(entry)
        tiers = [Tier(mark) for mark in marks if mark in tuple(_FROM_LOWEST)]
        weights = [float(mark[1:]) for mark in marks if _WEIGHT.fullmatch(mark)]
        if not key:
            raise ValueError("an API key is empty")
        # A misspelled mark would become part of the key, and lift the restriction that it stands for.
        if ":" in key:
            raise ValueError(
                f"API key {number} of {len(entries)} has a colon that is not followed by a mark; "
                f"the marks are {', '.join((*_FROM_LOWEST, _ADMIN))} and xN, and a key itself has no colon"
            )
        if len(set(marks)) < len(marks) or len(tiers) > 1 or len(weights) > 1:
            raise ValueError("an API key has two tiers or weights, or one mark twice")
        if 0.0 in weights:
            raise ValueError("the weight of an API key is 0")
        principal = principal_for(
            key,
            tiers[0] if tiers else Tier.DEFAULT,
            is_admin=_ADMIN in marks,
            weight=weights[0] if weights else 1.0,
        )
        found.append(AcceptedKey(key, principal))
    return found


class KeyRing:
    """The keys that an operator accepts now. Without any key every request is accepted.

    Args:
        keys: as for ``parse_keys``, which says what it raises.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._entries: list[tuple[bytes, Principal]] = []
        self._accepted: Sequence[AcceptedKey] = ()
        self.share_weights: dict[str, float] = {}
        """Weights other than 1, by share."""
        self._labels: dict[str, str] = {}
        self._listeners: list[Callable[[Sequence[AcceptedKey]], None]] = []
        self.accept(parse_keys(keys))

    def accept(self, accepted: Sequence[AcceptedKey]) -> None:
        """Accepts these keys and no others from now on."""
        self._entries = [(_digest(b"key", one.key), one.principal) for one in accepted]
        self._accepted = accepted
        self._labels = {one.share: one.label for one in self.principals}
        self.share_weights = {one.share: one.weight for one in self.principals if one.weight != 1.0}
        for listener in self._listeners:
            listener(accepted)

    def subscribe(self, listener: Callable[[Sequence[AcceptedKey]], None]) -> None:
        """Calls ``listener`` with the accepted keys, now and whenever they change."""
        self._listeners.append(listener)
        listener(self._accepted)

    @property
    def keys(self) -> list[str]:
        """The keys themselves, for this process's own requests to servers that accept the same ones."""
        return [one.key for one in self._accepted]

    def share_weight(self, share: str) -> float:
        """Weight of a share; 1 for the share of a key that is accepted no more."""
        return self.share_weights.get(share, 1.0)

    def label_of(self, share: str) -> str:
        """Label of the key that has the share; that of a key that is accepted no more is the share itself."""
        return self._labels.get(share, share)

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._entries)

    @property
    def principals(self) -> list[Principal]:
        """The callers of the keys, in order."""
        return [principal for _, principal in self._entries]

    def identify(self, authorization: str | None, api_key: str | None = None) -> Principal:
        """The caller of an ``Authorization`` header, or of Azure's ``api-key`` if there is none.

        Raises:
            AuthenticationError: there is no bearer key, or an unknown one.
        """
        if not self._entries:
            return ANONYMOUS
        scheme, _, key = ("Bearer " + (api_key or "") if authorization is None else authorization).partition(" ")
        key = key.strip()
        challenge = {"WWW-Authenticate": "Bearer"}
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("An API key is required: 'Authorization: Bearer KEY'.", headers=challenge)
        presented = _digest(b"key", key)
        found: Principal | None = None
        for digest, principal in self._entries:
            # No early exit: response times must not reveal a key's position in the list.
            if hmac.compare_digest(digest, presented):
                found = principal
        if found is None:
            raise AuthenticationError("Incorrect API key provided.", code="invalid_api_key", headers=challenge)
        return found


class AuthMiddleware:
    """Passes a request on with its ``Principal`` in ``scope["state"]``, or answers 401. Denies by default."""

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
                headers = Headers(scope=scope)
                principal = self._keys.identify(headers.get("authorization"), headers.get("api-key"))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def principal_of(request: Request) -> Principal:
    """The caller of this request; anonymous if the app runs without the middleware."""
    return cast(Principal, request.scope.get("state", {}).get("principal", ANONYMOUS))


def split_marks(entry: str) -> tuple[str, list[str]]:
    """The key of an entry, and the known marks at its end.

    If another word follows a colon, the key keeps it. A server refuses such keys, but a client's key may be for another
    server.
    """
    marks: list[str] = []
    key, separator, word = entry.rpartition(":")
    while separator and (word in (_ADMIN, *_FROM_LOWEST) or _WEIGHT.fullmatch(word)):
        marks.append(word)
        entry = key
        key, separator, word = entry.rpartition(":")
    return entry, marks


def _digest(purpose: bytes, key: str) -> bytes:
    return hashlib.sha256(b"neaptide/" + purpose + b"\0" + key.encode()).digest()


def principal_for(
    key: str,
    tier: Tier = Tier.DEFAULT,
    *,
    is_admin: bool = False,
    weight: float = 1.0,
    name: str = "",
    limits: KeyLimits = NO_LIMITS,
) -> Principal:
    """The caller who has this key."""
    return Principal(
        tenant=_digest(b"tenant", key).hex()[:32],
        salt=_digest(b"cache-salt", key)[:16],
        tier=tier,
        ceiling=tier,
        is_admin=is_admin,
        weight=weight,
        name=name,
        limits=limits,
    )
