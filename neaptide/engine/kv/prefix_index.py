"""Prefix index: chained block hashes and their blocks."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_EMPTY = hashlib.sha256()
"""Copied for every block, which takes half the time of making a new one."""


def root_hash(salt: bytes) -> bytes:
    """Parent of the first block of every prompt with this salt."""
    return hashlib.sha256(b"neaptide-kv\0" + salt).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a whole prefix: SHA-256 over the parent's hash and this block's token ids."""
    return chained_hash(parent, np.asarray(token_ids, np.int32).tobytes())


def chained_hash(parent: bytes, text: bytes) -> bytes:
    """``block_hash`` of the bytes of int32 token ids."""
    digest = _EMPTY.copy()
    digest.update(parent + text)
    return digest.digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int] | npt.NDArray[np.int32], block_size: int, salt: bytes
) -> None:
    """Appends to ``hashes`` (in place) until every full block of ``token_ids`` has one."""
    num_blocks = len(token_ids) // block_size
    if num_blocks <= len(hashes):
        return
    parent = hashes[-1] if hashes else root_hash(salt)
    text = np.asarray(token_ids[len(hashes) * block_size : num_blocks * block_size], np.int32).tobytes()
    size = block_size * 4
    for start in range(0, len(text), size):
        parent = chained_hash(parent, text[start : start + size])
        hashes.append(parent)


class PrefixIndex:
    """Full blocks by hash. Only the block pool changes it, so that both always agree."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def get(self, block_hash: bytes) -> int | None:
        return self._block_by_hash.get(block_hash)

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest indexed prefix of ``hashes``."""
        blocks: list[int] = []
        for h in hashes:
            block = self._block_by_hash.get(h)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, block_hash: bytes, block_id: int) -> bool:
        """Adds a block. Returns False if the prefix is indexed already (its first copy stays the shared one)."""
        return self._block_by_hash.setdefault(block_hash, block_id) == block_id

    def remove(self, block_hash: bytes) -> None:
        del self._block_by_hash[block_hash]
