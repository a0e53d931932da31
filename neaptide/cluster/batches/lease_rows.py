"""Leases of whole batches: one server at a time moves a batch on (checks its file, writes its results).

As for chunks (``chunk_rows.py``), a lease counts the batch's epoch up, and a server with an older epoch writes nothing
any more. ``now_ms`` may be the database's own clock.
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


class HeldBatchLease(NamedTuple):
    """The right to move a batch on, until another server leases it."""

    batch_id: str
    epoch: int


def _may_check(served: Served | None) -> sa.ColumnElement[bool]:
    """Whether the batch's file names the server's model, or it is not known yet which model it names."""
    t = batches.c
    if served is None:
        return sa.true()
    names = sa.or_(t.model.is_(None), t.model.in_(served.names))
    return sa.or_(t.model_fingerprint == served.fingerprint, sa.and_(t.model_fingerprint.is_(None), names))


def _needs_care(now_ms: Milliseconds, served: Served | None) -> sa.ColumnElement[bool]:
    """Whether a batch has something to do beside its lines, and no server does it.

    That is to check the file, or to end a batch: its lines have ended, it was cancelled, or it is overdue.
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
    """Whether ``lease_batch`` would find anything; a write would cost more."""
    return bool(conn.execute(sa.select(sa.exists().where(_needs_care(database_now_ms(conn), served)))).scalar_one())


def lease_batch(
    conn: sa.Connection,
    lease_ms: int,
    now_ms: Milliseconds | None = None,
    excluded: Collection[str] = (),
    served: Served | None = None,
) -> HeldBatchLease | None:
    """Leases the oldest batch that has something to do. It skips batches that another server is leasing now.

    Args:
        excluded: batches that the server is working on, perhaps under a lease that is over.
        served: the server's model. It checks files of that model alone, and marks them as its own: from then on no
            other model of the same name answers them.
    """
    t = batches.c
    now_ms = database_now_ms(conn) if now_ms is None else now_ms
    free = sa.select(t.id).where(_needs_care(now_ms, served), t.id.not_in(excluded)).order_by(t.seq).limit(1)
    chosen = free.with_for_update(skip_locked=True).cte("chosen")
    leased = (
        batches.update()
        .where(t.id.in_(sa.select(chosen.c.id)))
        .values(lease_epoch=t.lease_epoch + 1, leased_until_ms=now_ms + lease_ms)
        .returning(t.id, t.lease_epoch)
    )
    if served is not None:
        is_named = sa.and_(t.model_fingerprint.is_(None), t.model.in_(served.names))
        leased = leased.values(model_fingerprint=sa.case((is_named, served.fingerprint), else_=t.model_fingerprint))
    row = conn.execute(leased).one_or_none()
    return None if row is None else HeldBatchLease(*row)


def renew_batches(
    conn: sa.Connection, leases: Iterable[HeldBatchLease], lease_ms: int, now_ms: Milliseconds | None = None
) -> dict[HeldBatchLease, bool]:
    """Begins leases anew. Returns those that still hold, and for each whether the batch's end has been decided."""
    t = batches.c
    now_ms = database_now_ms(conn) if now_ms is None else now_ms
    wanted = sorted(leases)
    if not wanted:
        return {}
    update = (
        batches.update().where(sa.tuple_(t.id, t.lease_epoch).in_(wanted)).values(leased_until_ms=now_ms + lease_ms)
    )
    changed = conn.execute(update.returning(t.id, t.lease_epoch, t.outcome))
    return {HeldBatchLease(batch_id, epoch): outcome is not None for batch_id, epoch, outcome in changed}


def release_batch(conn: sa.Connection, lease: HeldBatchLease) -> None:
    """Ends a lease before its time."""
    t = batches.c
    update = batches.update().where(t.id == lease.batch_id, t.lease_epoch == lease.epoch)
    conn.execute(update.values(leased_until_ms=0))


def guarded(
    lease: HeldBatchLease, operation: Callable[Concatenate[sa.Connection, P], T]
) -> Callable[Concatenate[sa.Connection, P], T]:
    """The operation, run only while the lease holds: no other lease begins before its transaction ends.

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
