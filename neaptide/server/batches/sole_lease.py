"""Hold of a single server: an unlimited right to change a batch."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.sharing import ResultFiles
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.wiring import BatchContext

P = ParamSpec("P")
T = TypeVar("T")


class SoleLease:
    """Right on a single server. Implements ``Hold``."""

    def __init__(self, context: BatchContext) -> None:
        self._context = context

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        return operation

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        fingerprint = self._context.compiler.served.fingerprint
        return await self._context.store.write(batch_rows.begin_batch, record.id, model, fingerprint, now)

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        return files

    async def tidy(self, record: BatchRecord) -> None:
        """Removes nothing."""
