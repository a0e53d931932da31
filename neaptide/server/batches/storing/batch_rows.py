"""Operations on the ``batches`` and ``batch_lines`` tables, inside a transaction of the store.

Every change of status is a compare-and-set: it names the statuses that it may leave, and returns whether the batch now
has the new one. So a caller who repeats a change after a lost answer learns of its success, and False always means
another decision. Races (cancel and last line, expiry and cancel, late result and end) are decided here and only here.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa

from neaptide.server.batches.served import Served
from neaptide.server.batches.sharing import LineLease
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.models import (
    LIVE,
    BatchRecord,
    BatchStatus,
    EndedLine,
    FileRecord,
    IdempotencyKey,
    LineResult,
    LineState,
    NewBatch,
    NewLine,
    PendingLine,
    StoredUsage,
)
from neaptide.server.batches.storing.tables import batch_chunks, batch_lines, batches
from neaptide.server.openai.stored_replies import BatchError

_TOKEN_COUNTS = tuple(field.name for field in fields(StoredUsage))
_COLUMNS = [column for column in batches.c if column.name not in ("seq", "lease_epoch", "leased_until_ms")]
_ENDED_AT = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


class WrongPurposeError(Exception):
    """The input file was not uploaded for batches."""


def _record(row: sa.Row[Any]) -> BatchRecord:
    values = dict(row._mapping)
    values["status"] = BatchStatus(values["status"])
    values["outcome"] = values["outcome"] and BatchStatus(values["outcome"])
    return BatchRecord(**values)


# ---- create and look up ---------------------------------------------------------------------------------


def create_batch(
    conn: sa.Connection,
    new: NewBatch,
    planned_files: tuple[str, str],
    key: IdempotencyKey | None = None,
    served: Served | None = None,
) -> BatchRecord:
    """Adds a batch, or returns the one that the same key created before.

    ``served``: if the file names that model, no other model of the name may answer the batch.

    Raises:
        IdempotencyConflictError: the key belongs to another body.
        WrongPurposeError: the input file is not a batch file.
    """
    if key is not None:
        known_id = file_rows.claim_key(conn, key, new.id, new.created_at)
        if known_id != new.id:
            return require_batch(conn, known_id)
    purpose, model = file_rows.select_purpose(conn, new.input_file_id, new.owner)
    if purpose not in (None, "batch"):
        raise WrongPurposeError(purpose)
    output_id, error_id = planned_files
    conn.execute(
        batches.insert().values(
            **asdict(new),
            status=BatchStatus.VALIDATING,
            planned_output_file_id=output_id,
            planned_error_file_id=error_id,
            model=model,
            model_fingerprint=served.fingerprint if served is not None and model in served.names else None,
        )
    )
    return require_batch(conn, new.id)


def get_batch(conn: sa.Connection, batch_id: str, owner: str) -> BatchRecord | None:
    query = sa.select(*_COLUMNS).where(batches.c.id == batch_id, batches.c.owner == owner)
    row = conn.execute(query).one_or_none()
    return None if row is None else _record(row)


def require_batch(conn: sa.Connection, batch_id: str) -> BatchRecord:
    return _record(conn.execute(sa.select(*_COLUMNS).where(batches.c.id == batch_id)).one())


def list_batches(conn: sa.Connection, owner: str, limit: int, after: str | None) -> list[BatchRecord] | None:
    """Up to ``limit`` batches older than ``after``, newest first; None if there is no such batch."""
    query = sa.select(*_COLUMNS).where(batches.c.owner == owner).order_by(batches.c.seq.desc()).limit(limit)
    if after is not None:
        where = (batches.c.id == after, batches.c.owner == owner)
        seq = conn.execute(sa.select(batches.c.seq).where(*where)).scalar_one_or_none()
        if seq is None:
            return None
        query = query.where(batches.c.seq < seq)
    return [_record(row) for row in conn.execute(query)]


def count_of_others(conn: sa.Connection, owners: Collection[str]) -> int:
    """Number of batches that belong to none of these owners."""
    query = sa.select(sa.func.count()).select_from(batches).where(batches.c.owner.not_in(owners))
    return int(conn.execute(query).scalar_one())


def live_batches(conn: sa.Connection) -> list[BatchRecord]:
    """Every batch that has not ended, oldest first."""
    query = sa.select(*_COLUMNS).where(batches.c.status.in_(LIVE)).order_by(batches.c.seq)
    return [_record(row) for row in conn.execute(query)]


def all_batch_ids(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(batches.c.id)).scalars())


def live_plan_blobs(conn: sa.Connection) -> set[str]:
    """Keys, without suffixes, of the plans of live batches."""
    query = sa.select(batches.c.plan_blob).where(batches.c.status.in_(LIVE), batches.c.plan_blob.is_not(None))
    return set(conn.execute(query).scalars())


# ---- validating -----------------------------------------------------------------------------------------


_IS_VALIDATING = sa.and_(batches.c.status == BatchStatus.VALIDATING, batches.c.outcome.is_(None))


def _set(conn: sa.Connection, batch_id: str, may: sa.ColumnElement[bool], values: dict[str, Any]) -> bool:
    """Sets ``values``, including a status, if ``may``; returns whether they are set, by this or an earlier call."""
    if conn.execute(batches.update().where(batches.c.id == batch_id, may).values(**values)).rowcount == 1:
        return True
    set_before = (batches.c.id == batch_id, batches.c.status == values["status"])
    outcome = values.get("outcome")
    has_outcome = batches.c.outcome.is_(None) if outcome is None else batches.c.outcome == outcome
    return bool(conn.execute(sa.select(sa.exists().where(*set_before, has_outcome))).scalar_one())


def insert_lines(conn: sa.Connection, batch_id: str, lines: Sequence[NewLine]) -> None:
    rows = []
    for line in lines:
        row = asdict(line)
        result = row.pop("result")
        row |= {
            "batch_id": batch_id,
            "state": LineState.PENDING,
            "status_code": None,
            "request_id": None,
            "result": None,
            "checksum": None,
        }
        if result is not None:
            row |= {key: result[key] for key in ("state", "status_code", "request_id")} | {"result": result["body"]}
            row["checksum"] = line.result and line.result.checksum
        rows.append(row)
    if rows:
        conn.execute(batch_lines.insert(), rows)


def discard_lines(conn: sa.Connection, batch_id: str) -> None:
    """Deletes the lines of an unfinished validation."""
    conn.execute(batch_lines.delete().where(batch_lines.c.batch_id == batch_id))


def fail_batch(conn: sa.Connection, batch_id: str, errors: list[BatchError], now: int) -> bool:
    """Changes validating to failed; no line has run."""
    values = {"status": BatchStatus.FAILED, "errors": errors, "failed_at": now}
    is_failed = _set(conn, batch_id, _IS_VALIDATING, values)
    if is_failed:
        discard_lines(conn, batch_id)
    return is_failed


def begin_batch(conn: sa.Connection, batch_id: str, model: str, fingerprint: str, now: int) -> bool:
    """Changes validating to in_progress, with the counts of the inserted lines."""
    of_batch = batch_lines.c.batch_id == batch_id
    total = sa.select(sa.func.count()).where(of_batch).scalar_subquery()
    failed = sa.select(sa.func.count()).where(of_batch, batch_lines.c.state == LineState.FAILED).scalar_subquery()
    values: dict[str, Any] = {
        "status": BatchStatus.IN_PROGRESS,
        "in_progress_at": now,
        "model": model,
        "model_fingerprint": fingerprint,
        "num_total": total,
        "num_failed": failed,
    }
    return _set(conn, batch_id, _IS_VALIDATING, values)


# ---- running --------------------------------------------------------------------------------------------


def pending_lines(conn: sa.Connection, batch_id: str, chunk_no: int | None = None) -> list[PendingLine]:
    """Lines without a durable result, of the batch or of one of its chunks, in file order."""
    t = batch_lines.c
    query = sa.select(t.line_no, t.byte_offset, t.num_bytes, t.first_row, t.num_rows, t.attempts)
    query = query.where(t.batch_id == batch_id, t.state == LineState.PENDING).order_by(t.line_no)
    if chunk_no is not None:
        query = query.where(t.chunk_no == chunk_no)
    return [PendingLine(*row) for row in conn.execute(query)]


def end_lines(
    conn: sa.Connection, batch_id: str, results: Sequence[LineResult], held: sa.ColumnElement[bool] | None = None
) -> int:
    """Stores and counts results; returns how many lines ended here.

    A line that has ended keeps its first result: late or repeated results change nothing. Neither do results of lines
    for which ``held`` is false; the statement that selects the lines also checks and locks their chunk.
    """
    t = batch_lines.c
    where = [t.batch_id == batch_id, t.state == LineState.PENDING, t.line_no.in_([r.line_no for r in results])]
    pending = sa.select(t.line_no).where(*where, *([] if held is None else [held]))
    # Locked in databases with more than one writer.
    open_lines = set(conn.execute(pending.with_for_update(of=batch_lines)).scalars())
    ended: list[LineResult] = []
    for result in results:
        if result.line_no in open_lines:
            open_lines.remove(result.line_no)
            ended.append(result)
    if ended:
        conn.execute(_END_LINE, [_end_values(batch_id, result) for result in ended])
    completed = sum(result.state == LineState.COMPLETED for result in ended)
    gained = {"num_completed": completed, "num_failed": len(ended) - completed}
    for name in _TOKEN_COUNTS:
        gained[name] = sum(getattr(result.usage, name) for result in ended)
    _add_counts(conn, batch_id, gained)
    return len(ended)


def end_leased_lines(conn: sa.Connection, batch_id: str, lease: LineLease, results: Sequence[LineResult]) -> bool:
    """``end_lines`` under a lease; returns False, with nothing done, if the lease is lost."""
    # Lines end only under a valid lease; if all ended, it was valid.
    num_ended = end_lines(conn, batch_id, results, lease.condition())
    return 0 < num_ended == len(results) or lease.holds(conn)


_END_LINE = (
    batch_lines.update()
    .where(batch_lines.c.batch_id == sa.bindparam("of_batch"), batch_lines.c.line_no == sa.bindparam("of_line"))
    .values(
        {
            name: sa.bindparam(name)
            for name in (
                "state",
                "status_code",
                "request_id",
                "result",
                "checksum",
                *_TOKEN_COUNTS,
            )
        }
    )
)


def _end_values(batch_id: str, result: LineResult) -> dict[str, Any]:
    return {
        "of_batch": batch_id,
        "of_line": result.line_no,
        "state": result.state,
        "status_code": result.status_code,
        "request_id": result.request_id,
        "result": result.body,
        "checksum": result.checksum,
        **asdict(result.usage),
    }


def _add_counts(conn: sa.Connection, batch_id: str, gained: dict[str, int]) -> None:
    values = {name: batches.c[name] + count for name, count in gained.items() if count}
    if values:
        conn.execute(batches.update().where(batches.c.id == batch_id).values(**values))


def count_attempts(
    conn: sa.Connection, batch_id: str, line_nos: Sequence[int], held: sa.ColumnElement[bool] | None = None
) -> None:
    """Counts an engine death on pending lines for which ``held``, if given, is true."""
    t = batch_lines.c
    where = [t.batch_id == batch_id, t.line_no.in_(line_nos), t.state == LineState.PENDING]
    if held is not None:
        where.append(held)
    conn.execute(batch_lines.update().where(*where).values(attempts=t.attempts + 1))


# ---- ending ---------------------------------------------------------------------------------------------


_IS_OPEN = sa.and_(batches.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)), batches.c.outcome.is_(None))


def request_cancel(conn: sa.Connection, batch_id: str, now: int) -> bool:
    """Changes validating or in_progress to cancelling; False if another end was decided or the batch has ended."""
    values = {"status": BatchStatus.CANCELLING, "outcome": BatchStatus.CANCELLED, "cancelling_at": now}
    values |= file_rows.result_names()
    return _set(conn, batch_id, _IS_OPEN, values)


def _overdue(now: int) -> sa.ColumnElement[bool]:
    return sa.and_(_IS_OPEN, batches.c.expires_at <= now)


def overdue(conn: sa.Connection, now: int) -> bool:
    """Whether ``expire_overdue`` would find a batch; this costs less than a write."""
    return bool(conn.execute(sa.select(sa.exists().where(_overdue(now)))).scalar_one())


def expire_overdue(conn: sa.Connection, now: int) -> list[str]:
    """Decides that overdue batches end as expired; returns those decided now.

    Their status changes once the files are written. The decision holds even if the clock steps back.
    """
    ids = list(conn.execute(sa.select(batches.c.id).where(_overdue(now))).scalars())
    for batch_id in ids:
        values = {"outcome": BatchStatus.EXPIRED, **file_rows.result_names()}
        conn.execute(batches.update().where(batches.c.id == batch_id).values(**values))
    return ids


def begin_finalizing(conn: sa.Connection, batch_id: str, now: int) -> bool:
    """Changes in_progress to finalizing if every line has ended."""
    pending = sa.exists().where(batch_lines.c.batch_id == batch_id, batch_lines.c.state == LineState.PENDING)
    values = {"status": BatchStatus.FINALIZING, "outcome": BatchStatus.COMPLETED, "finalizing_at": now}
    values |= file_rows.result_names()
    may = sa.and_(batches.c.status == BatchStatus.IN_PROGRESS, batches.c.outcome.is_(None), ~pending)
    return _set(conn, batch_id, may, values)


def close_lines(conn: sa.Connection, batch_id: str, state: LineState, error: str) -> int:
    """Ends every pending line with an error. Later results are refused, and leases are void.

    Cancelled and expired lines have not run. So they count neither as completed nor as failed, as in OpenAI's API.
    """
    withdraw_chunks(conn, batch_id)
    t = batch_lines.c
    update = batch_lines.update().where(t.batch_id == batch_id, t.state == LineState.PENDING)
    closed = conn.execute(update.values(state=state, error=error)).rowcount
    if closed:
        file_rows.name_results(conn, batch_id)
    if state == LineState.FAILED:
        _add_counts(conn, batch_id, {"num_failed": closed})
    return closed


def withdraw_chunks(conn: sa.Connection, batch_id: str) -> None:
    """Voids all leases of a batch that is cancelled or over."""
    conn.execute(batch_chunks.delete().where(batch_chunks.c.batch_id == batch_id))


def ended_lines(conn: sa.Connection, batch_id: str, after_line: int, limit: int) -> list[EndedLine]:
    """A page of lines in file order."""
    t = batch_lines.c
    query = sa.select(t.line_no, t.custom_id, t.state, t.status_code, t.request_id, t.result, t.error, t.checksum)
    query = query.where(t.batch_id == batch_id, t.line_no > after_line).order_by(t.line_no).limit(limit)
    return [EndedLine(row[0], row[1], LineState(row[2]), *row[3:]) for row in conn.execute(query)]


def fail_damaged_lines(conn: sa.Connection, batch_id: str, line_nos: Sequence[int], error: str) -> None:
    """Removes damaged results; their lines fail."""
    t = batch_lines.c
    for line_no in line_nos:
        where = (t.batch_id == batch_id, t.line_no == line_no)
        state = conn.execute(sa.select(t.state).where(*where)).scalar_one()
        values = {"state": LineState.FAILED, "status_code": None, "request_id": None, "result": None, "checksum": None}
        conn.execute(batch_lines.update().where(*where).values(**values, error=error))
        if state == LineState.COMPLETED:
            _add_counts(conn, batch_id, {"num_completed": -1, "num_failed": 1})


def finish_batch(
    conn: sa.Connection, batch_id: str, output: FileRecord | None, error: FileRecord | None, now: int
) -> bool:
    """Sets the decided outcome as status and makes the files visible, in one transaction."""
    record = require_batch(conn, batch_id)
    if record.is_terminal or record.outcome is None:
        return False
    file_rows.insert_output_files(conn, [record for record in (output, error) if record is not None])
    values: dict[str, Any] = {
        "status": record.outcome,
        _ENDED_AT[record.outcome]: now,
        "output_file_id": output and output.id,
        "error_file_id": error and error.id,
        "plan_blob": None,
    }
    withdraw_chunks(conn, batch_id)
    conn.execute(batches.update().where(batches.c.id == batch_id).values(**values))
    return True
