"""Repair by ``neaptide data check --repair``: restores what can be restored, and drops the rest.

 a result file    is written again from the records of its lines, if the bytes are the same
 any other file   is dropped: its record is deleted, and live batches that need it end, their open lines as failed

Wrong bytes are moved aside. A file that cannot be read at the moment may return, and stays. Blocking.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from neaptide.engine.private_files import private_opener
from neaptide.server.batches.checking.validate import LineFault
from neaptide.server.batches.running import finalize
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.data_dir import sync_directory
from neaptide.server.batches.storing.leftovers import move_aside, place_aside
from neaptide.server.batches.storing.models import BatchStatus, FileRecord, LineState
from neaptide.server.batches.storing.offline import FileFault, fault_of
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import batches

LOST = LineFault("input_file_lost", "The input file was lost on the server's disk.", "file_id")


def repair(store: Store) -> Iterator[str]:
    """Repairs file by file; yields a line about each repair or drop."""
    now_s = time.time()
    for record in store.read_blocking(file_rows.all_files):
        fault = fault_of(store, record)
        if fault is not None and fault.is_final:
            yield from _mend(store, record, fault, now_s)


def _mend(store: Store, record: FileRecord, fault: FileFault, now_s: float) -> Iterator[str]:
    again = store.files_dir / f"{record.id}.tmp"
    try:
        is_made_again = _make_again(store, record, again)
        if not fault.is_missing:
            yield f"{fault.name}: its wrong bytes were moved to {_set_aside(store, record, now_s)}"
        if is_made_again:
            _put(store, record, again)
            yield f"{fault.name}: written again from the results of its batch"
            return
    finally:
        again.unlink(missing_ok=True)
    yield f"{fault.name}: dropped ({fault.text})"
    for batch_id in store.write_blocking(drop_file, record, int(now_s)):
        yield f"{batch_id}: its input was dropped; its open lines have failed"


def _make_again(store: Store, record: FileRecord, target: Path) -> bool:
    """Whether the file's original bytes could be written to ``target``."""
    made_of = store.read_blocking(_made_of, record.id)
    if made_of is None:
        return False
    batch_id, is_output = made_of
    digest = hashlib.sha256()
    with open(target, "wb", opener=private_opener) as f:
        for line in finalize.lines_of(store, batch_id):
            if (line.state is LineState.COMPLETED) == is_output:
                text = finalize.output_line(batch_id, line)
                digest.update(text)
                f.write(text)
        f.flush()
        os.fsync(f.fileno())
    return digest.hexdigest() == record.sha256


def _set_aside(store: Store, record: FileRecord, now_s: float) -> str:
    """Moves wrong bytes aside; returns their new place."""
    aside = place_aside(store, now_s)
    if store.blobs is not None and record.blob is not None:
        store.blobs.set_aside(record.blob, aside.name)
        return f"{aside.parent.name}/{aside.name}/{record.blob}"
    return str(move_aside(store.files_dir, [store.files_dir / record.id], aside / store.files_dir.name))


def _made_of(conn: sa.Connection, file_id: str) -> tuple[str, bool] | None:
    """The batch that has the file as a result, and whether as its output."""
    columns = (batches.c.id, batches.c.output_file_id)
    query = sa.select(*columns).where(sa.or_(batches.c.output_file_id == file_id, batches.c.error_file_id == file_id))
    row = conn.execute(query).one_or_none()
    return None if row is None else (row.id, row.output_file_id == file_id)


def _put(store: Store, record: FileRecord, again: Path) -> None:
    if store.blobs is not None and record.blob is not None:
        store.blobs.put(again, record.blob)
    else:
        again.rename(store.files_dir / record.id)
        sync_directory(store.files_dir)


def drop_file(conn: sa.Connection, record: FileRecord, now: int) -> list[str]:
    """Deletes the record of a lost file and ends the live batches that need it; returns their ids."""
    ended = [batch for batch in batch_rows.live_batches(conn) if batch.input_file_id == record.id and not batch.outcome]
    for batch in ended:
        if batch.status is BatchStatus.VALIDATING:
            batch_rows.fail_batch(conn, batch.id, [LOST.entry(None)], max(now, batch.created_at))
        else:
            batch_rows.close_lines(conn, batch.id, LineState.FAILED, finalize.LOST_ERROR)
    file_rows.forget_lost_file(conn, record.id, now)
    return [batch.id for batch in ended]
