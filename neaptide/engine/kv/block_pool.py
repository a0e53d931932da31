"""Owner of the KV blocks: which are free, which are cached, which are held, and by how many.

free    no request holds it, nothing in it is worth keeping
cached  no request holds it, its hash is in the prefix index; reused in ``EvictionOrder`` when no block is free
held    ref count > 0; may be in the index as well

free + cached + held == total, after every call
"""

from collections.abc import Iterable, Iterator, Sequence

from neaptide.engine.kv.eviction import EvictionOrder
from neaptide.engine.kv.prefix_index import PrefixIndex
from neaptide.engine.params import RequestClass


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._free = list(range(num_blocks - 1, -1, -1))
        """Stack: low ids first, so that a half-empty pool stays dense in memory."""
        self._cached = EvictionOrder()
        self._ref_cnt = [0] * num_blocks
        self._online_ref_cnt = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._num_online = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_online(self) -> int:
        """Held blocks with at least one online reader."""
        return self._num_online

    @property
    def num_offline(self) -> int:
        """Held blocks with offline readers only."""
        return self.num_held - self._num_online

    @property
    def ref_counts(self) -> Sequence[int]:
        """Readers of each block."""
        return self._ref_cnt

    def online_ref_cnt(self, block_id: int) -> int:
        return self._online_ref_cnt[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash[block_id]

    def free_blocks(self, start: int, count: int) -> list[int]:
        """The ``count`` free blocks that ``allocate`` gives after ``start`` others."""
        end = len(self._free) - start
        return self._free[end - count : end][::-1]

    def eviction_order(self) -> Iterator[int]:
        """Cached blocks, first to go first."""
        return iter(self._cached)

    def allocate(self, count: int, owner: RequestClass) -> list[int]:
        """``count`` blocks with ref count 1; evicts cached blocks when free ones run out.

        Raises:
            RuntimeError: fewer than ``count`` are available (ask ``num_available`` first).
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available")
        num_free = min(count, len(self._free))
        blocks = self.free_blocks(0, num_free)
        del self._free[len(self._free) - num_free :]
        blocks += self._evict(count - num_free)
        is_online = owner is RequestClass.ONLINE
        ref_cnt, online_ref_cnt, online = self._ref_cnt, self._online_ref_cnt, int(is_online)
        for block in blocks:
            ref_cnt[block] = 1
            online_ref_cnt[block] = online
        self._num_online += is_online * count
        return blocks

    def acquire(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """One more reader for blocks that the index named."""
        for block in block_ids:
            if self._ref_cnt[block] == 0:
                self._cached.remove(block)
            self._add_ref(block, owner)

    def release(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """One reader less. The tail of the chain ages first: a tail without its head is unreachable."""
        is_online = owner is RequestClass.ONLINE
        ref_cnt, online_ref_cnt, hashes = self._ref_cnt, self._online_ref_cnt, self._hash
        for block in reversed(block_ids):
            ref_cnt[block] -= 1
            if is_online:
                online_ref_cnt[block] -= 1
                self._num_online -= online_ref_cnt[block] == 0
            if ref_cnt[block] == 0:
                if hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached.add(block)

    def publish(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Offers full blocks, with their hashes, to the prefix index in this order: computed, or about to be."""
        hashes, add = self._hash, self.index.add
        for block, block_hash in blocks:
            if hashes[block] is None and add(block_hash, block):
                hashes[block] = block_hash

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the prefix index: what is in them is not to be trusted."""
        for block in block_ids:
            block_hash = self._hash[block]
            if block_hash is not None:
                self.index.remove(block_hash)
                self._hash[block] = None
                if block in self._cached:
                    self._cached.remove(block)
                    self._free.append(block)

    def check_integrity(self, tables: Iterable[tuple[RequestClass, Sequence[int]]]) -> None:
        """Raises AssertionError unless every count can be derived from the block tables of live requests."""
        refs = [0] * self.num_blocks
        online = [0] * self.num_blocks
        for owner, table in tables:
            assert len(set(table)) == len(table), "a block stands twice in one table"
            for block in table:
                refs[block] += 1
                online[block] += owner is RequestClass.ONLINE
        assert refs == self._ref_cnt, "ref counts differ from the block tables"
        assert online == self._online_ref_cnt, "online ref counts differ from the block tables"
        assert self._num_online == sum(n > 0 for n in online)
        free, cached = set(self._free), set(self._cached)
        held = {b for b in range(self.num_blocks) if refs[b]}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached
        assert not free & held
        assert not cached & held
        assert len(free) + len(cached) + len(held) == self.num_blocks
        assert all(self._hash[b] is None for b in free), "a free block still has a hash"
        hashed = {h: b for b, h in enumerate(self._hash) if h is not None}
        assert len(hashed) == len(self.index)
        assert all(self.index.get(h) == b for h, b in hashed.items())
        assert cached <= set(hashed.values()), "a cached block is not in the index"

    def _add_ref(self, block: int, owner: RequestClass) -> None:
        self._ref_cnt[block] += 1
        if owner is RequestClass.ONLINE:
            self._num_online += self._online_ref_cnt[block] == 0
            self._online_ref_cnt[block] += 1

    def _evict(self, count: int) -> list[int]:
        blocks = self._cached.pop(count)
        hashes, remove = self._hash, self.index.remove
        for block in blocks:
            block_hash = hashes[block]
            assert block_hash is not None
            remove(block_hash)
            hashes[block] = None
        return blocks
