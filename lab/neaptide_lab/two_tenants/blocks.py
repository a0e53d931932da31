"""Blocks with two tenants: one online and one offline request, whose tokens grow towards each other.

BROS (arXiv 2504.09590), section 5. In a block the online tenant's tokens lie from the first slot on, the offline one's
from the last slot back. Where they would meet, the offline tenant's newest slots, and no others, go to host memory
(lazy checkpoint); they come back before it runs again, into their own places if those are free by then, else into a
fresh block together with what the request has kept.

A block of host memory is set aside for a block of an offline request as soon as it has another tenant, so that there is
room for every slot that it may lose later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.engine.params import RequestClass
from neaptide.engine.request import Request

NOWHERE = -1
"""In the place of a block whose tokens are in host memory, all of them."""
NUM_FACTS = 6
ONLINE_FILL, ONLINE_TENANT, OFFLINE_FILL, OFFLINE_TENANT, PLACE, HOST_BLOCK = range(NUM_FACTS)
"""Facts of a block: slots taken from its begin and from its end, and by which tenants (their numbers); its place in the
offline tenant's table, and the block of host memory set aside for it. -1 for none."""


@dataclass(slots=True)
class TenantCopies(SlotCopies):
    """The copies of a step (section 5.2), and whose they are."""

    touched: list[tuple[str, int]] = field(default_factory=list)
    """Requests and block table indices of the copied tokens."""
    num_checkpointed: int = 0
    """Requests without missing slots that lost slots to another tenant."""
    num_swapped: int = 0
    """Requests that lost all their blocks."""


class Pool(Protocol):
    """The owner of the blocks, or a draft of it."""

    @property
    def num_available(self) -> int: ...

    def allocate(self, count: int, owner: RequestClass) -> list[int]: ...

    def acquire(self, block_ids: Sequence[int], owner: RequestClass) -> None: ...

    def release(self, block_ids: Sequence[int], owner: RequestClass) -> None: ...


class Tenant:
    """One request's part of the blocks."""

    __slots__ = ("away", "blocks", "host", "number", "request")

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.number = number
        """Counts tenants: the youngest offline one loses its slots first."""
        self.blocks: list[int] = []
        self.host: dict[int, int] = {}
        """Block of host memory set aside for each place in ``blocks``."""
        self.away: dict[int, int] = {}
        """Number of slots in host memory for each place in ``blocks``: the newest ones."""

    def copy(self) -> "Tenant":
        other = Tenant(self.request, self.number)
        other.blocks, other.host, other.away = list(self.blocks), dict(self.host), dict(self.away)
        return other

    @property
    def held(self) -> list[int]:
        return [block for block in self.blocks if block != NOWHERE]


class TwoTenants:
    """Which request's tokens lie in which slots. The same for the cache and for drafts of it (``fork``).

    Args:
        pool: a block with two tenants has two readers there.
        num_host_blocks: blocks of host memory.
        num_uncomputed: tokens that a request lacks; so far an online tenant may still grow in the step being planned.
    """

    def __init__(
        self,
        pool: Pool,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        num_uncomputed: Callable[[Request], int],
    ) -> None:
        self._pool = pool
        self._size = block_size
        self.num_host_blocks = num_host_blocks
        self._num_uncomputed = num_uncomputed
        self._facts: IntArray = np.full((NUM_FACTS, num_blocks), -1, np.int64)
        self._tenants: dict[Request, Tenant] = {}
        self._changed: dict[Request, Tenant | None] | None = None
        """A draft's differences from ``_tenants``, which are then another's."""
        self._by_number: dict[int, Request] = {}
        self._num_tenants = 0
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._host_freed: list[int] = []
        """Free when the step being planned has been submitted: it may still read them."""
        self._taking_part: set[int] = set()
        """Offline tenants in the step being planned: they keep their slots."""
        self.copies = TenantCopies()

    def begin(self) -> None:
        """A step is to be planned behind all those that were."""
        self._host_free += self._host_freed
        self._host_freed = []
        self._taking_part = set()

    def fork(self, pool: Pool, num_uncomputed: Callable[[Request], int]) -> "TwoTenants":
        """A copy for a draft, on its pool; valid until this one changes."""
        other = TwoTenants.__new__(TwoTenants)
        other._pool, other._size, other._num_uncomputed = pool, self._size, num_uncomputed
        other.num_host_blocks = self.num_host_blocks
        other._facts = self._facts.copy()
        other._tenants, other._changed = self._tenants, {}
        other._by_number, other._num_tenants = dict(self._by_number), self._num_tenants
        other._host_free, other._host_freed = list(self._host_free), []
        other._taking_part, other.copies = set(), TenantCopies()
        return other

    def take_copies(self) -> TenantCopies:
        """What the next step has to copy."""
        copies, self.copies = self.copies, TenantCopies()
        return copies

    # ---- asking ----

    def tenant(self, request: Request) -> Tenant | None:
        """Not to be changed."""
        if self._changed is not None and request in self._changed:
            return self._changed[request]
        return self._tenants.get(request)

    def held(self, request: Request) -> list[int]:
        """Blocks in which the request has slots, or may have."""
        tenant = self.tenant(request)
        return [] if tenant is None else tenant.held

    def num_away(self, request: Request) -> int:
        """Slots of the request that are in host memory."""
        tenant = self.tenant(request)
        return 0 if tenant is None or not tenant.away else sum(tenant.away.values())

    def blocks_needed(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """Blocks that ``grow`` takes."""
        tenant, end = self.tenant(request), num_computed + num_tokens
        if tenant is None:
            return -(-end // self._size)
        leaves = sum([self._must_leave(tenant, place, end) for place in tenant.host])
        return leaves + max(-(-end // self._size) - len(tenant.blocks), 0)

    def num_preemptible(self, besides: Request | None = None) -> int:
        """Blocks with offline tenants alone that online requests may have; ``besides`` keeps its own."""
        tenant = None if besides is None else self.tenant(besides)
        return len(self._preemptible(None if tenant is None else tenant.number))

    def can_swap_out(self, request: Request) -> bool:
        tenant = self.tenant(request)
        if request.is_online or tenant is None or tenant.number in self._taking_part:
            return False
        return len(tenant.blocks) - len(tenant.host) <= len(self._host_free)

    # ---- acting ----

    def add(self, request: Request) -> None:
        """The request starts; it has no slots yet."""
        tenant = Tenant(request, self._num_tenants)
        self._num_tenants += 1
        self._by_number[tenant.number] = request
        if self._changed is None:
            self._tenants[request] = tenant
        else:
            self._changed[request] = tenant

    def grow(self, request: Request, num_computed: int, num_tokens: int) -> bool:
        """Slots for the next ``num_tokens`` tokens; an offline request is made whole for that.

        Returns whether its block table has changed. Raises RuntimeError when blocks run out.
        """
        tenant = self._own(request)
        before = list(tenant.blocks)
        end = num_computed + num_tokens
        if not request.is_online:
            self._taking_part.add(tenant.number)
            for place in sorted(tenant.host):
                self._make_whole(tenant, place, num_computed, end)
        missing = -(-end // self._size) - len(tenant.blocks)
        if missing > 0:
            tenant.blocks += self._online_blocks(missing) if request.is_online else self._offline_blocks(missing)
        fill = self._fill_online if request.is_online else self._fill_offline
        for place in range(num_computed // self._size, -(-end // self._size)):
            fill(tenant, place, min(self._size, end - place * self._size))
        return tenant.blocks != before

    def swap_out(self, request: Request) -> None:
        """All its tokens go to host memory and it leaves its blocks; it keeps its seat."""
        tenant = self._own(request)
        self.copies.num_swapped += 1
        for place, block in enumerate(tenant.blocks):
            if block != NOWHERE:
                if place not in tenant.host:
                    self._set_aside(tenant, place)
                self._save(tenant, place, keep=0)

    def cut(self, request: Request, num_blocks: int) -> None:
        """Takes back all but the first ``num_blocks`` blocks."""
        tenant = self._own(request)
        gone = [block for block in tenant.blocks[num_blocks:] if block != NOWHERE]
        del tenant.blocks[num_blocks:]
        if request.is_online:
            self._facts[ONLINE_FILL : ONLINE_TENANT + 1, gone] = -1
        else:
            self._facts[OFFLINE_FILL:, gone] = -1
        self._pool.release(gone, request.request_class)
        for place in [place for place in tenant.host if place >= num_blocks]:
            self._host_freed.append(tenant.host.pop(place))
            tenant.away.pop(place, None)

    def remove(self, request: Request) -> None:
        """The request ends, or waits again."""
        self.cut(request, 0)
        del self._by_number[self._own(request).number]
        if self._changed is None:
            del self._tenants[request]
        else:
            self._changed[request] = None

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot has two owners, or if blocks, tenants and host memory disagree."""
        facts, size = np.full_like(self._facts, -1), self._size
        for tenant in self._tenants.values():
            assert self._by_number[tenant.number] is tenant.request
            for place, block in enumerate(tenant.blocks):
                if block == NOWHERE:
                    assert tenant.away[place] > 0, "tokens are neither in a block nor in host memory"
                elif tenant.request.is_online:
                    assert facts[ONLINE_TENANT, block] == -1, "a block has two online tenants"
                    facts[ONLINE_FILL, block] = self._facts[ONLINE_FILL, block]
                    facts[ONLINE_TENANT, block] = tenant.number
                else:
                    assert facts[OFFLINE_TENANT, block] == -1, "a block has two offline tenants"
                    facts[OFFLINE_FILL, block] = self._facts[OFFLINE_FILL, block]
                    facts[OFFLINE_TENANT:, block] = tenant.number, place, tenant.host.get(place, -1)
            assert tenant.away.keys() <= tenant.host.keys()
        assert len(self._by_number) == len(self._tenants)
        assert (facts == self._facts).all(), "the blocks name other tenants than the tables"
        assert (np.maximum(facts[ONLINE_FILL], 0) + np.maximum(facts[OFFLINE_FILL], 0) <= size).all(), (
            "a slot has two owners"
        )
        is_shared = (facts[ONLINE_TENANT] >= 0) & (facts[OFFLINE_TENANT] >= 0)
        assert (facts[HOST_BLOCK, is_shared] >= 0).all(), "a block with two tenants has no room in host memory"
        in_use = [host for tenant in self._tenants.values() for host in tenant.host.values()]
        everything = sorted([*in_use, *self._host_free, *self._host_freed])
        assert everything == list(range(self.num_host_blocks)), "a block of host memory is lost or held twice"

    # ---- online tenants ----

    def _online_blocks(self, count: int) -> list[int]:
        """Free blocks, then such as an offline request alone has slots in (``FindPreemptBlock``)."""
        num_free = min(count, self._pool.num_available)
        blocks = self._pool.allocate(num_free, RequestClass.ONLINE)
        if num_free < count:
            preempted: list[int] = self._preemptible()[: count - num_free].tolist()
            if num_free + len(preempted) < count:
                raise RuntimeError(f"{count} blocks wanted, {num_free} free and {len(preempted)} to be preempted")
            for block in preempted:
                if self._facts[HOST_BLOCK, block] < 0:
                    tenant = self._own(self._by_number[int(self._facts[OFFLINE_TENANT, block])])
                    self._set_aside(tenant, int(self._facts[PLACE, block]))
            self._pool.acquire(preempted, RequestClass.ONLINE)
            blocks += preempted
        return blocks

    def _preemptible(self, besides: int | None = None) -> IntArray:
        """Blocks with an offline tenant alone that takes no part in the step, in the order in which they go, as many
        as host memory has room for.

        Most empty slots first, as published; where that leaves it open the youngest request's, its last block first.
        """
        facts = self._facts
        (blocks,) = ((facts[ONLINE_FILL] < 0) & (facts[OFFLINE_FILL] > 0)).nonzero()
        numbers = facts[OFFLINE_TENANT, blocks]
        kept = self._taking_part if besides is None else {*self._taking_part, besides}
        if kept:
            is_free = ~np.isin(numbers, list(kept))
            blocks, numbers = blocks[is_free], numbers[is_free]
        blocks = blocks[np.lexsort((-facts[PLACE, blocks], -numbers, facts[OFFLINE_FILL, blocks]))]
        num_set_aside = (facts[HOST_BLOCK, blocks] < 0).cumsum()
        preemptible: IntArray = blocks[num_set_aside <= len(self._host_free)]
        return preemptible

    def _fill_online(self, tenant: Tenant, place: int, fill: int) -> None:
        facts, block = self._facts, tenant.blocks[place]
        facts[ONLINE_FILL, block], facts[ONLINE_TENANT, block] = fill, tenant.number
        if facts[OFFLINE_FILL, block] > self._size - fill:
            loser = self._own(self._by_number[int(facts[OFFLINE_TENANT, block])])
            assert loser.number not in self._taking_part
            self.copies.num_checkpointed += not loser.away
            self._save(loser, int(facts[PLACE, block]), keep=self._size - fill)

    # ---- offline tenants ----

    def _offline_blocks(self, count: int) -> list[int]:
        return self._pool.allocate(count, RequestClass.OFFLINE)

    def _fill_offline(self, tenant: Tenant, place: int, fill: int) -> None:
        self._facts[OFFLINE_FILL:, tenant.blocks[place]] = fill, tenant.number, place, tenant.host.get(place, -1)

    def _must_leave(self, tenant: Tenant, place: int, end: int) -> bool:
        """Whether this block of its table has to be another one if the offline request goes on to ``end`` tokens."""
        wanted, block = min(self._size, end - place * self._size), tenant.blocks[place]
        if wanted <= 0:
            return False
        return block == NOWHERE or self._online_reach(block) + wanted > self._size

    def _online_reach(self, block: int) -> int:
        """Slots of the block that its online tenant may have at the end of the step being planned."""
        fill = int(self._facts[ONLINE_FILL, block])
        if fill < 0:
            return 0
        lacks = self._num_uncomputed(self._by_number[int(self._facts[ONLINE_TENANT, block])])
        return min(fill + lacks, self._size)

    def _make_whole(self, tenant: Tenant, place: int, start: int, end: int) -> None:
        """Brings what the block has lost back from host memory, into a fresh block where it has to leave its own."""
        size, block = self._size, tenant.blocks[place]
        stored = min(size, start - place * size)
        if stored < 0:
            return
        kept = 0 if block == NOWHERE else min(int(self._facts[OFFLINE_FILL, block]), stored)
        if self._must_leave(tenant, place, end):
            (fresh,) = self._offline_blocks(1)
            if kept:
                self.copies.moves.append(SlotRun(block, fresh, size - kept, size))
                self.copies.touched.append((tenant.request.request_id, place))
            if block != NOWHERE:
                self._leave(block)
            tenant.blocks[place] = block = fresh
        if stored > kept:
            self.copies.restores.append(SlotRun(tenant.host[place], block, size - stored, size - kept))
            self.copies.touched.append((tenant.request.request_id, place))
        tenant.away.pop(place, None)
        if self._facts[ONLINE_FILL, block] < 0:
            self._host_freed.append(tenant.host.pop(place))
        self._fill_offline(tenant, place, stored)

    def _set_aside(self, tenant: Tenant, place: int) -> None:
        tenant.host[place] = self._facts[HOST_BLOCK, tenant.blocks[place]] = self._host_free.pop()

    def _save(self, tenant: Tenant, place: int, keep: int) -> None:
        """All but the ``keep`` oldest slots of a block go to host memory; without any the tenant leaves it."""
        size, block = self._size, tenant.blocks[place]
        kept = int(self._facts[OFFLINE_FILL, block])
        self.copies.saves.append(SlotRun(block, tenant.host[place], size - kept, size - keep))
        self.copies.touched.append((tenant.request.request_id, place))
        tenant.away[place] = tenant.away.get(place, 0) + kept - keep
        if keep:
            self._facts[OFFLINE_FILL, block] = keep
        else:
            self._leave(block)
            tenant.blocks[place] = NOWHERE

    def _leave(self, block: int) -> None:
        self._facts[OFFLINE_FILL:, block] = -1
        self._pool.release([block], RequestClass.OFFLINE)

    def _own(self, request: Request) -> Tenant:
        """To be changed."""
        if self._changed is None:
            return self._tenants[request]
        if request not in self._changed:
            self._changed[request] = self._tenants[request].copy()
        tenant = self._changed[request]
        assert tenant is not None
        return tenant
