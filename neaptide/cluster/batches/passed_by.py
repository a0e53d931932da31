"""What a server leaves to others although it could claim it, in bounded memory. Pure."""

from neaptide.cluster.batches.chunk_rows import Besides
from neaptide.cluster.lease_order import ChunkKey

MAX_CHUNKS, MAX_BATCHES = 16, 256
"""Remembered one by one of a batch, of which all are left to others then; and batches of which some are."""


class PassedBy:
    """Chunks that this server cannot run. Every claim names them, so that no more than some thousand are kept: of a
    batch that has many, it is left alone as a whole."""

    def __init__(self) -> None:
        self._chunks: dict[str, set[ChunkKey]] = {}
        """By batch, those of late last."""

    def add(self, key: ChunkKey) -> None:
        self._chunks.setdefault(key.batch_id, set()).add(key)
        if len(self._chunks) > MAX_BATCHES:
            del self._chunks[next(iter(self._chunks))]

    def beside(self, held: list[ChunkKey]) -> Besides:
        """With the chunks that the server has."""
        some = (keys for keys in self._chunks.values() if len(keys) < MAX_CHUNKS)
        whole = [batch_id for batch_id, keys in self._chunks.items() if len(keys) >= MAX_CHUNKS]
        return Besides([*held, *(key for keys in some for key in keys)], whole)
