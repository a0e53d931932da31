"""Stored costs of batches and keys, and receipts. Each operation runs within one transaction.

A start of a server writes its own sums whole. So a write may be repeated, and no start changes what an earlier one has
stored. A batch's receipt is written by the transaction that ends the batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from neaptide.server.batches.receipts.receipt import receipt_of
from neaptide.server.batches.receipts.sums import BatchSums, sums_decoder, total
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.tables import batch_costs, batch_receipts, batches, key_costs

KEPT_DAYS = 400
"""Days whose costs are kept: a year and the month in which it is paid."""


class CostOf(NamedTuple):
    """Day, key and kind of work for which device time is counted."""

    day: int
    """Days since 1970, in UTC."""
    key: str
    work: str


class KeyCost(NamedTuple):
    """Device time and computed tokens."""

    device_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class DayCost(NamedTuple):
    """Costs of one key, day and kind of work."""

    of: CostOf
    cost: KeyCost


def store_costs(
    conn: sa.Connection, run: str, of_batches: Mapping[str, str], of_keys: Mapping[CostOf, KeyCost]
) -> None:
    """Replaces this start's sums of these batches (encoded) and keys. Batches that have ended are left out."""
    t = batches.c
    query = sa.select(t.id).where(t.id.in_(of_batches), ~sa.exists().where(batch_receipts.c.batch_id == t.id))
    for batch_id in conn.execute(query).scalars().all() if of_batches else ():
        _put(conn, batch_costs, {"batch_id": batch_id, "server_run": run}, {"sums": of_batches[batch_id]})
    for of, cost in of_keys.items():
        _put(conn, key_costs, {"server_run": run, **of._asdict()}, cost._asdict())


def forget_costs(conn: sa.Connection, today: int) -> None:
    """Deletes costs of days that are no longer kept."""
    conn.execute(key_costs.delete().where(key_costs.c.day < today - KEPT_DAYS))


def _put(conn: sa.Connection, table: sa.Table, key: dict[str, Any], values: dict[str, Any]) -> None:
    insert = _insert(conn, table).values(**key, **values)
    conn.execute(insert.on_conflict_do_update(index_elements=list(key), set_=values))


def _insert(conn: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if conn.dialect.name == "sqlite" else postgresql.insert(table)


def finish_batch(
    conn: sa.Connection,
    batch_id: str,
    output: FileRecord | None,
    error: FileRecord | None,
    now: int,
    run: str,
    sums: BatchSums,
) -> bool:
    """``batch_rows.finish_batch`` with the receipt.

    Args:
        run: this start of the server.
        sums: what the batch has cost in it.
    """
    is_ended = batch_rows.finish_batch(conn, batch_id, output, error, now)
    if is_ended:
        t = batch_costs.c
        earlier = sa.select(t.sums).where(t.batch_id == batch_id, t.server_run != run)
        parts = [sums_decoder.decode(text) for text in conn.execute(earlier).scalars()]
        receipt = receipt_of(batch_rows.require_batch(conn, batch_id), total([*parts, sums]))
        text = msgspec.json.encode(receipt).decode()
        insert = _insert(conn, batch_receipts).values(batch_id=batch_id, receipt=text)
        conn.execute(insert.on_conflict_do_nothing())  # the first one stands, and no batch waits for a second
        conn.execute(batch_costs.delete().where(t.batch_id == batch_id))
    return is_ended


def stored_receipt(conn: sa.Connection, batch_id: str) -> str | None:
    """A batch's receipt as JSON; None if it has none."""
    query = sa.select(batch_receipts.c.receipt).where(batch_receipts.c.batch_id == batch_id)
    return conn.execute(query).scalar_one_or_none()


def costs_by_day(conn: sa.Connection, since_day: int) -> Sequence[DayCost]:
    """Costs of all servers by day, key and kind of work, in this order."""
    t = key_costs.c
    named = (t.day, t.key, t.work)
    counted = (sa.func.sum(column) for column in (t.device_s, t.prefill_tokens, t.decode_tokens))
    query = sa.select(*named, *counted).where(t.day >= since_day).group_by(*named).order_by(*named)
    return [
        DayCost(CostOf(day, key, work), KeyCost(float(device_s), int(prefill), int(decode)))
        for day, key, work, device_s, prefill, decode in conn.execute(query)
    ]
