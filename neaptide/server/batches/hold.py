"""What lets a server move a batch on: where there is one server nothing, where several share a database a lease."""

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
    """Of one batch."""

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


class SoleHold:
    """There is no other server. Implements ``Hold``."""

    def __init__(self, plane: BatchPlane) -> None:
        self._p = plane

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        """As in ``Hold``."""
        return operation

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        """As in ``Hold``."""
        fingerprint = self._p.compiler.served.fingerprint
        return await self._p.store.write(batch_rows.begin_batch, record.id, model, fingerprint, now)

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        """As in ``Hold``."""
        return files

    async def tidy(self, record: BatchRecord) -> None:
        """As in ``Hold``."""
