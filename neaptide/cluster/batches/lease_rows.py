"""Leases of whole batches where servers share a database: the holder checks a batch's file and writes its results.

As for chunks (``chunk_rows.py``), a lease raises the batch's epoch, and holders of an older epoch can no longer write.
``now_ms`` may be the database's own clock.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.served import Served
from neaptide.server.batches.sharing import LeaseLostError
from neaptide.server.batches.storing.database_clock import Milliseconds, database_now_ms
from neaptide.server.batches.storing.models import LIVE, BatchStatus
from neaptide.server.batches.storing.tables import batch_chunks, batches

P = ParamSpec("P")
T = TypeVar("T")


class BatchLease(NamedTuple):
    """Right to change a batch, until another server leases it."""

    batch_id: str
    epoch: int


def _may_check(served: Served | None) -> sa.ColumnElement[bool]:
    """Condition: the batch's file names the server's model, or its model is not known yet."""
    t = batches.c
    if served is None:
        return sa.true()
    names = sa.or_(t.model.is_(None), t.model.in_(served.names))
    return sa.or_(t.model_fingerprint == served.fingerprint, sa.and_(t.model_fingerprint.is_(None), names))


def _needs_care(now_ms: Milliseconds, served: Served | None) -> sa.ColumnElement[bool]:
    """Condition: a batch needs work other than its lines, and has no holder.

    The work is to check the file, or to end a batch that is complete, cancelled or overdue.
    """
    t = batches.c
    no_chunks = ~sa.exists().where(batch_chunks.c.batch_id == t.id)
    is_due = sa.or_(
        sa.and_(t.status == BatchStatus.VALIDATING, _may_check(served)),
        t.outcome.is_not(None),
        sa.and_(t.status == BatchStatus.IN_PROGRESS, no_chunks),
    )
    return sa.and_(t.status.in_(LIVE), t.leased_until_ms <= now_ms, is_due)


def needs_care(conn: sa.Connection, served: Served | None = None) -> bool:
    """Whether ``claim_batch`` would find a batch; this costs less than a write."""
    return bool(conn.execute(sa.select(sa.exists().where(_needs_care(database_now_ms(conn), served)))).scalar_one())


def claim_batch(
    conn: sa.Connection,
    lease_ms: int,
    now_ms: Milliseconds | None = None,
    besides: Collection[str] = (),
    served: Served | None = None,
) -> BatchLease | None:
    """Leases the oldest batch that needs work, skipping one that another server leases at the same time.

    ``besides``: batches that this server works on, perhaps under an expired lease; it must not work on them twice.
    ``served``: the server checks only files of that model, and from then on no server of another model of that name
    does.
    """
    t = batches.c
    now_ms = database_now_ms(conn) if now_ms is None else now_ms
    free = sa.select(t.id).where(_needs_care(now_ms, served), t.id.not_in(besides)).order_by(t.seq).limit(1)
    chosen = free.with_for_update(skip_locked=True).cte("chosen")
    claimed = (
        batches.update()
        .where(t.id.in_(sa.select(chosen.c.id)))
        .values(lease_epoch=t.lease_epoch + 1, leased_until_ms=now_ms + lease_ms)
        .returning(t.id, t.lease_epoch)
    )
    if served is not None:
        is_named = sa.and_(t.model_fingerprint.is_(None), t.model.in_(served.names))
        claimed = claimed.values(model_fingerprint=sa.case((is_named, served.fingerprint), else_=t.model_fingerprint))
    row = conn.execute(claimed).one_or_none()
    return None if row is None else BatchLease(*row)


def renew_batches(
    conn: sa.Connection, leases: Iterable[BatchLease], lease_ms: int, now_ms: Milliseconds | None = None
) -> dict[BatchLease, bool]:
    """Renews leases. Returns those that still hold, and whether the batch's end has been decided."""
    t = batches.c
    now_ms = database_now_ms(conn) if now_ms is None else now_ms
    wanted = sorted(leases)
    if not wanted:
        return {}
    update = (
        batches.update().where(sa.tuple_(t.id, t.lease_epoch).in_(wanted)).values(leased_until_ms=now_ms + lease_ms)
    )
    changed = conn.execute(update.returning(t.id, t.lease_epoch, t.outcome))
    return {BatchLease(batch_id, epoch): outcome is not None for batch_id, epoch, outcome in changed}


def release_batch(conn: sa.Connection, lease: BatchLease) -> None:
    t = batches.c
    update = batches.update().where(t.id == lease.batch_id, t.lease_epoch == lease.epoch)
    conn.execute(update.values(leased_until_ms=0))


def guarded(
    lease: BatchLease, operation: Callable[Concatenate[sa.Connection, P], T]
) -> Callable[Concatenate[sa.Connection, P], T]:
    """Restricts the operation to the lease's holder: no other lease begins before its transaction ends.

    Raises:
        LeaseLostError: another server has leased the batch.
    """

    def run(conn: sa.Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        t = batches.c
        held = sa.select(t.id).where(t.id == lease.batch_id, t.lease_epoch == lease.epoch)
        if conn.execute(held.with_for_update(key_share=True)).one_or_none() is None:
            raise LeaseLostError(lease.batch_id)
        return operation(conn, *args, **kwargs)

    return run
