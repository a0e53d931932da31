"""KVCacheManager: the facade over pool and index that the scheduler asks and tells.

Ask, then act: ``match_prefix`` and ``blocks_needed`` change nothing; ``admit``, ``grow``, ``publish``, ``retract``,
``cut`` and ``release`` do.
"""

from collections.abc import Iterable
from typing import NamedTuple

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.engine.request import Request


class PrefixHit(NamedTuple):
    block_ids: list[int]
    num_tokens: int


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache

    def match_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, that leaves at least one token to compute.

        A request that wants prompt log-probabilities takes no hit: they need every position's logits.
        """
        if not self.enable_prefix_cache or request.params.prompt_logprobs is not None:
            return PrefixHit([], 0)
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.salt)
        max_blocks = (request.num_tokens - 1) // self.block_size
        blocks = self.pool.index.longest_prefix(request.block_hashes[:max_blocks])
        return PrefixHit(blocks, len(blocks) * self.block_size)

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """New blocks for the next ``num_tokens`` tokens of a request that holds its table already."""
        missing = request.num_computed_tokens + num_tokens - len(request.block_ids) * self.block_size
        return -(-missing // self.block_size) if missing > 0 else 0

    def admission_cost(self, hit: PrefixHit, num_tokens: int) -> int:
        """Blocks that leave the available set if a request is admitted with ``hit`` and computes ``num_tokens``."""
        total = -(-(hit.num_tokens + num_tokens) // self.block_size)
        return total - len(hit.block_ids) + self.pool.num_unheld(hit.block_ids)

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Gives the request its cached prefix."""
        assert not request.block_ids
        self.pool.acquire(hit.block_ids, request.request_class)
        request.block_ids = list(hit.block_ids)
        request.num_computed_tokens = hit.num_tokens
        request.num_indexed_blocks = len(hit.block_ids)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Extends the block table for the next ``num_tokens`` tokens. Raises RuntimeError when blocks run out."""
        if count := self.blocks_needed(request, num_tokens):
            request.block_ids += self.pool.allocate(count, request.request_class)

    def publish(self, request: Request, num_planned_tokens: int = 0) -> None:
        """Indexes the blocks that the computed tokens have filled, and the next ``num_planned_tokens`` will fill.

        Who publishes planned tokens must ``retract`` them if they are not computed.
        """
        if not self.enable_prefix_cache:
            return
        num_full = (request.num_computed_tokens + num_planned_tokens) // self.block_size
        if num_full <= request.num_indexed_blocks:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.salt)
        for i in range(request.num_indexed_blocks, num_full):
            self.pool.publish(request.block_ids[i], request.block_hashes[i])
        request.num_indexed_blocks = num_full

    def retract(self, request: Request, num_tokens: int) -> list[int]:
        """Undoes ``publish`` beyond the first ``num_tokens`` tokens; returns the blocks, which no longer are found.

        They must be the request's own: none of them may come from the hit that it was admitted with.
        """
        num_full = num_tokens // self.block_size
        block_ids = request.block_ids[num_full : request.num_indexed_blocks]
        self.pool.unpublish(block_ids)
        request.num_indexed_blocks = min(request.num_indexed_blocks, num_full)
        return block_ids

    def cut(self, request: Request, num_blocks: int) -> None:
        """Takes back all but the first ``num_blocks`` blocks, which are full: the rest is computed again."""
        self.pool.release(request.block_ids[num_blocks:], request.request_class)
        request.block_ids = request.block_ids[:num_blocks]
        request.num_computed_tokens = num_blocks * self.block_size
        request.num_indexed_blocks = min(request.num_indexed_blocks, num_blocks)

    def release(self, request: Request) -> None:
        """Takes every block back; what is indexed stays cached until it is evicted."""
        self.pool.release(request.block_ids, request.request_class)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0

    def distrust(self, request: Request) -> None:
        """Nobody finds this request's blocks in the prefix index any more; those who hold some keep them."""
        self.pool.unpublish(request.block_ids)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError if pool, index and the tables of ``requests`` (all that hold blocks) disagree."""
        live = list(requests)
        self.pool.check_integrity((r.request_class, r.block_ids) for r in live)
        for r in live:
            needed = -(-r.num_computed_tokens // self.block_size)
            assert len(r.block_ids) >= needed, f"{r.request_id}: {len(r.block_ids)} blocks, {needed} needed"
            assert r.num_computed_tokens <= r.num_tokens
            assert r.num_indexed_blocks * self.block_size <= r.num_computed_tokens, f"{r.request_id} published too much"
