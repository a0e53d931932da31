"""Chunks that a server leaves to others, in bounded memory. Pure."""

from neaptide.cluster.batches.chunk_rows import Besides
from neaptide.cluster.lease_order import ChunkKey

MAX_CHUNKS, MAX_BATCHES = 16, 256
"""Maximum number of chunks remembered of one batch, and of batches remembered."""


class PassedBy:
    """Chunks that this server cannot run.

    Every query for free chunks names them, so at most some thousand are kept. A batch with ``MAX_CHUNKS`` or more of
    them is left to others as a whole.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, set[ChunkKey]] = {}
        """Chunks by batch, in the order of their first chunk; the oldest batch is forgotten first."""

    def add(self, key: ChunkKey) -> None:
        self._chunks.setdefault(key.batch_id, set()).add(key)
        if len(self._chunks) > MAX_BATCHES:
            del self._chunks[next(iter(self._chunks))]

    def beside(self, held: list[ChunkKey]) -> Besides:
        """What the next query for free chunks must skip: these and the chunks that the server has."""
        some = (keys for keys in self._chunks.values() if len(keys) < MAX_CHUNKS)
        whole = [batch_id for batch_id, keys in self._chunks.items() if len(keys) >= MAX_CHUNKS]
        return Besides([*held, *(key for keys in some for key in keys)], whole)
