"""The block pool as a draft would leave it: the same operations as ``BlockPool``, on differences to it.

A draft asks for the very blocks that ``BlockPool`` will give when the draft is applied, so that what it planned is
what happens: which blocks are evicted, and so which prefixes later requests of the step still find.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice

from neaptide.engine.kv.block_pool import BlockPool, joined
from neaptide.engine.kv.eviction import SEEN_ONLINE, UNWANTED
from neaptide.engine.kv.prefix_nodes import PrefixNode
from neaptide.engine.params import RequestClass


class BlockPoolDraft:
    """Reads the pool, never changes it; valid until the pool changes."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_taken = 0
        """Free blocks of the pool that are taken."""
        self._freed: list[int] = []
        """Blocks that are free now and were not, the next to be taken last."""
        self._no_longer_cached: set[int] = set()
        self._num_gone = {UNWANTED: 0, SEEN_ONLINE: 0}
        """Number of them by bucket, for the first two buckets."""
        self._newly_cached: dict[int, OrderedDict[int, None]] = {}
        """By bucket of the eviction order."""
        self._emptied: set[int] = set()
        """Blocks that were evicted or freed: what is in them now belongs to other segments."""
        self._pool_buckets: Iterator[int] | None = None
        """Eviction buckets that were not reached; None before the first eviction, which few drafts come to."""
        self._pool_bucket: int | None = None
        """Bucket that evictions have reached."""
        self._oldest: Iterator[int] = iter(())
        """Blocks left in that bucket, first to go first."""
        self._marked: dict[int, tuple[PrefixNode, ...]] = {}
        """Segments of blocks where they differ from the pool's."""
        self._refs: dict[int, int] = {}
        self._online_refs: dict[int, int] = {}
        self._hashes: dict[int, bytes | None] = {}
        self._found: dict[bytes, int | None] = {}
        """What the prefix index finds where it differs from the pool's."""
        self.num_available = pool.num_available
        self.num_online = pool.num_online
        self.num_saved = 0
        """Evicted blocks that go to host memory."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_offline(self) -> int:
        return self.num_blocks - self.num_available - self.num_online

    def ref_cnt(self, block: int) -> int:
        count = self._refs.get(block)
        return self._pool.ref_counts[block] if count is None else count

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these would leave the available set if they were acquired."""
        own, others = self._refs, self._pool.ref_counts
        return sum([not own.get(block, others[block]) for block in block_ids])

    def next_evicted(self, count: int, keep: Collection[int] = ()) -> Iterator[int]:
        """Cached blocks that ``allocate`` would evict for ``count`` blocks, were ``keep`` held."""
        num_left = count - (self._pool.num_free - self._num_taken + len(self._freed))
        if num_left > 0:
            yield from islice((block for block in self._eviction_order() if block not in keep), num_left)

    def num_online_evicted(self, count: int, keep: Collection[int] = ()) -> int:
        """How many of ``next_evicted`` no request is known to need and an online request read last.

        O(1), and O(1) per block of ``keep``.
        """
        num_left = count - (self._pool.num_free - self._num_taken + len(self._freed))
        if num_left <= 0:
            return 0
        unwanted, online = (
            self._pool.num_cached_in(bucket) - num_gone + len(self._newly_cached.get(bucket, ()))
            for bucket, num_gone in self._num_gone.items()
        )
        for block in keep:
            if self.ref_cnt(block) == 0:
                bucket = self._cached_bucket(block)
                unwanted, online = unwanted - (bucket == UNWANTED), online - (bucket == SEEN_ONLINE)
        return min(max(num_left - unwanted, 0), online)

    def _cached_bucket(self, block: int) -> int:
        newly = (bucket for bucket, blocks in self._newly_cached.items() if block in blocks)
        bucket = next(newly, None)
        return self._pool.cached_bucket(block) if bucket is None else bucket

    def num_wanting(self, block: int) -> int:
        """As ``BlockPool.num_wanting``."""
        return sum([prefix_node.num_wanting for prefix_node in self._nodes_of(block)])

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest indexed prefix of ``hashes``."""
        if not self._found:
            return self._pool.index.longest_prefix(hashes)
        blocks: list[int] = []
        own, others = self._found, self._pool.index
        for block_hash in hashes:
            block = own[block_hash] if block_hash in own else others.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_in_host(self, hashes: Sequence[bytes]) -> int:
        """How many of the first of these can be had from host memory."""
        host = self._pool.host
        return host.longest_run(hashes) if host is not None and self._pool.loads else 0

    def allocate(self, count: int, owner: RequestClass) -> list[int]:
        """As ``BlockPool.allocate``."""
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available")
        blocks = self._take_free(count)
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        self.num_available -= count
        self._refs.update(dict.fromkeys(blocks, 1))
        if owner is RequestClass.ONLINE:  # what is available has no online reader
            self._online_refs.update(dict.fromkeys(blocks, 1))
            self.num_online += count
        return blocks

    def acquire(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """As ``BlockPool.acquire``."""
        is_online = owner is RequestClass.ONLINE
        own, others = self._refs, self._pool.ref_counts
        for block in block_ids:
            count = own.get(block, others[block])
            if count == 0:
                self.num_available -= 1
                self._uncache(block)
            own[block] = count + 1
            if is_online:
                online = self._online_ref_cnt(block)
                self.num_online += online == 0
                self._online_refs[block] = online + 1

    def release(self, block_ids: Sequence[int], owner: RequestClass) -> None:
        """As ``BlockPool.release``."""
        for block in reversed(block_ids):
            self._refs[block] = self.ref_cnt(block) - 1
            if owner is RequestClass.ONLINE:
                self._online_refs[block] = self._online_ref_cnt(block) - 1
                self.num_online -= self._online_refs[block] == 0
            if self._refs[block] == 0:
                self.num_available += 1
                if self._hash_of(block) is None:
                    self._marked.pop(block, None)
                    self._emptied.add(block)
                    self._freed.append(block)
                else:
                    bucket = self._pool.bucket_of(self._nodes_of(block), owner)
                    self._newly_cached.setdefault(bucket, OrderedDict())[block] = None

    def publish(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """As ``BlockPool.publish``."""
        own, others, own_found = self._hashes, self._pool.hashes, self._found
        find_other = self._pool.index.get
        for block, block_hash in blocks:
            if (own[block] if block in own else others[block]) is not None:
                continue
            if (own_found[block_hash] if block_hash in own_found else find_other(block_hash)) is None:
                own[block] = block_hash
                own_found[block_hash] = block

    def mark(self, blocks: Iterable[tuple[int, PrefixNode]]) -> None:
        """As ``BlockPool.mark``."""
        for block, prefix_node in blocks:
            noted = self._nodes_of(block)
            if prefix_node not in noted:
                self._marked[block] = joined(prefix_node, noted)

    def _nodes_of(self, block: int) -> tuple[PrefixNode, ...]:
        marked = self._marked.get(block)
        if marked is not None:
            return marked
        return () if block in self._emptied else self._pool.nodes_of(block)

    def _hash_of(self, block: int) -> bytes | None:
        return self._hashes[block] if block in self._hashes else self._pool.hash_of(block)

    def _online_ref_cnt(self, block: int) -> int:
        count = self._online_refs.get(block)
        return self._pool.online_ref_cnt(block) if count is None else count

    def _take_free(self, count: int) -> list[int]:
        """Free blocks, as many of ``count`` as there are."""
        num_freed = min(count, len(self._freed))
        blocks = self._freed[len(self._freed) - num_freed :][::-1]
        del self._freed[len(self._freed) - num_freed :]
        num_others = min(count - num_freed, self._pool.num_free - self._num_taken)
        blocks += self._pool.free_blocks(self._num_taken, num_others)
        self._num_taken += num_others
        return blocks

    def _uncache(self, block: int) -> None:
        for blocks in self._newly_cached.values():
            if block in blocks:
                del blocks[block]
                return
        self._leave_pool(self._pool.cached_bucket(block), (block,))

    def _leave_pool(self, bucket: int, blocks: Collection[int]) -> None:
        self._no_longer_cached.update(blocks)
        if bucket in self._num_gone:
            self._num_gone[bucket] += len(blocks)

    def _eviction_order(self) -> Iterator[int]:
        """Cached blocks, first to go first."""
        for bucket, _ in groupby(merge(self._pool.buckets, sorted(self._newly_cached))):
            yield from (block for block in self._pool.cached_in(bucket) if block not in self._no_longer_cached)
            yield from self._newly_cached.get(bucket, ())

    def _reach_next_bucket(self) -> None:
        if self._pool_buckets is None:
            self._pool_buckets = iter(self._pool.buckets)
        bucket, gone = next(self._pool_buckets, None), self._no_longer_cached
        self._pool_bucket = bucket
        if bucket is not None:
            self._oldest = (block for block in self._pool.cached_in(bucket) if block not in gone)

    def _evict(self, count: int) -> list[int]:
        blocks: list[int] = []
        host = self._pool.host
        while len(blocks) < count:
            bucket, of_bucket = self._evict_of_first(count - len(blocks))
            if host is not None and bucket >= self._pool.saves_from:
                self.num_saved += sum([self._hash_of(block) not in host for block in of_bucket])
            blocks += of_bucket
        own, others, found = self._hashes, self._pool.hashes, self._found
        for block in blocks:
            block_hash = own[block] if block in own else others[block]
            assert block_hash is not None
            found[block_hash] = None
            own[block] = None
            self._marked.pop(block, None)
        self._emptied.update(blocks)
        return blocks

    def _evict_of_first(self, count: int) -> tuple[int, list[int]]:
        """So many blocks of the first bucket that has some, if it has so many; newly cached ones last."""
        if self._pool_buckets is None:
            self._reach_next_bucket()
        newest = min((bucket for bucket, blocks in self._newly_cached.items() if blocks), default=None)
        if self._pool_bucket is not None and (newest is None or self._pool_bucket <= newest):
            bucket, blocks = self._pool_bucket, list(islice(self._oldest, count))
            self._leave_pool(bucket, blocks)
            if len(blocks) < count:
                self._reach_next_bucket()
            return bucket, blocks
        assert newest is not None
        newly_cached = self._newly_cached[newest]
        blocks = list(islice(newly_cached, count))
        for block in blocks:
            del newly_cached[block]
        return newest, blocks
