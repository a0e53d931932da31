"""The KV cache whose blocks an online and an offline request may share slot by slot, and a draft of it.

It has no prefix cache: a block with two tenants is never hashed, and BROS, whose cache this is, has none.
"""

from collections.abc import Iterable
from operator import methodcaller

from neaptide.engine.arrays import IntArray
from neaptide.engine.config import CacheConfig
from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.block_table import REVERSED
from neaptide.engine.kv.draft import KVDraft, PrefixHit
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.kv.slot_copies import SlotCopies
from neaptide.engine.params import RequestClass
from neaptide.engine.request import Request
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.table import RequestTable
from neaptide_lab.two_tenants.blocks import NOWHERE, TenantCopies, TwoTenants


class TwoTenantCache(KVCacheManager):
    """
    Args:
        num_blocks: blocks of the pool.
        table: rows of the running requests. Rows of offline requests that have lost slots are not kept up: they are
            written anew before such a request runs.
        num_host_blocks: blocks of host memory, for slots that online requests overwrite.
    """

    def __init__(self, num_blocks: int, table: RequestTable, num_host_blocks: int) -> None:
        super().__init__(num_blocks, table, enable_prefix_cache=False)
        self._tenants = TwoTenants(
            self._pool, num_blocks, self.block_size, num_host_blocks, lambda request: request.num_uncomputed_tokens
        )

    def draft(self) -> "TwoTenantDraft":
        self._tenants.begin()
        return TwoTenantDraft(self._pool, self.block_size, self._tenants)

    def admit(self, request: Request, hit: PrefixHit) -> None:
        assert not hit.num_tokens
        self._tenants.add(request)

    def grow(self, request: Request, num_tokens: int) -> None:
        if self._tenants.grow(request, request.num_computed_tokens, num_tokens):
            tenant = self._tenants.tenant(request)
            assert tenant is not None
            direction = 0 if request.is_online else REVERSED
            entries = [0 if block == NOWHERE else block | direction for block in tenant.blocks]
            self.table.blocks.write(request.slot, entries)

    def grow_rows(self, rows: IntArray) -> None:
        for request in self.table.requests_of(rows):
            self.grow(request, 1)

    def swap_out(self, request: Request) -> None:
        """All its tokens go to host memory; it keeps its seat."""
        self._tenants.swap_out(request)

    def take_slot_copies(self) -> SlotCopies | None:
        return self._tenants.take_copies() or None

    def invalidate_copies(self, copies: SlotCopies) -> list[Request]:
        assert isinstance(copies, TenantCopies)
        requests = {request.request_id: request for request in self.table.requests if request is not None}
        committed: dict[Request, int] = {}
        for request_id, place in copies.touched:
            if (request := requests.get(request_id)) is not None:
                committed[request] = min(place, committed.get(request, place))
        damaged = [request for request, num_blocks in committed.items() if num_blocks < request.num_blocks]
        for request in damaged:
            self.cut(request, committed[request])
        return damaged

    def release(self, request: Request) -> None:
        super().release(request)
        if request.table is not None:
            self._tenants.remove(request)

    def invalidate(self, request: Request) -> None:
        """No request could have found its blocks."""

    def unreferenced(self, block_ids: Iterable[int]) -> list[int]:
        return super().unreferenced(block & (REVERSED - 1) for block in block_ids)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        self._pool.check_integrity((request.request_class, self._tenants.held(request)) for request in requests)
        self._tenants.check_integrity()

    def _give_back(self, request: Request, num_blocks: int) -> None:
        self.table.blocks.cut(request.slot, num_blocks)
        self._tenants.cut(request, num_blocks)


class TwoTenantDraft(KVDraft):
    """As ``KVDraft``."""

    def __init__(self, pool: BlockPool, block_size: int, tenants: TwoTenants) -> None:
        super().__init__(pool, block_size, enable_prefix_cache=False)
        self._tenants = tenants.fork(self.pool, self.num_uncomputed)

    @property
    def num_copied_aside(self) -> int:
        return self._tenants.copies.num_blocks(self.block_size)

    def blocks_of(self, request: Request) -> list[int]:
        return self._tenants.held(request)

    def num_away(self, request: Request) -> int:
        return self._tenants.num_away(request)

    def num_preemptible(self, besides: Request | None = None) -> int:
        return self._tenants.num_preemptible(besides)

    def can_swap_out(self, request: Request) -> bool:
        return self._tenants.can_swap_out(request)

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        return self._tenants.blocks_needed(request, self.num_computed(request), num_tokens)

    def admit(self, request: Request, hit: PrefixHit) -> None:
        self._tenants.add(request)
        self._computed[request] = 0

    def grow(self, request: Request, num_tokens: int) -> None:
        self._tenants.grow(request, self.num_computed(request), num_tokens)

    def grow_rows(self, num_blocks: int, owner: RequestClass) -> None:
        raise NotImplementedError("which slots a request takes depends on the request: they are added one by one")

    def swap_out(self, request: Request) -> None:
        """As ``TwoTenantCache.swap_out``."""
        self._tenants.swap_out(request)

    def release(self, request: Request) -> None:
        self._tenants.remove(request)
        self._computed[request] = 0


# ---- for a policy that runs with this cache or without ----


def two_tenant_cache(config: CacheConfig, num_blocks: int, table: RequestTable) -> TwoTenantCache | None:
    """The cache, if the executor copies slots and there is host memory for them (``Scheduler.own_cache``)."""
    if not config.slot_copies or not config.num_host_blocks:
        return None
    return TwoTenantCache(num_blocks, table, config.num_host_blocks)


def num_away(kv: KVDraft, request: Request) -> int:
    """Slots of the request that must come back from host memory before it runs."""
    return kv.num_away(request) if isinstance(kv, TwoTenantDraft) else 0


def num_preemptible(kv: KVDraft, besides: Request | None = None) -> int:
    """Blocks beyond the available ones that online requests may have.

    An offline request alone has slots in them. It takes no part in the step and is not ``besides``.
    """
    return kv.num_preemptible(besides) if isinstance(kv, TwoTenantDraft) else 0


def num_copied_aside(kv: KVDraft) -> int:
    """Slots that go to host memory or come from it in the step, in blocks."""
    return kv.num_copied_aside if isinstance(kv, TwoTenantDraft) else 0


def swap_out_or_preempt(draft: Draft, victim: Request) -> None:
    """Takes the victim's blocks; it keeps its tokens in host memory if it can."""
    if isinstance(draft.kv, TwoTenantDraft) and draft.kv.can_swap_out(victim):
        assert not draft.is_scheduled(victim)
        draft.on_cache(methodcaller("swap_out", victim))
    else:
        draft.preempt(victim)
