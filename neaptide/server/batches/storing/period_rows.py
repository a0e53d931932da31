"""Stored aggregates of the traffic, of the last 14 days. Each operation runs within one transaction."""

import sqlalchemy as sa

from neaptide.server.batches.storing.tables import batches, traffic_periods
from neaptide.server.quotes.periods import KEPT_S, Period, period_decoder, period_encoder
from neaptide.server.quotes.work import KnownBatch

KNOWN_BATCHES = 20
"""Number of ended batches whose answers are known."""


def add_period(conn: sa.Connection, server: str, period: Period) -> None:
    """Stores a part of a period in addition to earlier parts, and forgets old periods."""
    t = traffic_periods.c
    is_same = sa.and_(t.server == server, t.start_s == period.start_s)
    known = conn.execute(sa.select(t.counts).where(is_same).with_for_update()).scalar_one_or_none()
    if known is None:
        counts = period_encoder.encode(period).decode()
        conn.execute(traffic_periods.insert().values(server=server, start_s=period.start_s, counts=counts))
    else:
        whole = period_decoder.decode(known)
        whole.add(period)
        conn.execute(traffic_periods.update().where(is_same).values(counts=period_encoder.encode(whole).decode()))
    conn.execute(traffic_periods.delete().where(t.server == server, t.start_s < period.start_s - KEPT_S))


def stored_periods(conn: sa.Connection, server: str) -> list[str]:
    """The encoded periods, oldest first."""
    t = traffic_periods.c
    return list(conn.execute(sa.select(t.counts).where(t.server == server).order_by(t.start_s)).scalars())


def known_batches(conn: sa.Connection, owner: str | None) -> list[KnownBatch]:
    """The last completed batches with answers; of all owners for None."""
    t = batches.c
    other_s = t.in_progress_at - t.created_at + t.completed_at - t.finalizing_at
    query = sa.select(t.output_tokens / sa.cast(t.num_completed, sa.Double), t.num_total, other_s)
    query = query.where(t.num_completed > 0, t.completed_at.is_not(None))
    if owner is not None:
        query = query.where(t.owner == owner)
    rows = conn.execute(query.order_by(t.seq.desc()).limit(KNOWN_BATCHES))
    return [KnownBatch(answer_tokens, num_lines, float(seconds)) for answer_tokens, num_lines, seconds in rows]
