"""Stored counts of what keys have used. Each operation runs within one transaction.

A server that has the database to itself counts in memory, and stores the counts of days about once a second. Servers
that share the database count here, and lease a part of what is left for some seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.tables import key_usage
from neaptide.server.limits.usage import KEPT_DAYS, Excess, KeyLimits, KeyUsage, Level, LimitName, Place, Times

SLOT_S = 1.0
LEASE_S = 2.0
"""How long a server may use what it has leased."""
SPARE_PART = 4
"""A lease takes at most this fraction of what is left beyond the need, so that other servers find some."""
_KEPT_MS = KEPT_DAYS * 86_400_000


class Returned(NamedTuple):
    """An amount that was counted and not used."""

    name: LimitName
    amount: int
    place: Place


@dataclass(slots=True)
class Settlement:
    """Changes of one key's counts that need no answer."""

    added: dict[LimitName, int] = field(default_factory=dict)
    """Amounts that were used without a lease."""
    returned: list[Returned] = field(default_factory=list)


class Leased(NamedTuple):
    """Answer to a request for a lease."""

    excess: Excess | None
    """Why there is none."""
    amounts: dict[LimitName, int]
    place: Place
    levels: dict[LimitName, Level]
    """Use of all servers, this lease included."""


def stored(conn: sa.Connection) -> dict[str, str]:
    """The encoded counts of all tenants."""
    return {row.tenant: row.counts for row in conn.execute(sa.select(key_usage))}


def store(conn: sa.Connection, counts: Mapping[str, str]) -> None:
    """Replaces the counts of these tenants, and forgets those of keys that have not been used for days."""
    now_ms = conn.execute(sa.select(database_now_ms(conn))).scalar_one()
    conn.execute(key_usage.delete().where(key_usage.c.changed_at_ms < now_ms - _KEPT_MS))
    for tenant, encoded in counts.items():
        _lock(conn, tenant, now_ms)
        _write(conn, tenant, encoded, now_ms)


def settle(conn: sa.Connection, settlements: Mapping[str, Settlement]) -> None:
    """Makes changes that need no answer."""
    for tenant in sorted(settlements):  # one order for all servers, so that none waits for another in a circle
        usage, now, now_ms = _locked(conn, tenant)
        _settle(usage, settlements[tenant], now)
        _write(conn, tenant, usage.encoded(), now_ms)


def lease(
    conn: sa.Connection,
    tenant: str,
    limits: KeyLimits,
    needs: Mapping[LimitName, int],
    wishes: Mapping[LimitName, int],
    settlement: Settlement,
) -> Leased:
    """Counts the needs if all of them fit, and some of what is wished for beyond them."""
    usage, now, now_ms = _locked(conn, tenant)
    _settle(usage, settlement, now)
    amounts: dict[LimitName, int] = {}
    excess = usage.take(limits, needs, now)
    if excess is None:
        for name, limit in limits.items():
            spare = max(0, limit - usage.level(name, now).used) // SPARE_PART
            extra = max(0, min(wishes.get(name, 0) - needs[name], spare))
            usage.add(name, extra, now)
            amounts[name] = needs[name] + extra
    _write(conn, tenant, usage.encoded(), now_ms)
    levels = {name: usage.level(name, now) for name, _ in limits.items()}
    return Leased(excess, amounts, usage.place(now), levels)


def _settle(usage: KeyUsage, settlement: Settlement, now: Times) -> None:
    for name, amount in settlement.added.items():
        usage.add(name, amount, now)
    for name, amount, place in settlement.returned:
        usage.give_back(name, amount, place)


def _locked(conn: sa.Connection, tenant: str) -> tuple[KeyUsage, Times, int]:
    """The tenant's counts, locked until the end of the transaction, and the time after the wait for the lock."""
    encoded = _lock(conn, tenant, 0)
    now_ms = conn.execute(sa.select(database_now_ms(conn))).scalar_one()
    usage = KeyUsage(SLOT_S, LEASE_S)
    usage.decode(encoded)
    return usage, Times(now_ms / 1e3, now_ms / 1e3), now_ms


def _lock(conn: sa.Connection, tenant: str, now_ms: int) -> str:
    insert = (sqlite if conn.dialect.name == "sqlite" else postgresql).insert(key_usage)
    conn.execute(insert.values(tenant=tenant, counts="{}", changed_at_ms=now_ms).on_conflict_do_nothing())
    query = sa.select(key_usage.c.counts).where(key_usage.c.tenant == tenant)
    return str(conn.execute(query.with_for_update()).scalar_one())


def _write(conn: sa.Connection, tenant: str, encoded: str, now_ms: int) -> None:
    changed = key_usage.update().where(key_usage.c.tenant == tenant)
    conn.execute(changed.values(counts=encoded, changed_at_ms=now_ms))
