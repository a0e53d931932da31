"""Metrics of batches, read from the database at a scrape.

The records outlive the process, so these counters do not start at zero. Until the database has answered once, the
series have no samples: a counter that jumps from 0 to its old value would look like growth. The query runs in a
reader's thread, at most every ``REFRESH_S``. Between two queries, or while the database does not answer, a scrape shows
the last result.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from neaptide.engine.messages import DeadlineStatus
from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.sharing import LeaseFigures
from neaptide.server.batches.storing import server_rows
from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.models import LIVE, TERMINAL, BatchStatus
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.batches.storing.tables import batch_chunks, batches, files

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
READ_TIMEOUT_S = 2.0
JOB_BUCKETS_S = (10, 60, 300, 900, 3_600, 4 * 3_600, 12 * 3_600, 86_400)
_ENDED_AT = sa.func.coalesce(batches.c.completed_at, batches.c.failed_at, batches.c.expired_at, batches.c.cancelled_at)


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Times from creation to end of the batches with one status."""

    within: tuple[int, ...] = (0,) * len(JOB_BUCKETS_S)
    """Number of batches up to each bucket's limit."""
    count: int = 0
    total_s: int = 0


@dataclass(frozen=True, slots=True)
class Overview:
    """Totals over all batches and files. Times are unix seconds."""

    num_batches: dict[BatchStatus, int] = field(default_factory=dict)
    job_times: dict[BatchStatus, JobTimes] = field(default_factory=dict)
    completed_requests: int = 0
    failed_requests: int = 0
    pending_requests: int = 0
    first_created_at: int | None = None
    """Creation time of the oldest live batch."""
    first_expires_at: int | None = None
    files_bytes: int = 0
    free_chunks: int = 0
    leased_chunks: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    """Number of live batches that no present server can begin or complete, by what is missing."""


def read_overview(conn: sa.Connection) -> Overview:
    """Reads the totals. Scans the batches, the live batches, the files and the chunks, but no lines."""
    t = batches.c
    took_s = _ENDED_AT - t.created_at
    within = [sa.func.sum(sa.case((took_s <= bucket, 1), else_=0)) for bucket in JOB_BUCKETS_S]
    sums = [sa.func.sum(column) for column in (t.num_completed, t.num_failed, sa.func.coalesce(took_s, 0))]
    by_status = {
        BatchStatus(row[0]): [int(value) for value in row[1:]]
        for row in conn.execute(sa.select(t.status, sa.func.count(), *sums, *within).group_by(t.status))
    }
    # No further line runs once a batch's end is decided.
    left = sa.case((t.outcome.is_(None), t.num_total - t.num_completed - t.num_failed), else_=0)
    pending = sa.func.coalesce(sa.func.sum(left), 0)
    is_free = batch_chunks.c.leased_until_ms <= database_now_ms(conn)
    free_chunks, num_chunks = conn.execute(
        sa.select(sa.func.coalesce(sa.func.sum(sa.case((is_free, 1), else_=0)), 0), sa.func.count()).select_from(
            batch_chunks
        )
    ).one()
    live = sa.select(pending, sa.func.min(t.created_at), sa.func.min(t.expires_at)).where(t.status.in_(LIVE))
    pending_requests, first_created_at, first_expires_at = conn.execute(live).one()
    return Overview(
        num_batches={status: values[0] for status, values in by_status.items()},
        job_times={
            status: JobTimes(tuple(values[4:]), values[0], values[3])
            for status, values in by_status.items()
            if status in TERMINAL
        },
        completed_requests=sum(values[1] for values in by_status.values()),
        failed_requests=sum(values[2] for values in by_status.values()),
        pending_requests=pending_requests,
        first_created_at=first_created_at,
        first_expires_at=first_expires_at,
        free_chunks=free_chunks,
        leased_chunks=num_chunks - free_chunks,
        waiting=Counter(one.reason for one in server_rows.waiting(conn)),
        files_bytes=int(conn.execute(sa.select(sa.func.coalesce(sa.func.sum(files.c.num_bytes), 0))).scalar_one()),
    )


class BatchMetrics(Collector):
    """Collects the series. Call ``refresh`` before a scrape. ``wall`` gives unix seconds. Deadline status and this
    server's leases are current, not read from the database."""

    def __init__(
        self,
        registry: CollectorRegistry,
        store: Store,
        wall: Callable[[], float],
        outlooks: BatchStatuses,
        leases: LeaseFigures | None = None,
    ) -> None:
        self._store = store
        self._leases = leases
        self._outlooks = outlooks
        self._wall = wall
        self._overview: Overview | None = None
        """None until the database has been read."""
        self._read_s: float | None = None
        registry.register(self)

    @property
    def overview(self) -> Overview:
        """The last totals; zeros before the database has answered."""
        return self._overview or Overview()

    async def refresh(self) -> None:
        """Reads the database unless it was read a moment ago. Never raises database errors."""
        now_s = asyncio.get_running_loop().time()
        if self._read_s is not None and now_s - self._read_s < REFRESH_S:
            return
        self._read_s = now_s
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                self._overview = await self._store.read(read_overview)
        except (OSError, TimeoutError, StoreUnavailableError, sa.exc.SQLAlchemyError) as error:
            logger.warning("the batch metrics could not be refreshed: %s", type(error).__name__)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_database()
        outlooks = GaugeMetricFamily(
            "neaptide_batches_by_outlook",
            "Number of batches in progress by deadline status.",
            labels=["outlook"],
        )
        for outlook in DeadlineStatus:
            outlooks.add_metric([outlook], self._outlooks.count(outlook))
        yield outlooks
        leases = self._leases
        yield GaugeMetricFamily(
            "neaptide_batch_chunks_held",
            "Number of chunks that this server has leased.",
            0 if leases is None else leases.num_chunks,
        )
        yield CounterMetricFamily(
            "neaptide_batch_claims_lost",
            "Number of this server's leases that other servers have taken over.",
            0 if leases is None else leases.num_lost,
        )

    def _of_the_database(self) -> Iterator[Metric]:
        statuses = GaugeMetricFamily("neaptide_batches", "Number of batches in each status.", labels=["status"])
        pending = GaugeMetricFamily(
            "neaptide_batch_requests_pending", "Number of lines of live batches that can still run."
        )
        requests = CounterMetricFamily(
            "neaptide_batch_requests", "Number of batch lines that have ended.", labels=["outcome"]
        )
        times = HistogramMetricFamily(
            "neaptide_batch_job_seconds", "Time from the creation of a batch to its end.", labels=["status"]
        )
        slack = GaugeMetricFamily("neaptide_batch_deadline_slack_seconds", "Time until the first live batch expires.")
        age = GaugeMetricFamily("neaptide_batch_oldest_age_seconds", "Time since the oldest live batch was created.")
        chunks = GaugeMetricFamily(
            "neaptide_batch_chunks",
            "Number of unfinished chunks of shared batches: free, or claimed (leased).",
            labels=["state"],
        )
        waiting = GaugeMetricFamily(
            "neaptide_batches_waiting",
            "Number of live batches for which no present server has the model, or the context.",
            labels=["reason"],
        )
        size = GaugeMetricFamily("neaptide_files_bytes", "Size of all files together.")
        if (found := self._overview) is not None:
            for status in BatchStatus:
                statuses.add_metric([status], found.num_batches.get(status, 0))
            pending.add_metric([], found.pending_requests)
            requests.add_metric(["completed"], found.completed_requests)
            requests.add_metric(["failed"], found.failed_requests)
            _add_job_times(times, found)
            if found.first_expires_at is not None:
                slack.add_metric([], found.first_expires_at - self._wall())
            age_s = 0.0 if found.first_created_at is None else max(0.0, self._wall() - found.first_created_at)
            age.add_metric([], age_s)
            chunks.add_metric(["free"], found.free_chunks)
            chunks.add_metric(["claimed"], found.leased_chunks)
            for reason in ("model", "context"):
                waiting.add_metric([reason], found.waiting.get(reason, 0))
            size.add_metric([], found.files_bytes)
        yield from (statuses, pending, requests, times, slack, age, chunks, waiting, size)


def _add_job_times(family: HistogramMetricFamily, found: Overview) -> None:
    for status in TERMINAL:
        times = found.job_times.get(status, JobTimes())
        buckets = [(str(float(le)), float(count)) for le, count in zip(JOB_BUCKETS_S, times.within, strict=True)]
        family.add_metric([status], [*buckets, ("+Inf", float(times.count))], times.total_s)
