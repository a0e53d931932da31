"""Interface to servers that share batches: protocols of the batch service, which the cluster implements.

A single server on the SQLite database of its data directory has no ``BatchSharing``. It uses
``running/state_machine.py`` and ``SoleLease``, and does not import the cluster.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.storing.databases.protocol import Database
from neaptide.server.batches.storing.models import BatchRecord, FileRecord

if TYPE_CHECKING:
    from neaptide.server.batches.wiring import BatchContext

P = ParamSpec("P")
T = TypeVar("T")
ResultFiles = tuple[FileRecord | None, FileRecord | None]
"""Output and error file."""


class LeaseLostError(Exception):
    """Another server has leased the batch; the write is undone."""


# ---- storage ---------------------------------------------------------------------------------------------


class BlobInfo(NamedTuple):
    """A blob in a listing of the shared storage."""

    key: str
    num_bytes: int
    written_s: float
    """Unix seconds, by the storage's clock."""


class BlobStorage(Protocol):
    """Storage of file bytes that several servers can reach. Blocking; thread-safe. Faults are OSErrors."""

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call of this storage in a thread of its own pool."""
        ...

    def upload_key(self, file_id: str) -> str:
        """Key of a client's file."""
        ...

    def mark(self) -> str | None:
        """The storage's name, or None before it has one."""
        ...

    def find(self) -> Iterator[BlobInfo]:
        """Lists all blobs."""
        ...

    def put(self, source: Path, key: str) -> None:
        """Stores a file; returns when its bytes are durable."""
        ...

    def fetch(self, key: str, target: Path, scratch: Path) -> None:
        """Copies a blob to ``target``, through a file in ``scratch`` on the same disk.

        Raises:
            FileNotFoundError: the storage has no such blob.
        """
        ...

    def remove(self, key: str) -> None:
        """Removes a blob, if there is one."""
        ...

    def set_aside(self, key: str, folder: str) -> None:
        """Renames a blob to a key that no record has."""
        ...


# ---- batches ---------------------------------------------------------------------------------------------


class LineLease(Protocol):
    """Right to end some lines of a batch, until another server leases them."""

    @property
    def job_id(self) -> str:
        """Name of these lines in this server and in its engine."""
        ...

    def condition(self) -> sa.ColumnElement[bool]:
        """Condition on ``batch_lines`` that the lease holds. It locks the lease until the end of the transaction."""
        ...

    def holds(self, conn: sa.Connection) -> bool:
        """Whether results under the lease are accepted."""
        ...


class BatchLease(Protocol):
    """Right to change one batch: unlimited on a single server, a lease where several share a database."""

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        """The operation, restricted to holders of the right."""
        ...

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        """Changes the status from validating to in_progress and seals the plan at ``stem``. False if another change
        came first.

        Raises:
            PlanLostError: the plan has vanished.
        """
        ...

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        """Makes files of this server's directory available to all; returns their records."""
        ...

    async def tidy(self, record: BatchRecord) -> None:
        """Removes data that only a running batch needs; ``record`` is the one before its end."""
        ...


class JobLeft(NamedTuple):
    """Remaining work of one batch in progress."""

    expires_at_s: int
    work_s: float
    """Least time that an idle device takes for its chunks; unfinished chunks count in full."""


class LeaseFigures(Protocol):
    """Counts of this server's leases, for metrics."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks that this server has leased."""
        ...

    @property
    def num_lost(self) -> int:
        """Number of leases lost to other servers."""
        ...


class BatchStateMachine(Protocol):
    """State machine that moves batches to their ends. Event loop only."""

    @property
    def leases(self) -> LeaseFigures | None:
        """Lease counts; None on a single server."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Whether a step of some batch is retried because the disk refused it."""
        ...

    async def start(self) -> None:
        """Resumes every batch that has not ended."""
        ...

    async def stop(self) -> None:
        """Stores the results so far. The next start or other servers do the rest."""
        ...

    def begin(self, record: BatchRecord) -> None:
        """Starts a new batch whose record is durable."""
        ...

    def end(self, batch_id: str) -> None:
        """Carries out a durable decision (cancel, expiry) on a batch in any status before its end."""
        ...

    def suspend(self) -> None:
        """Stops batch work on the engine."""
        ...

    async def expire_overdue(self) -> None:
        """Ends batches whose completion window is over."""
        ...

    async def backlog(self) -> list[JobLeft]:
        """Remaining work of all servers of this model. Raises StoreUnavailableError."""
        ...


# ---- both -----------------------------------------------------------------------------------------------


class BatchSharing(Protocol):
    """Storage outside the data directory, and the state machine for several servers that use it."""

    @property
    def blobs(self) -> BlobStorage | None:
        """Storage of file bytes; None if one server has the database to itself."""
        ...

    def database(self, limit_s: float) -> Database | None:
        """The database; None for SQLite in the data directory. Each query takes at most ``limit_s``."""
        ...

    def settle(self, conn: sa.Connection) -> None:
        """Checks in a transaction of the start that the database and the blobs belong together.

        Raises:
            StoreError: they do not.
        """
        ...

    def machine(self, context: "BatchContext") -> BatchStateMachine | None:
        """State machine of shared batches; None if one server has the database to itself."""
        ...
