"""What leases cost where the lines themselves cost nothing: processor time of our code and of the database.

One server's part of a batch without its engine: chunks are leased as it leases them, their lines read, results
written under the lease, leases renewed, chunks completed; and once more the results alone, as a server writes them that
has the database for itself. Processor time is nearly the same on a busy machine as on a still one.

    createdb neaptide-bench
    python -m lab.benchmarks.claim_cost --store postgresql://neaptide@/neaptide-bench?host=/run/postgresql

``--store``, on this machine, must be allowed to create databases. Prints a table, milliseconds of 1,000 lines, then one
JSON line.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.common import print_table
from lab.benchmarks.shared_batches import new_database, own_s, postmaster_of, tree
from neaptide.cluster.batches import chunk_rows
from neaptide.cluster.batches.chunk_rows import LeasedLines, LeasingServer
from neaptide.cluster.batches.leased_chunks import RENEWALS_A_LEASE
from neaptide.cluster.lease_order import LEASE_S, ChunkKey, ChunkLease, LeaseChunk, Side, chunk_sizes
from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine, PendingLine
from neaptide.server.batches.storing.store import Store

T = TypeVar("T")
BATCH = NewBatch("batch_1", "", "", "/v1/completions", "file-1", "24h", None, None, 100, 10_000_000_000)
SERVER = LeasingServer("one", "fingerprint", int(LEASE_S * 1000))
BODY = json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [{"text": "x" * 300}]})
RESULTS, OTHERS = "results", ("lease", "take up", "complete", "renew")


class Meter:
    """Processor time by what it was for."""

    def __init__(self, database: psutil.Process) -> None:
        self._database = database
        self.ours_s: dict[str, float] = defaultdict(float)
        self.database_s: dict[str, float] = defaultdict(float)

    async def of(self, kind: str, work: Awaitable[T]) -> T:
        database_s = self._database_now_s()
        ours_s = time.process_time()
        found = await work
        self.ours_s[kind] += time.process_time() - ours_s
        self.database_s[kind] += self._database_now_s() - database_s
        return found

    def _database_now_s(self) -> float:
        return sum(map(own_s, tree(self._database)))


def offer(store: Store, num_lines: int, leased: bool) -> None:
    """A running batch; ``leased``: in chunks."""
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    lines = [NewLine(n + 1, f"c{n}", 200 * n, 200, n, 1) for n in range(num_lines)]
    store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
    store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", SERVER.fingerprint, 101)
    if leased:
        chunks, first = {}, 1
        for number, size in enumerate(chunk_sizes(num_lines)):
            chunk = LeaseChunk(ChunkKey(BATCH.id, number), BATCH.expires_at, float(number), size)
            chunks[chunk] = list(range(first, first + size))
            first += size
        store.write_blocking(chunk_rows.add_chunks, chunks)


def results_of(lines: Sequence[PendingLine]) -> list[LineResult]:
    return [LineResult(line.line_no, LineState.COMPLETED, 200, "req", BODY) for line in lines]


def in_groups(lines: Sequence[T], size: int) -> list[Sequence[T]]:
    return [lines[k : k + size] for k in range(0, len(lines), size)]


async def run_alone(store: Store, meter: Meter, group_lines: int) -> None:
    for lines in in_groups(await store.read(batch_rows.pending_lines, BATCH.id), group_lines):
        end = partial(batch_rows.end_lines, batch_id=BATCH.id, results=results_of(lines))
        await meter.of(RESULTS, store.write_grouped(end, chunk_rows.MAX_CHUNK_LINES))


async def run_leased(store: Store, meter: Meter, group_lines: int, lines_per_s: float) -> None:
    done, num_renewals = 0, 0
    while leases := await meter.of("lease", lease_some(store)):
        for lease in leases:
            lines = await meter.of("take up", take_up(store, lease))
            for group in in_groups(lines, group_lines):
                end = partial(
                    batch_rows.end_leased_lines,
                    batch_id=lease.key.batch_id,
                    lease=LeasedLines(lease),
                    results=results_of(group),
                )
                if not await meter.of(RESULTS, store.write_grouped(end, chunk_rows.MAX_CHUNK_LINES)):
                    raise SystemExit("a lease did not hold")
            await meter.of("complete", store.write_beside(complete, lease))
            done += len(lines)
            if done / lines_per_s > num_renewals * LEASE_S / RENEWALS_A_LEASE:
                num_renewals += 1
                await meter.of("renew", store.write_beside(renew, leases))


async def lease_some(store: Store) -> list[ChunkLease]:
    figures = await store.read(chunk_rows.free_chunks, SERVER)
    if not figures.num_free:
        return []
    return await store.write_beside(lease, figures.chunks_to_lease)


async def take_up(store: Store, taken: ChunkLease) -> list[PendingLine]:
    await store.read(batch_rows.require_batch, taken.key.batch_id)
    return await store.read(batch_rows.pending_lines, taken.key.batch_id, taken.key.chunk_no)


def lease(conn: Any, limit: int) -> list[ChunkLease]:
    return chunk_rows.lease_chunks(conn, Side.COMPUTE_BOUND, database_now_ms(conn), limit, SERVER)


def renew(conn: Any, leases: list[ChunkLease]) -> set[ChunkLease]:
    return chunk_rows.renew_leases(conn, leases, database_now_ms(conn), SERVER.lease_ms)


def complete(conn: Any, done: ChunkLease) -> bool:
    chunk_rows.complete_chunk(conn, done)
    return chunk_rows.num_chunks(conn, done.key.batch_id) == 0


def measure(args: argparse.Namespace, num_lines: int, leased: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of 1,000 lines, by what they were for."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), sharing_of(new_database(args.store, "neaptide_lease_cost")))
        store.open()
        try:
            offer(store, num_lines, leased)
            meter = Meter(postmaster_of(args.store))
            work = (
                run_leased(store, meter, args.group_lines, args.lines_per_s)
                if leased
                else run_alone(store, meter, args.group_lines)
            )
            asyncio.run(work)
            if store.read_blocking(batch_rows.pending_lines, BATCH.id):
                raise SystemExit("lines are left")
        finally:
            store.close()
    per_1000 = 1e6 / num_lines
    return {
        kind: {"ours_ms": meter.ours_s[kind] * per_1000, "database_ms": meter.database_s[kind] * per_1000}
        for kind in ((RESULTS, *OTHERS) if leased else (RESULTS,))
    }


def result(alone: dict[str, dict[str, float]], leased: dict[str, dict[str, float]]) -> dict[str, float]:
    """What leases take of 1,000 lines: all that is not there without them."""
    found = {
        side: sum(one[side] for one in leased.values()) - alone[RESULTS][side] for side in ("ours_ms", "database_ms")
    }
    return {side: round(value, 1) for side, value in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.claim_cost", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="a PostgreSQL database")
    parser.add_argument("--lines", type=int, nargs="+", default=[5_000, 50_000])
    parser.add_argument("--group-lines", type=int, default=16, help="results that a step brings of one chunk")
    parser.add_argument("--lines-per-s", type=float, default=50.0, help="of a server: how often leases are renewed")
    args = parser.parse_args(argv)
    said: dict[str, Any] = {}
    for num_lines in args.lines:
        alone, leased = (measure(args, num_lines, leased) for leased in (False, True))
        rows = [("results, without leases", alone[RESULTS]), *leased.items()]
        table = [(kind, *(f"{value:.1f}" for value in one.values())) for kind, one in rows]
        print_table(f"{num_lines} lines: processor ms of 1,000", ["what", "our code", "database"], table)
        said[str(num_lines)] = {"leases": result(alone, leased), "alone": alone, "leased": leased}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
