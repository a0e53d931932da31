"""Servers that use the database, with their models and abilities, and batches that wait for another server.

A server is present until the lease of its record ends. It stays known for a while longer: a restart takes minutes, and
lines that only that server can run are left to it.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa

from neaptide.server.batches.served import Abilities, Served
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.models import BatchStatus
from neaptide.server.batches.storing.tables import batch_chunks, batches, servers
from neaptide.server.openai.stored_replies import BatchError

KNOWN_MS = 3_600_000
"""How long a server is known after its last renewal."""
_FOR_EVER_MS = 1 << 62
_OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


def enrol(conn: sa.Connection, name: str, served: Served, lease_ms: int) -> None:
    """Registers the server as present for the length of a lease."""
    t, now_ms = servers.c, database_now_ms(conn)
    until_ms = conn.execute(sa.select(now_ms + lease_ms)).scalar_one()
    conn.execute(servers.delete().where(sa.or_(t.name == name, t.there_until_ms < now_ms - KNOWN_MS)))
    conn.execute(servers.insert().values(**_row(name, served, until_ms)))


def enrol_alone(conn: sa.Connection, served: Served) -> None:
    """Registers the only server of the database."""
    conn.execute(servers.delete())
    conn.execute(servers.insert().values(**_row("", served, _FOR_EVER_MS)))


def leave(conn: sa.Connection, name: str) -> None:
    """Notes that the server stops. It stays known, as after a crash."""
    conn.execute(servers.update().where(servers.c.name == name).values(there_until_ms=database_now_ms(conn)))


def _row(name: str, served: Served, until_ms: int) -> dict[str, Any]:
    can = served.abilities
    return {
        "name": name,
        "fingerprint": served.fingerprint,
        "models": list(served.names),
        "max_model_len": can.max_model_len,
        "follows_grammars": can.follows_grammars,
        "max_masked_ends": can.max_masked_ends,
        "there_until_ms": until_ms,
    }


def known_abilities(conn: sa.Connection, fingerprint: str) -> list[Abilities]:
    """Abilities of the known servers of one model, without repetitions, longest context first."""
    t = servers.c
    query = sa.select(t.max_model_len, t.follows_grammars, t.max_masked_ends).distinct()
    is_known = t.there_until_ms > database_now_ms(conn) - KNOWN_MS
    found = conn.execute(query.where(t.fingerprint == fingerprint, is_known).order_by(t.max_model_len.desc()))
    return [Abilities(*row) for row in found]


# ---- batches that wait ----------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """A batch that no present server can begin or complete."""

    batch_id: str
    model: str
    """Name of the model in its lines."""
    is_stamped: bool
    """Whether one model of that name has begun it, and alone may answer it."""
    needs_tokens: int | None
    """Context that some of its lines need; None if the model is missing."""
    longest_tokens: int
    """Longest context of its model."""

    @property
    def reason(self) -> str:
        """What is missing, as a value of a metric's label."""
        return "model" if self.needs_tokens is None else "context"

    @property
    def why(self) -> str:
        """Sentence for the batch's owner."""
        if self.needs_tokens is not None:
            return (
                f"Lines need a context of up to {self.needs_tokens} tokens; the longest here is {self.longest_tokens}."
            )
        if self.is_stamped:
            return f"No server has the model {self.model!r} for which the batch was made."
        return f"No server serves a model of the name {self.model!r}."


def waiting(conn: sa.Connection, batch_ids: Collection[str] | None = None) -> list[Waiting]:
    """Waiting batches among all or some, oldest first."""
    t, s = batches.c, servers.c
    is_there = s.there_until_ms > database_now_ms(conn)
    there = conn.execute(sa.select(s.fingerprint, s.models).where(is_there)).all()
    names = {name for row in there for name in row.models}
    is_stamped = t.model_fingerprint.is_not(None)
    lacks_model = sa.case(
        (is_stamped, t.model_fingerprint.not_in({row.fingerprint for row in there})), else_=t.model.not_in(names)
    )
    longest = sa.select(sa.func.max(s.max_model_len)).where(is_there, s.fingerprint == t.model_fingerprint)
    needed = sa.select(sa.func.max(batch_chunks.c.needs_tokens)).where(batch_chunks.c.batch_id == t.id)
    asked = (longest.scalar_subquery(), needed.scalar_subquery())
    query = sa.select(t.id, t.model, is_stamped, lacks_model, *asked).where(t.status.in_(_OPEN), t.model.is_not(None))
    query = query.where(sa.or_(lacks_model, asked[1] > asked[0])).order_by(t.seq)
    if batch_ids is not None:
        query = query.where(t.id.in_(batch_ids))
    found = conn.execute(query)
    return [
        Waiting(batch_id, model, bool(stamped), None if lacks else needs, longest_tokens or 0)
        for batch_id, model, stamped, lacks, longest_tokens, needs in found
    ]


def leave_to_model(conn: sa.Connection, batch_id: str, model: str) -> None:
    """Leaves the batch to servers of its model, which is not this server's."""
    is_checked = sa.and_(batches.c.id == batch_id, batches.c.status == BatchStatus.VALIDATING)
    conn.execute(batches.update().where(is_checked).values(model=model, model_fingerprint=None))
    batch_rows.discard_lines(conn, batch_id)


def fail_unserved(conn: sa.Connection, now: int) -> list[str]:
    """Fails batches whose model no server has served within their windows."""
    t = batches.c
    unserved = (t.status == BatchStatus.VALIDATING, t.outcome.is_(None), t.model_fingerprint.is_(None))
    query = sa.select(t.id, t.model).where(*unserved, t.model.is_not(None), t.expires_at <= now)
    failed = []
    for batch_id, model in conn.execute(query).all():
        message = f"No server has served a model of the name {model!r} within the completion window."
        error: BatchError = {"code": "model_not_found", "line": None, "message": message, "param": "body.model"}
        if batch_rows.fail_batch(conn, batch_id, [error], now):
            failed.append(batch_id)
    return failed
