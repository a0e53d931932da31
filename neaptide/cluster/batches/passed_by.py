"""Remembers, in bounded memory, which chunks a server leaves to others although it could lease them. Pure."""

from neaptide.cluster.batches.chunk_rows import Excluded
from neaptide.cluster.lease_order import ChunkKey

MAX_CHUNKS, MAX_BATCHES = 16, 256
"""Chunks of one batch that are remembered one by one, before the batch is left alone; and batches."""


class PassedBy:
    """Chunks that this server cannot run.

    Every statement that leases chunks names them, so at most some thousand are kept. A batch that has many of them is
    left alone as a whole.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, set[ChunkKey]] = {}
        """By batch, the most recent batch last."""

    def add(self, key: ChunkKey) -> None:
        self._chunks.setdefault(key.batch_id, set()).add(key)
        if len(self._chunks) > MAX_BATCHES:
            del self._chunks[next(iter(self._chunks))]

    def excluded(self, held: list[ChunkKey]) -> Excluded:
        """These chunks, and those that the server has on lease."""
        some = (keys for keys in self._chunks.values() if len(keys) < MAX_CHUNKS)
        whole = [batch_id for batch_id, keys in self._chunks.items() if len(keys) >= MAX_CHUNKS]
        return Excluded([*held, *(key for keys in some for key in keys)], whole)
