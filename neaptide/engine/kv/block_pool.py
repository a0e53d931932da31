"""Owner of the KV blocks and of their states.

free    No request holds the block, and its content is worthless.
cached  No request holds the block, and its hash is in the prefix index. When no block is free, the first in
        ``EvictionOrder`` is reused: by the expected reuse of its prefix nodes, or by age alone.
held    Its ref count is positive; it may be in the index as well.

free + cached + held == total, after every call
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from neaptide.engine.kv.eviction import (
    SEEN_ONLINE,
    UNWANTED,
    WANTED,
    CountedEvictionOrder,
    EvictionOrder,
    counted_bucket,
    planned_bucket,
    wanted_bucket,
)
from neaptide.engine.kv.host_tier import HostTier
from neaptide.engine.kv.online_returns import OnlineReturns
from neaptide.engine.kv.prefix_index import PrefixIndex
from neaptide.engine.kv.prefix_nodes import Path, PrefixNode
from neaptide.engine.params import RequestClass


def joined(prefix_node: PrefixNode, noted: tuple[PrefixNode, ...]) -> tuple[PrefixNode, ...]:
    """Prefix nodes of a block that a request of ``prefix_node`` reads, without those that no request needs."""
    return (prefix_node, *(other for other in noted if other.num_wanting))


class BlockPool:
    """Pool of KV blocks.

    Args:
        by_reuse: evict cached blocks by expected reuse; else by age alone.
        counted: expected reuse is the exact number of requests; else it is in classes that double.
        host: takes evicted blocks that requests may still need.
    """

    def __init__(
        self, num_blocks: int, by_reuse: bool = False, counted: bool = False, host: HostTier | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.host = host
        self.online_returns = OnlineReturns(num_blocks if host is None else host.num_slots)
        """Counted only with ``by_reuse``."""
        self.saves_from = SEEN_ONLINE
        """First bucket of the eviction order whose blocks are currently worth a copy to host memory."""
        self.loads = host is not None
        """Whether copies from host memory are currently worth their time."""
        self.saves: list[tuple[int, int]] = []
        """Evicted blocks and their target slots in host memory, to be copied before anything is written. The reader
        clears the list."""
        self.by_reuse = by_reuse
        self._counted = counted
        self.index = PrefixIndex()
        self._free = list(range(num_blocks - 1, -1, -1))
        """Stack with low ids first, so that a half-empty pool stays dense in memory."""
        self._cached = CountedEvictionOrder() if counted else EvictionOrder()
        self._ref_cnt = [0] * num_blocks
        self._online_ref_cnt = [0] * num_blocks
        self._last_reader = [RequestClass.OFFLINE] * num_blocks
        """Class of the request that last released each cached block."""
        self._hash: list[bytes | None] = [None] * num_blocks
        self._num_online = 0
        self._prefix_nodes: dict[int, tuple[PrefixNode, ...]] = {}
        """Prefix nodes of each held or cached block, one per job."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_online(self) -> int:
        """Number of held blocks with at least one online reader."""
        return self._num_online

    @property
    def num_offline(self) -> int:
        """Number of held blocks with offline readers only."""
        return self.num_held - self._num_online

    @property
    def ref_counts(self) -> Sequence[int]:
        """Number of readers of each block."""
        return self._ref_cnt

    def online_ref_cnt(self, block_id: int) -> int:
        return self._online_ref_cnt[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash[block_id]

    @property
    def hashes(self) -> Sequence[bytes | None]:
        """Hash of each block that is in the prefix index."""
        return self._hash

    def free_blocks(self, start: int, count: int) -> list[int]:
        """The ``count`` free blocks that ``allocate`` gives after ``start`` other ones."""
        end = len(self._free) - start
        return self._free[end - count : end][::-1]

    def eviction_order(self) -> Iterator[int]:
        """Cached blocks in order of eviction."""
        return iter(self._cached)

    def cached_in(self, bucket: int) -> Iterator[int]:
        """Cached blocks of one bucket in order of eviction."""
        return self._cached.bucket(bucket)

    def num_cached_in(self, bucket: int) -> int:
        """Number of cached blocks of one bucket."""
        return self._cached.num_in(bucket)

    def cached_bucket(self, block: int) -> int:
        """Bucket of a cached block."""
        return self._cached.bucket_of(block)

    @property
    def buckets(self) -> Iterable[int]:
        """Non-empty buckets in order of eviction."""
        return self._cached.numbers

    def num_wanting(self, block: int) -> int:
        """Number of open requests that are known to need the block."""
        return sum([prefix_node.num_wanting for prefix_node in self._prefix_nodes.get(block, ())])

    def nodes_of(self, block: int) -> tuple[PrefixNode, ...]:
        """Prefix nodes that a held or cached block belongs to."""
        return self._prefix_nodes.get(block, ())

    def known_nodes(self) -> set[PrefixNode]:
        """Prefix nodes of all held or cached blocks."""
        return set(chain.from_iterable(self._prefix_nodes.values()))

    def bucket_of(self, prefix_nodes: tuple[PrefixNode, ...], owner: RequestClass) -> int:
        """Eviction bucket of a block with these prefix nodes whose last reader has this class."""
        if not self.by_reuse:
            return UNWANTED
        wanted = self._bucket_by_reuse(prefix_nodes)
        if wanted is not None:
            return wanted
        return SEEN_ONLINE if owner is RequestClass.ONLINE else UNWANTED

    def allocate(self, count: int, owner: RequestClass) -> list[int]:
        """``count`` blocks with ref count 1; evicts cached blocks when free ones run out.

        Raises:
            RuntimeError: fewer than ``count`` are available (check ``num_available`` first).
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available")
        num_free = min(count, len(self._free))
        blocks = self.free_blocks(0, num_free)
        del self._free[len(self._free) - num_free :]
        if num_free < count:
            blocks += self._evict(count - num_free)
        is_online = owner is RequestClass.ONLINE
        ref_cnt, online_ref_cnt, online = self._ref_cnt, self._online_ref_cnt, int(is_online)
        for block in blocks:
            ref_cnt[block] = 1
            online_ref_cnt[block] = online
        self._num_online += is_online * count
        return blocks

    def acquire(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """Adds a reader to blocks that the index returned."""
        is_online, num_online = owner is RequestClass.ONLINE, 0
        for block in block_ids:
            if self._ref_cnt[block] == 0:
                num_online += is_online and self._cached.bucket_of(block) == SEEN_ONLINE
                self._uncache(block)
            self._add_ref(block, owner)
        self.online_returns.observe_hits(num_online)

    def release(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """Removes a reader. The tail of the chain ages first: a tail without its head is unreachable."""
        is_online = owner is RequestClass.ONLINE
        ref_cnt, online_ref_cnt, hashes = self._ref_cnt, self._online_ref_cnt, self._hash
        last_reader = self._last_reader
        prefix_nodes: tuple[PrefixNode, ...] = ()
        bucket = self.bucket_of(prefix_nodes, owner)
        for block in reversed(block_ids):
            ref_cnt[block] -= 1
            if is_online:
                online_ref_cnt[block] -= 1
                self._num_online -= online_ref_cnt[block] == 0
            if ref_cnt[block] == 0:
                if hashes[block] is None:
                    self._prefix_nodes.pop(block, None)
                    self._free.append(block)
                else:
                    own_nodes = self._prefix_nodes.get(block, ())
                    if own_nodes is not prefix_nodes:
                        prefix_nodes, bucket = own_nodes, self.bucket_of(own_nodes, owner)
                    self._cached.add(block, bucket)
                    last_reader[block] = owner
                    for prefix_node in prefix_nodes:
                        prefix_node.cached[block] = None

    def publish(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Offers full blocks with their hashes to the prefix index, in this order, when computed or planned."""
        hashes, add = self._hash, self.index.add
        for block, block_hash in blocks:
            if hashes[block] is None and add(block_hash, block):
                hashes[block] = block_hash

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Removes blocks from the prefix index because their content may be invalid."""
        for block in block_ids:
            block_hash = self._hash[block]
            if block_hash is not None:
                self.index.remove(block_hash)
                self._hash[block] = None
                if self.host is not None:
                    self.host.discard(block_hash)
                if block in self._cached:
                    self._uncache(block)
                    self._prefix_nodes.pop(block, None)
                    self._free.append(block)

    def mark(self, blocks: Iterable[tuple[int, PrefixNode]]) -> None:
        """Assigns held blocks to prefix nodes. Nodes of other jobs that are still needed are kept."""
        alone: tuple[PrefixNode, ...] = ()  # One tuple for a run of blocks.
        for block, prefix_node in blocks:
            noted = self._prefix_nodes.get(block)
            if noted is None:
                if not alone or alone[0] is not prefix_node:
                    alone = (prefix_node,)
                self._prefix_nodes[block] = alone
            elif prefix_node not in noted:
                self._prefix_nodes[block] = joined(prefix_node, noted)

    def want_less(self, path: Path, count: int = 1) -> None:
        """Lowers the number of requests that need these prefix nodes, and the rank of their cached blocks."""
        for prefix_node in path:
            before, prefix_node.num_wanting = prefix_node.num_wanting, prefix_node.num_wanting - count
            if self._counted or before.bit_length() != prefix_node.num_wanting.bit_length():
                self._reorder(prefix_node)

    def look_up_uses(self, prefix_nodes: Iterable[PrefixNode]) -> None:
        """Updates the next planned use of these prefix nodes, and the eviction order of their cached blocks."""
        for prefix_node in prefix_nodes:
            before, prefix_node.next_use = prefix_node.next_use, prefix_node.present_use
            if prefix_node.next_use != before:
                self._reorder(prefix_node)

    def _reorder(self, prefix_node: PrefixNode) -> None:
        for block in list(prefix_node.cached):
            bucket = self.bucket_of(self.nodes_of(block), self._last_reader[block])
            if bucket != self._cached.bucket_of(block):
                self._cached.move(block, bucket)

    def check_integrity(self, tables: Iterable[tuple[RequestClass, Sequence[int]]]) -> None:
        """Raises AssertionError unless every count can be derived from the block tables of live requests."""
        refs = [0] * self.num_blocks
        online = [0] * self.num_blocks
        for owner, table in tables:
            assert len(set(table)) == len(table), "a block is in one table twice"
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
        if self.host is not None:
            self.host.check_integrity()
        self._check_nodes(free, cached)

    def _check_nodes(self, free: set[int], cached: set[int]) -> None:
        assert free.isdisjoint(self._prefix_nodes), "a free block belongs to a prefix node"
        for block, prefix_nodes in self._prefix_nodes.items():
            for prefix_node in prefix_nodes:
                assert (block in prefix_node.cached) == (block in cached), "a prefix node has wrong cached blocks"
        for block in cached if self.by_reuse else ():
            expected = self.bucket_of(self._prefix_nodes.get(block, ()), self._last_reader[block])
            assert self._cached.bucket_of(block) == expected, "a cached block is in the wrong bucket"

    def _bucket_by_reuse(self, prefix_nodes: Iterable[PrefixNode]) -> int | None:
        """Bucket of a block of these prefix nodes; None if no request needs it."""
        wanted = [prefix_node for prefix_node in prefix_nodes if prefix_node.num_wanting]
        if not wanted:
            return None
        if self._counted:
            return counted_bucket(sum([prefix_node.num_wanting for prefix_node in wanted]))
        uses = [prefix_node.next_use for prefix_node in wanted if prefix_node.next_use is not None]
        return (
            planned_bucket(min(uses))
            if uses
            else wanted_bucket(max([prefix_node.num_wanting for prefix_node in wanted]))
        )

    def _add_ref(self, block: int, owner: RequestClass) -> None:
        self._ref_cnt[block] += 1
        if owner is RequestClass.ONLINE:
            self._num_online += self._online_ref_cnt[block] == 0
            self._online_ref_cnt[block] += 1

    def _uncache(self, block: int) -> None:
        self._cached.remove(block)
        for prefix_node in self._prefix_nodes.get(block, ()):
            del prefix_node.cached[block]

    def _save(self, host: HostTier, blocks: list[int], num_seen: int) -> None:
        """Copies those blocks to host memory that are worth it. The first ``num_seen`` were last read by online
        requests."""
        for place, block in enumerate(blocks):
            block_hash = self._hash[block]
            assert block_hash is not None
            if (SEEN_ONLINE if place < num_seen else WANTED) < self.saves_from:
                continue
            slot = host.take_in(block_hash)
            if slot is not None:
                self.saves.append((block, slot))

    def _evict(self, count: int) -> list[int]:
        num_unwanted, num_seen = self._cached.num_in(UNWANTED), self._cached.num_in(SEEN_ONLINE)
        blocks = self._cached.pop(count)
        hashes, remove = self._hash, self.index.remove
        for block in blocks[num_unwanted : num_unwanted + num_seen]:
            evicted_hash = hashes[block]
            assert evicted_hash is not None
            self.online_returns.observe_evicted(evicted_hash)
        if self.host is not None:
            self._save(self.host, blocks[num_unwanted:], num_seen)
        for block in blocks:
            for prefix_node in self._prefix_nodes.pop(block, ()):
                del prefix_node.cached[block]
            block_hash = hashes[block]
            assert block_hash is not None
            remove(block_hash)
            hashes[block] = None
        return blocks
