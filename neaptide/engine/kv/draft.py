"""The KV cache as a draft of a step would leave it: what policies ask, and what a draft does to it."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.pool_draft import BlockPoolDraft
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.engine.kv.prefix_nodes import known_head, nodes_of_blocks, remember_head
from neaptide.engine.params import RequestClass
from neaptide.engine.request import Request


class PrefixHit(NamedTuple):
    """What a request finds of its tokens: first blocks of the cache, then some in host memory."""

    block_ids: list[int]
    num_tokens: int
    host_hashes: Sequence[bytes] = ()


NO_HIT = PrefixHit([], 0)


class ReleaseValue:
    """How many blocks become available as victims let go, one after the other.

    Args:
        keep: blocks that the requester will read (its prefix hit): freeing those frees nothing for it.
    """

    def __init__(self, kv: "KVDraft", keep: Collection[int]) -> None:
        self._kv = kv
        self._keep = keep
        self._released: Counter[int] = Counter()
        self._freed: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._freed)

    def add(self, victim: Request) -> None:
        block_ids = self._kv.blocks_of(victim)
        # A block that several victims share is free when the last of them lets go.
        self._released.update(block_ids)
        ref_cnt, keep = self._kv.pool.ref_cnt, self._keep
        self._freed |= {b for b in block_ids if self._released[b] == ref_cnt(b) and b not in keep}

    def of(self, victim: Request) -> int:
        """Number of blocks that became available only with this victim."""
        return len(self._freed.intersection(self._kv.blocks_of(victim)))

    def remove(self, victim: Request) -> None:
        """The victim does not let go after all."""
        block_ids = self._kv.blocks_of(victim)
        self._released.subtract(block_ids)
        self._freed.difference_update(block_ids)


class KVDraft:
    """Answers and acts like the cache, and changes nothing but itself."""

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_cache: bool) -> None:
        self.pool = BlockPoolDraft(pool)
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._blocks: dict[Request, list[int]] = {}
        """Block tables that differ from the cache's."""
        self._computed: dict[Request, int] = {}
        """Computed tokens that differ from the cache's."""
        self._indexed: dict[Request, int] = {}
        """Published blocks where their number differs from the cache's."""
        self.num_loaded = 0
        """Blocks that come from host memory."""

    # ---- asking ----

    @property
    def available(self) -> int:
        """Blocks that can be had without taking any from a request."""
        return self.pool.num_available

    @property
    def num_swapped(self) -> int:
        """Blocks that go to host memory or come from it."""
        return self.pool.num_saved + self.num_loaded

    def fits(self, num_blocks: int) -> bool:
        return num_blocks <= self.pool.num_available

    def blocks_of(self, request: Request) -> list[int]:
        blocks = self._blocks.get(request)
        return request.block_ids if blocks is None else blocks

    def num_computed(self, request: Request) -> int:
        computed = self._computed.get(request)
        return request.num_computed_tokens if computed is None else computed

    def num_uncomputed(self, request: Request) -> int:
        computed = self._computed.get(request)
        if computed is None:
            return request.num_uncomputed_tokens
        # It leaves or left its slot: a token that a step in flight samples for it is discarded.
        return request.num_known_tokens - computed

    def match_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, that leaves at least one token to compute.

        A request that wants prompt log-probabilities takes no hit: they need every position's logits.
        """
        if not self.enable_prefix_cache or not request.trusts_cache or request.params.prompt_logprobs is not None:
            return NO_HIT
        # A preempted request comes back without the token that it was sampling.
        num_tokens = request.num_known_tokens
        if len(request.block_hashes) < num_tokens // self.block_size:
            self._hash_blocks(request)
        max_blocks = (num_tokens - 1) // self.block_size
        blocks = self.pool.longest_prefix(request.block_hashes[:max_blocks])
        in_host = request.block_hashes[len(blocks) : max_blocks]
        in_host = in_host[: self.pool.num_in_host(in_host)]
        return PrefixHit(blocks, (len(blocks) + len(in_host)) * self.block_size, in_host)

    def _hash_blocks(self, request: Request) -> None:
        """Rows of one job are thousands of times the same document: what they share of it is hashed once."""
        if not request.block_hashes:
            request.block_hashes += known_head(request.prefix_nodes)
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.salt)
        remember_head(request.prefix_nodes, request.block_hashes, self.block_size)

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """New blocks for the next ``num_tokens`` tokens of a request, beyond those that it holds."""
        blocks = self._blocks.get(request)
        num_blocks = request.num_blocks if blocks is None else len(blocks)
        missing = self.num_computed(request) + num_tokens - num_blocks * self.block_size
        return -(-missing // self.block_size) if missing > 0 else 0

    def admission_cost(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks that leave the available set if a request is admitted with ``hit`` and computes ``num_tokens``."""
        total = -(-(hit.num_tokens + num_tokens) // self.block_size)
        return total - len(hit.block_ids) + self.pool.num_unheld(hit.block_ids)

    def num_wanted_evicted(self, num_blocks: int, keep: Collection[int]) -> int:
        """Cached blocks that requests still want and that would be gone for ``num_blocks`` more, were ``keep`` held."""
        return sum([self.pool.num_wanting(block) > 0 for block in self.pool.next_evicted(num_blocks, keep)])

    def num_online_evicted(self, num_blocks: int, keep: Collection[int] = ()) -> int:
        """Blocks of ended online requests, which no request is known to need, that would be gone for ``num_blocks``
        more, were ``keep`` held."""
        return self.pool.num_online_evicted(num_blocks, keep)

    def release_value(self, keep: Collection[int] = ()) -> ReleaseValue:
        """What victims would make available."""
        return ReleaseValue(self, keep)

    # ---- acting on the draft ----

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """As ``KVCacheManager.admit``."""
        self.pool.acquire(hit.block_ids, request.request_class)
        blocks = list(hit.block_ids)
        if hit.host_hashes:
            loaded = self.pool.allocate(len(hit.host_hashes), request.request_class)
            self.pool.publish(zip(loaded, hit.host_hashes, strict=True))
            self.num_loaded += len(loaded)
            blocks += loaded
        self._blocks[request] = blocks
        self._computed[request] = hit.num_tokens
        self._indexed[request] = len(blocks)

    def grow(self, request: Request, num_tokens: int) -> None:
        """As ``KVCacheManager.grow``."""
        if count := self.blocks_needed(request, num_tokens):
            self._blocks[request] = self.blocks_of(request) + self.pool.allocate(count, request.request_class)

    def grow_rows(self, num_blocks: int, owner: RequestClass) -> None:
        """As ``KVCacheManager.grow_rows``. The rows take part from now on: their tables are not asked for again."""
        if num_blocks:
            self.pool.allocate(num_blocks, owner)

    def publish(self, request: Request, num_tokens: int) -> None:
        """As ``KVCacheManager.publish``."""
        num_full = min(num_tokens, request.num_known_tokens) // self.block_size
        num_indexed = self._indexed.get(request, request.num_indexed_blocks)
        if not self.enable_prefix_cache or not request.trusts_cache or num_full <= num_indexed:
            return
        if len(request.block_hashes) < num_full:
            extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.salt)
        blocks = self.blocks_of(request)
        self.pool.publish(zip(blocks[num_indexed:num_full], request.block_hashes[num_indexed:num_full], strict=True))
        self._indexed[request] = num_full

    def release(self, request: Request) -> None:
        """As ``KVCacheManager.publish_committed`` and ``release``."""
        first = self._indexed.get(request, request.num_indexed_blocks)
        self.publish(request, request.num_committed_tokens)
        if request.prefix_nodes:
            published = self.blocks_of(request)[first : self._indexed.get(request, first)]
            prefix_nodes = nodes_of_blocks(request.prefix_nodes, first, published, self.block_size)
            self.pool.mark(zip(published, prefix_nodes, strict=True))
        self.pool.release(self.blocks_of(request), request.request_class)
        self._blocks[request] = []
        self._computed[request] = self._indexed[request] = 0
