"""The seam for servers that share their batches: the batch service owns these protocols, the cluster implements them.

A single server on the SQLite database of its data directory has no ``Sharing``. It uses ``running/machine.py`` and
``SoleHold``, and imports nothing of the cluster.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.storing.databases.protocol import Database
from neaptide.server.batches.storing.models import BatchRecord, FileRecord

if TYPE_CHECKING:
    from neaptide.server.batches.wiring import BatchPlane

P = ParamSpec("P")
T = TypeVar("T")
ResultFiles = tuple[FileRecord | None, FileRecord | None]
"""Output and error file."""


class LeaseLostError(Exception):
    """Another server has taken the batch over; what was to be written is undone."""


# ---- storage ---------------------------------------------------------------------------------------------


class BlobInfo(NamedTuple):
    """A blob as a listing of the shared storage names it."""

    key: str
    num_bytes: int
    written_s: float
    """Unix seconds, by the storage's clock."""


class BlobStorage(Protocol):
    """Bytes of files on storage that several servers reach. Blocking; safe in any thread. Faults are OSErrors."""

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call of this storage in a thread that nothing else needs."""
        ...

    def upload_key(self, file_id: str) -> str:
        """The key of a client's file."""
        ...

    def mark(self) -> str | None:
        """The storage's name; None where it has none yet."""
        ...

    def find(self) -> Iterator[BlobInfo]:
        """Every blob."""
        ...

    def put(self, source: Path, key: str) -> None:
        """Returns when the bytes are durable."""
        ...

    def fetch(self, key: str, target: Path, scratch: Path) -> None:
        """Copies a blob to ``target``, through a file in ``scratch`` on the same disk.

        Raises:
            FileNotFoundError: the storage has no such blob.
        """
        ...

    def remove(self, key: str) -> None:
        """No error if there is none."""
        ...

    def set_aside(self, key: str, folder: str) -> None:
        """Gives a blob a key that no row names."""
        ...


# ---- batches ---------------------------------------------------------------------------------------------


class LineLease(Protocol):
    """The right to end some lines of a batch, until another server leases them."""

    @property
    def job_id(self) -> str:
        """The name of these lines, in this server and in its engine."""
        ...

    def condition(self) -> sa.ColumnElement[bool]:
        """Whether the lease holds, for a statement on ``batch_lines``: locks the lease until the transaction ends."""
        ...

    def holds(self, conn: sa.Connection) -> bool:
        """Whether results under the lease are taken."""
        ...


class Hold(Protocol):
    """What lets a server move one batch on: nothing for a single server, a lease where several share a database."""

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        """The operation, as it may be run on the batch's rows."""
        ...

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        """validating -> in_progress; its plan is sealed at ``stem``. False when something else came first.

        Raises:
            PlanLostError: the plan has vanished since.
        """
        ...

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        """The files, written in this server's directory, as rows may name them."""
        ...

    async def tidy(self, record: BatchRecord) -> None:
        """Removes what only a running batch needs; ``record`` is of before its end."""
        ...


class JobLeft(NamedTuple):
    """The work that is left of one batch in progress."""

    expires_at_s: int
    work_s: float
    """Lower bound on the time of an idle device for the batch's chunks; a chunk that is partly done counts in full."""


class LeaseFigures(Protocol):
    """Counts of this server's leases, for metrics."""

    @property
    def num_chunks(self) -> int:
        """Chunks that this server has on lease now."""
        ...

    @property
    def num_lost(self) -> int:
        """Leases that other servers have taken over."""
        ...


class BatchMachine(Protocol):
    """The state machine that moves batches on. Event loop only."""

    @property
    def leases(self) -> LeaseFigures | None:
        """None for a single server."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Whether a step of some batch is being repeated because the disk refused it."""
        ...

    async def start(self) -> None:
        """Takes up every batch that has not ended."""
        ...

    async def stop(self) -> None:
        """Keeps what has been computed and leaves the rest to the next start."""
        ...

    def begin(self, record: BatchRecord) -> None:
        """There is a new batch, whose row is durable."""
        ...

    def end(self, batch_id: str) -> None:
        """Carries out a durable decision (cancel, expiry) on a batch that may be anywhere before its end."""
        ...

    def suspend(self) -> None:
        """Lets the engine go on without batch work."""
        ...

    async def expire_overdue(self) -> None:
        """Ends batches whose completion window is over."""
        ...

    async def backlog(self) -> list[JobLeft]:
        """Work that servers of this model share and have left. Raises StoreUnavailableError."""
        ...


# ---- the seam --------------------------------------------------------------------------------------------


class Sharing(Protocol):
    """Storage outside the data directory, and what moves batches on where several servers use it."""

    @property
    def blobs(self) -> BlobStorage | None:
        """Storage of file bytes; None where one server has the database for itself."""
        ...

    def database(self, limit_s: float) -> Database | None:
        """The database, each of whose queries takes at most ``limit_s``; None for SQLite in the data directory."""
        ...

    def settle(self, conn: sa.Connection) -> None:
        """Checks that the database and the blobs belong together, in a transaction of the start.

        Raises:
            StoreError: they do not.
        """
        ...

    def machine(self, plane: "BatchPlane") -> BatchMachine | None:
        """What moves shared batches on; None where one server has the database for itself."""
        ...
