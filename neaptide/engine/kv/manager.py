"""KVCacheManager: the only interface to the KV cache, its blocks, its tables and its index.

A step's draft queries a ``KVDraft``, which answers as if the draft so far were applied. The cache itself changes when
a draft is applied and when a step is committed: by ``admit``, ``grow``, ``grow_rows``, ``publish``, ``retract``,
``cut`` and ``release``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.config import SharedReads
from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.draft import KVDraft, PrefixHit
from neaptide.engine.kv.eviction import NUM_BUCKETS, SEEN_ONLINE, WANTED
from neaptide.engine.kv.host_tier import HostTier
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.engine.kv.prefix_nodes import Path, PrefixNode, nodes_of_blocks
from neaptide.engine.kv.shared_prefixes import SharedPrefixes, SharedReadsDraft
from neaptide.engine.kv.slot_copies import SlotCopies
from neaptide.engine.request import Request
from neaptide.engine.table import RequestTable


@dataclass(slots=True, frozen=True)
class KVOccupancy:
    """Number of blocks by state; they add up to the pool."""

    free: int
    cached: int
    online: int
    """Held blocks with at least one online reader."""
    offline: int
    """Held blocks with offline readers only."""


class KVCacheManager:
    """Manages the KV blocks of all requests.

    Args:
        num_blocks: blocks of the pool.
        table: table of the running requests; only this class writes its block tables.
        evicts_by_reuse: evict cached blocks that requests of a job still need last; else the oldest first.
        counts_reuse: order blocks by the exact number of requests that need them; else by classes of it.
        num_host_blocks: evicted blocks that host memory keeps, if requests may still need them.
        shared_reads: what the executor's kernel reads once for several requests; None if each reads its own.
    """

    def __init__(
        self,
        num_blocks: int,
        table: RequestTable,
        enable_prefix_cache: bool = True,
        evicts_by_reuse: bool = False,
        counts_reuse: bool = False,
        num_host_blocks: int = 0,
        shared_reads: SharedReads | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.table = table
        self.block_size = table.blocks.block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._host = HostTier(num_host_blocks) if num_host_blocks else None
        self._pool = BlockPool(num_blocks, evicts_by_reuse, counts_reuse, self._host)
        self.shared_reads = shared_reads
        self._shared = SharedPrefixes(table, shared_reads) if shared_reads is not None else None
        self._loads: list[tuple[int, int]] = []

    # ---- queries ----

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated without preemption."""
        return self._pool.num_available

    @property
    def num_online(self) -> int:
        """Number of held blocks with at least one online reader."""
        return self._pool.num_online

    @property
    def online_return_share(self) -> float:
        """Share of cached online blocks that an online request hits again; 1 until some have been evicted."""
        return self._pool.online_returns.share

    def occupancy(self) -> KVOccupancy:
        pool = self._pool
        return KVOccupancy(pool.num_free, pool.num_cached, pool.num_online, pool.num_offline)

    def num_cached_in(self, bucket: int) -> int:
        """Number of cached blocks in this bucket of the eviction order."""
        return self._pool.num_cached_in(bucket)

    def is_indexed(self, block_hash: bytes) -> bool:
        """Whether a request with this block in its prompt would find it."""
        return self._pool.index.get(block_hash) is not None or (self._host is not None and block_hash in self._host)

    def indexed_hashes(self) -> list[bytes]:
        """Hashes of all blocks on the device that a request could find."""
        return [found for found in self._pool.hashes if found is not None]

    def prefix_nodes(self) -> set[PrefixNode]:
        """Prefix nodes of held or cached blocks."""
        return self._pool.known_nodes()

    def draft(self) -> KVDraft:
        """View of the current cache to plan against; invalid once the cache has changed."""
        return KVDraft(self._pool, self.block_size, self.enable_prefix_cache)

    def shared_reads_draft(self) -> SharedReadsDraft:
        """Reads that the decodes of a step save, to be counted anew for every draft."""
        return SharedReadsDraft(self._shared)

    def saved_reads(self, rows: IntArray) -> FloatArray | None:
        """[rows] cached tokens that each of these decodes need not read; None if nothing is shared."""
        return self._shared.saved_by_each(rows) if self._shared is not None and len(self._shared) else None

    # ---- changes ----

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Gives a request that has just got its slot its cached prefix."""
        assert not request.num_blocks
        blocks, shared, num_held = hit.block_ids, self._shared, 0
        if shared is not None:
            num_held = shared.num_held(blocks, self._pool.ref_counts)
        self._pool.acquire(blocks, request.request_class)
        if request.is_online:
            self._pool.online_returns.observe_wanted(islice(request.block_hashes, len(blocks), None))
        if hit.host_hashes:
            blocks = blocks + self._load(request, hit.host_hashes)
        self._mark(request, 0, blocks)
        request.has_hit = hit.num_tokens > 0
        table, slot = self.table, request.slot
        table.blocks.append(slot, blocks)
        table.computed[slot] = table.committed[slot] = hit.num_tokens
        table.indexed[slot] = len(blocks)
        if shared is not None:
            shared.join(slot, num_held)

    def _load(self, request: Request, hashes: Sequence[bytes]) -> list[int]:
        """Allocates blocks for the contents of host memory under these hashes. The next step copies them."""
        assert self._host is not None
        blocks = self._pool.allocate(len(hashes), request.request_class)
        self._pool.publish(zip(blocks, hashes, strict=True))
        self._loads += [(self._host.read(block_hash), block) for block_hash, block in zip(hashes, blocks, strict=True)]
        return blocks

    @property
    def has_host(self) -> bool:
        """Whether host memory takes evicted blocks."""
        return self._host is not None

    def set_copy_price(self, price: float) -> None:
        """Sets the cost of copying a block to or from host memory, relative to computing it.

        A needed block will be copied back. A conversation's block is copied back only if that continues, which is
        estimated from recent returns.
        """
        if self._host is None:
            return
        share = self._pool.online_returns.evicted_share
        saves_wanted, saves_seen = 2.0 * price <= 1.0, (1.0 + share) * price <= share
        self._pool.saves_from = SEEN_ONLINE if saves_seen else WANTED if saves_wanted else NUM_BUCKETS
        self._pool.loads = price <= 1.0

    def pin(self, hits: Iterable[PrefixHit]) -> None:
        """Keeps the host blocks of these admissions until their step has ended (``loaded``). Call before applying the
        draft."""
        if self._host is not None:
            for hit in hits:
                self._host.pin(hit.host_hashes)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Copies to make before the next step computes: blocks to host slots, then host slots to blocks."""
        saves, loads = self._pool.saves, self._loads
        self._pool.saves, self._loads = [], []
        return saves, loads

    def take_slot_copies(self) -> SlotCopies | None:
        """Copies of single slots for the next step. The engine's cache has none; a policy's own may have some."""
        return None

    def invalidate_copies(self, copies: SlotCopies) -> list[Request]:
        """Handles slot copies of a failed step: each affected request keeps its tokens before the copied ones.

        Returns the requests; the results of steps in flight for them are to be dropped.
        """
        return []

    def loaded(self, loads: Iterable[tuple[int, int]]) -> None:
        """Ends the reads of a step that made these copies or failed."""
        if self._host is not None:
            self._host.unpin(slot for slot, _ in loads)

    def invalidate_saves(self, saves: Iterable[tuple[int, int]]) -> None:
        """Drops the host blocks of copies that a failed step should have made."""
        if self._host is not None:
            self._host.discard_slots(slot for _, slot in saves)

    def invalidate_loads(self, loads: Iterable[tuple[int, int]]) -> set[int]:
        """Handles copies from host memory of a failed step: removes the blocks from the index and returns them."""
        blocks = {block for _, block in loads}
        self._pool.unpublish(blocks)
        return blocks

    def grow(self, request: Request, num_tokens: int) -> None:
        """Extends the block table for the next ``num_tokens`` tokens. Raises RuntimeError when blocks run out."""
        missing = request.num_computed_tokens + num_tokens - request.num_blocks * self.block_size
        if missing > 0:
            blocks = self._pool.allocate(-(-missing // self.block_size), request.request_class)
            self.table.blocks.append(request.slot, blocks)

    def grow_rows(self, rows: IntArray) -> None:
        """Adds one block to each of these slots of one class, in order.

        Raises RuntimeError when blocks run out.
        """
        if len(rows):
            blocks = self._pool.allocate(len(rows), self.table.request(int(rows[0])).request_class)
            self.table.blocks.append_one_each(rows, blocks)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Indexes the full blocks of the request's first ``num_tokens`` tokens, computed or planned.

        Planned tokens that are not computed must be undone by ``retract``.
        """
        num_full = min(num_tokens, request.num_known_tokens) // self.block_size
        if not self.enable_prefix_cache or not request.trusts_cache or num_full <= request.num_indexed_blocks:
            return
        if len(request.block_hashes) < num_full:
            extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.salt)
        first = request.num_indexed_blocks
        blocks = self.table.blocks.ids[request.slot][first:num_full].tolist()
        self._pool.publish(zip(blocks, request.block_hashes[first:num_full], strict=True))
        self._mark(request, first, blocks)
        self.table.indexed[request.slot] = num_full

    def publish_prompts(self, rows: IntArray, num_tokens: IntArray, on_error: Callable[[Request], None]) -> None:
        """``publish`` for each slot with prompt blocks to publish, after ``num_tokens`` computed tokens.

        Outputs are published when their requests release them. Until then no request can need them, and hashing a block
        at every sixteenth decode would be the most expensive part of a step.

        Args:
            on_error: called for a request that raises, in the except clause; the others go on.
        """
        if not self.enable_prefix_cache:
            return
        table, size = self.table, self.block_size
        next_block = (table.indexed[rows] + 1) * size
        have_more = table.prompt[rows] >= next_block
        if not np.count_nonzero(have_more):
            return
        (due,) = (have_more & (num_tokens >= next_block)).nonzero()
        for request, end in zip(table.requests_of(rows[due]), num_tokens[due].tolist(), strict=True):
            try:
                self.publish(request, end)
            except Exception:
                on_error(request)

    def publish_committed(self, request: Request) -> None:
        """Indexes the request's committed tokens before it ends or is preempted."""
        self.publish(request, request.num_committed_tokens)

    def want_no_more(self, path: Path, count: int = 1) -> None:
        """Notes that ``count`` requests with these prefix nodes have ended or left the pool."""
        self._pool.want_less(path, count)

    def look_up_uses(self, prefix_nodes: Iterable[PrefixNode]) -> None:
        """Updates the planned uses of prefix nodes whose requests were admitted, preempted or planned anew.

        To be called between steps: within a step, the order must stay as the draft left it.
        """
        self._pool.look_up_uses(prefix_nodes)

    def _mark(self, request: Request, first: int, blocks: list[int]) -> None:
        """Assigns blocks of the request, from index ``first`` on, to its prefix nodes."""
        if request.prefix_nodes:
            prefix_nodes = nodes_of_blocks(request.prefix_nodes, first, blocks, self.block_size)
            self._pool.mark(zip(blocks, prefix_nodes, strict=True))

    def retract(self, request: Request, num_tokens: int) -> list[int]:
        """Undoes ``publish`` beyond the first ``num_tokens`` tokens; returns the unindexed blocks.

        They must be the request's own, and none of them may come from its prefix hit.
        """
        num_full, num_indexed = num_tokens // self.block_size, request.num_indexed_blocks
        block_ids = request.block_ids[num_full:num_indexed]
        self._pool.unpublish(block_ids)
        self.table.indexed[request.slot] = min(num_indexed, num_full)
        return block_ids

    def disown(self, published: Iterable[tuple[int, bytes]]) -> list[int]:
        """``retract`` for a request that has ended since; only for blocks that still have the hash it gave them."""
        block_ids = [block for block, block_hash in published if self._pool.hash_of(block) == block_hash]
        self._pool.unpublish(block_ids)
        return block_ids

    def cut(self, request: Request, num_blocks: int) -> None:
        """Frees all but the first ``num_blocks`` blocks, which are full; the rest is computed again."""
        if self._shared is not None:
            self._shared.leave(request.slot, num_blocks)
        self._give_back(request, num_blocks)
        table, slot = self.table, request.slot
        table.computed[slot] = num_blocks * self.block_size
        table.committed[slot] = min(int(table.committed[slot]), num_blocks * self.block_size)
        table.indexed[slot] = min(int(table.indexed[slot]), num_blocks)

    def _give_back(self, request: Request, num_blocks: int) -> None:
        self._pool.release(self.table.blocks.cut(request.slot, num_blocks), request.request_class)

    def release(self, request: Request) -> None:
        """Frees every block; indexed blocks stay cached until they are evicted."""
        if request.table is not None:
            self.cut(request, 0)

    def invalidate(self, request: Request) -> None:
        """Removes this request's blocks from the prefix index; readers keep the blocks they hold."""
        self._pool.unpublish(request.block_ids)

    def unreferenced(self, block_ids: Iterable[int]) -> list[int]:
        """The blocks that no request holds."""
        ref_counts = self._pool.ref_counts
        return [block for block in block_ids if not ref_counts[block]]

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError if pool, index and the tables of ``requests`` (all that hold blocks) disagree."""
        self._pool.check_integrity((r.request_class, r.block_ids) for r in requests)
