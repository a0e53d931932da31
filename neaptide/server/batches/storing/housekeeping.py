"""Removes expired files, remains of deleted ones, and old idempotency keys."""

import asyncio
from collections.abc import Callable

from neaptide.durations import DAY_S
from neaptide.server.batches.storing import file_rows, retention_rows
from neaptide.server.batches.storing.files import FileStore
from neaptide.server.batches.storing.store import Store

IDEMPOTENCY_KEY_LIFE_S = 7 * DAY_S
CURSOR_LIFE_S = 7 * DAY_S
"""How long a deleted file marks its place in a list, for clients that page."""
LINES_A_WRITE = 2_000
"""Results dropped per transaction, for which ending lines have to wait."""


class Housekeeping:
    """Runs at start, every minute, and by ``neaptide data prune``."""

    def __init__(self, store: Store, files: FileStore, now: Callable[[], float]) -> None:
        self._store = store
        self._files = files
        self._now = now

    async def run(self) -> None:
        """Removes what is due. Raises StoreUnavailableError; the rest is removed the next time."""
        now = int(self._now())
        await self._store.write(file_rows.delete_expired, now)
        # In a write: the deletions it sees are then durable, on a standby too, before any bytes are removed.
        for file_id, blob in (await self._store.write(file_rows.unswept_files)).items():
            await self._sweep(file_id, blob)
        await self._store.write(file_rows.forget_deleted, now - CURSOR_LIFE_S)
        await self._store.write(file_rows.delete_old_keys, now - IDEMPOTENCY_KEY_LIFE_S)
        if self._store.blobs is not None:
            known = await self._store.read(file_rows.all_file_ids)
            await asyncio.to_thread(self._files.drop_stale_copies, known)

    async def _sweep(self, file_id: str, blob: str | None) -> None:
        """Removes the bytes of a deleted file, and the results of a deleted result file."""
        if not await self._files.remove(file_id, blob):
            return
        while await self._store.write(retention_rows.drop_results, file_id, LINES_A_WRITE):
            continue
        await self._store.write(file_rows.mark_swept, file_id)
