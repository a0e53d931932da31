"""Removal of old records: results of deleted files, and batches that ended long ago.

Like those of ``batch_rows``, each operation runs within one transaction.
"""

import sqlalchemy as sa

from neaptide.server.batches.storing.models import TERMINAL, LineState
from neaptide.server.batches.storing.tables import batch_lines, batches, files


def drop_results(conn: sa.Connection, file_id: str, limit: int) -> int:
    """Deletes up to ``limit`` of the lines that a result file was made of; returns their number."""
    t = batch_lines.c
    dropped = 0
    for column, in_file in (
        (batches.c.output_file_id, t.state == LineState.COMPLETED),
        (batches.c.error_file_id, t.state != LineState.COMPLETED),
    ):
        for batch_id in conn.execute(sa.select(batches.c.id).where(column == file_id)).scalars().all():
            lines = sa.select(t.line_no).where(t.batch_id == batch_id, in_file).limit(limit)
            gone = batch_lines.delete().where(t.batch_id == batch_id, t.line_no.in_(lines))
            dropped += conn.execute(gone).rowcount
    return dropped


def forget_batches(conn: sa.Connection, ended_before: int) -> None:
    """Deletes batches, with their lines, that ended before ``ended_before`` and whose result files are deleted."""
    ended_at = sa.func.coalesce(*(batches.c[f"{status}_at"] for status in TERMINAL))
    has_files = sa.exists().where(files.c.id.in_((batches.c.output_file_id, batches.c.error_file_id)))
    conn.execute(batches.delete().where(batches.c.status.in_(TERMINAL), ended_at < ended_before, ~has_files))
