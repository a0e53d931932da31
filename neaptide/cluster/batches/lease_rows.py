"""Who moves a batch itself on (checks its file, writes its results) where servers share: one at a time, for a lease.

As for chunks (``chunk_rows.py``): a claim counts the batch's epoch up, and whoever has an older one writes nothing any
more. ``now_ms`` may be the database's own clock.
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
    """The right to move a batch on, as long as nobody else has claimed it."""

    batch_id: str
    epoch: int


def _may_check(served: Served | None) -> sa.ColumnElement[bool]:
    """The batch's file names the server's model, or nobody knows yet what it names."""
    t = batches.c
    if served is None:
        return sa.true()
    names = sa.or_(t.model.is_(None), t.model.in_(served.names))
    return sa.or_(t.model_fingerprint == served.fingerprint, sa.and_(t.model_fingerprint.is_(None), names))


def _needs_care(now_ms: Milliseconds, served: Served | None) -> sa.ColumnElement[bool]:
    """There is something to do that is not a line: to check the file, to end a batch whose lines have ended, or one
    that was cancelled or is overdue; and nobody does it."""
    t = batches.c
    no_chunks = ~sa.exists().where(batch_chunks.c.batch_id == t.id)
    is_due = sa.or_(
        sa.and_(t.status == BatchStatus.VALIDATING, _may_check(served)),
        t.outcome.is_not(None),
        sa.and_(t.status == BatchStatus.IN_PROGRESS, no_chunks),
    )
    return sa.and_(t.status.in_(LIVE), t.leased_until_ms <= now_ms, is_due)


def needs_care(conn: sa.Connection, served: Served | None = None) -> bool:
    """Whether ``claim_batch`` would find anything; a write would cost more."""
    return bool(conn.execute(sa.select(sa.exists().where(_needs_care(database_now_ms(conn), served)))).scalar_one())


def claim_batch(
    conn: sa.Connection,
    lease_ms: int,
    now_ms: Milliseconds | None = None,
    besides: Collection[str] = (),
    served: Served | None = None,
) -> BatchLease | None:
    """The oldest batch that has to be moved on; what another server claims now is passed by.

    ``besides``: batches that the server is at, perhaps under a lease that is over: it must not be at them twice.
    ``served``: it checks files of that model alone, and from then on nobody of another model of the name does.
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
    """Begins leases anew. Those that still hold, and whether the batch's end has been decided."""
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
    """The operation, for the lease's holder only: no other claim begins before its transaction ends.

    Raises:
        LeaseLostError: there has been another claim.
    """

    def run(conn: sa.Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        t = batches.c
        held = sa.select(t.id).where(t.id == lease.batch_id, t.lease_epoch == lease.epoch)
        if conn.execute(held.with_for_update(key_share=True)).one_or_none() is None:
            raise LeaseLostError(lease.batch_id)
        return operation(conn, *args, **kwargs)

    return run
