"""Right of a server to change a batch: unlimited on a single server, a lease where several share a database."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import BatchRecord, FileRecord
from neaptide.server.batches.wiring import BatchPlane

P = ParamSpec("P")
T = TypeVar("T")
ResultFiles = tuple[FileRecord | None, FileRecord | None]
"""Output and error file."""


class Hold(Protocol):
    """Right to change one batch."""

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


class SoleHold:
    """Right on a single server. Implements ``Hold``."""

    def __init__(self, plane: BatchPlane) -> None:
        self._p = plane

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        return operation

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        fingerprint = self._p.compiler.served.fingerprint
        return await self._p.store.write(batch_rows.begin_batch, record.id, model, fingerprint, now)

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        return files

    async def tidy(self, record: BatchRecord) -> None:
        """Removes nothing."""
