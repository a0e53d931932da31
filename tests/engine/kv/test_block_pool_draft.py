"""A draft of the block pool gives the very blocks that the pool gives when it is applied, and changes nothing."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.eviction import SEEN_ONLINE
from neaptide.engine.kv.pool_draft import BlockPoolDraft
from neaptide.engine.kv.prefix_nodes import PrefixNode
from neaptide.engine.params import RequestClass

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
NUM_BLOCKS = 5
CHAINS = ([b"a", b"ab", b"abc"], [b"a", b"ax"], [b"z", b"zz", b"zzz", b"zzzz"])
"""Prefixes by the hashes of their blocks; the first two share a block."""


@dataclass(frozen=True)
class Allocate:
    count: int
    owner: RequestClass


@dataclass(frozen=True)
class Compute:
    """Reads what is cached of a chain, and computes and publishes the rest of it, if there is room."""

    chain: int
    owner: RequestClass


@dataclass(frozen=True)
class Publish:
    """Offers the blocks of a holder as those of a chain."""

    holder: int
    chain: int


@dataclass(frozen=True)
class Release:
    holder: int


Operation = Allocate | Compute | Publish | Release
owners = st.sampled_from([ONLINE, OFFLINE])
chains = st.integers(0, len(CHAINS) - 1)
holders = st.integers(0, 9)
operations = st.lists(
    st.one_of(
        st.builds(Allocate, st.integers(0, 4), owners),
        st.builds(Compute, chains, owners),
        st.builds(Publish, holders, chains),
        st.builds(Release, holders),
    ),
    max_size=25,
)


@dataclass
class Player:
    """Plays operations on a pool or on a draft of it."""

    pool: BlockPool | BlockPoolDraft
    held: list[tuple[RequestClass, list[int]]] = field(default_factory=list)

    def play(self, operation: Operation) -> list[int]:
        """Returns the blocks concerned."""
        pool, held = self.pool, self.held
        blocks: list[int] = []
        match operation:
            case Allocate(count, owner):
                blocks = pool.allocate(min(count, pool.num_available), owner)
                held.append((owner, blocks))
            case Compute(chain, owner):
                blocks = self.find(CHAINS[chain])
                pool.acquire(blocks, owner)
                if len(CHAINS[chain]) - len(blocks) <= pool.num_available:
                    blocks = blocks + pool.allocate(len(CHAINS[chain]) - len(blocks), owner)
                    for block, block_hash in zip(blocks, CHAINS[chain], strict=True):
                        pool.publish([(block, block_hash)])
                held.append((owner, blocks))
            case Publish(holder, chain) if held:
                _, blocks = held[holder % len(held)]
                for block, block_hash in zip(blocks, CHAINS[chain], strict=False):
                    pool.publish([(block, block_hash)])
            case Release(holder) if held:
                owner, blocks = held.pop(holder % len(held))
                pool.release(blocks, owner)
        return blocks

    def find(self, hashes: list[bytes]) -> list[int]:
        index = self.pool if isinstance(self.pool, BlockPoolDraft) else self.pool.index
        return index.longest_prefix(hashes)

    def state(self) -> object:
        """All that may be asked of it."""
        pool, every = self.pool, range(NUM_BLOCKS)
        num_unheld = pool.ref_counts.count(0) if isinstance(pool, BlockPool) else pool.num_unheld(every)
        return (
            (pool.num_available, pool.num_online, pool.num_offline),
            list(pool.ref_counts) if isinstance(pool, BlockPool) else [pool.ref_cnt(block) for block in every],
            num_unheld,
            [self.find(chain) for chain in CHAINS],
        )


def played(before: list[Operation], by_reuse: bool = False, counted: bool = False) -> tuple[BlockPool, Player]:
    pool = BlockPool(NUM_BLOCKS, by_reuse, counted)
    player = Player(pool)
    prefix_nodes = [PrefixNode(16, num, lambda use=use: use) for num, use in ((1, None), (3, 5), (9, 8))]  # type: ignore[misc]
    for operation in before:
        blocks = player.play(operation)
        if isinstance(operation, Compute):
            pool.mark((block, prefix_nodes[operation.chain]) for block in blocks)
    return pool, player


@settings(max_examples=300)
@given(operations, operations, st.booleans(), st.booleans())
@example(  # what was evicted and filled again belongs to other segments
    before=[Compute(0, ONLINE)],
    then=[Release(0), Compute(2, ONLINE), Release(0), Allocate(1, ONLINE)],
    by_reuse=True,
    counted=False,
)
def test_the_pool_does_afterwards_what_the_draft_did(
    before: list[Operation], then: list[Operation], by_reuse: bool, counted: bool
) -> None:
    pool, player = played(before, by_reuse, counted)
    drafted = Player(BlockPoolDraft(pool), list(player.held))
    foreseen = [(drafted.state(), drafted.play(operation), drafted.state()) for operation in then]
    assert [(player.state(), player.play(operation), player.state()) for operation in then] == foreseen
    assert player.held == drafted.held
    pool.check_integrity(player.held)


@given(operations, operations)
def test_a_draft_changes_nothing_so_that_another_gives_the_same(before: list[Operation], then: list[Operation]) -> None:
    pool, player = played(before)
    state, order = player.state(), list(pool.eviction_order())
    free = pool.free_blocks(0, pool.num_free)
    drafts = [Player(BlockPoolDraft(pool), list(player.held)) for _ in range(2)]
    first, second = ([draft.play(operation) for operation in then] for draft in drafts)
    assert first == second
    assert (player.state(), list(pool.eviction_order())) == (state, order)
    assert pool.free_blocks(0, pool.num_free) == free
    pool.check_integrity(player.held)


@given(operations, operations, st.booleans(), st.integers(0, NUM_BLOCKS), st.sets(st.integers(0, NUM_BLOCKS - 1)))
def test_evicted_online_blocks_are_counted_as_by_walking_the_eviction_order(
    before: list[Operation], then: list[Operation], counted: bool, count: int, kept: set[int]
) -> None:
    pool, player = played(before, by_reuse=True, counted=counted)
    draft = BlockPoolDraft(pool)
    drafted = Player(draft, list(player.held))
    for operation in then:
        drafted.play(operation)
    keep = {block for block in kept if draft.ref_cnt(block) or block in set(draft.next_evicted(1 << 20))}
    asked = draft.num_online_evicted(count, keep)
    walked = list(draft.next_evicted(count, keep))
    for operation in then:
        player.play(operation)
    held = {block for block in keep if not pool.ref_counts[block]}
    pool.acquire(sorted(held), OFFLINE)
    assert asked == sum(pool.cached_bucket(block) == SEEN_ONLINE for block in walked)


def test_a_draft_evicts_in_the_pools_order_and_then_what_it_released_itself() -> None:
    pool = BlockPool(3)
    old, held = pool.allocate(1, OFFLINE), pool.allocate(1, OFFLINE)
    for block, block_hash in ((old[0], b"old"), (held[0], b"held")):
        pool.publish([(block, block_hash)])
    pool.release(old, OFFLINE)
    draft = BlockPoolDraft(pool)
    draft.release(held, OFFLINE)
    assert draft.allocate(3, ONLINE) == [2, 0, 1]  # the free one, the old one, the one just released
    assert (draft.longest_prefix([b"old"]), draft.longest_prefix([b"held"])) == ([], [])
    assert pool.index.get(b"old") == 0


def test_a_draft_does_not_evict_what_it_reads_itself() -> None:
    pool = BlockPool(2)
    for block_hash in (b"a", b"z"):
        pool.publish([(pool.allocate(1, OFFLINE)[0], block_hash)])
    pool.release([0], OFFLINE)
    pool.release([1], OFFLINE)
    draft = BlockPoolDraft(pool)
    draft.acquire([0], ONLINE)
    assert draft.allocate(1, ONLINE) == [1]
    assert (draft.longest_prefix([b"a"]), draft.longest_prefix([b"z"])) == ([0], [])


def test_more_than_available_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(2)
    draft = BlockPoolDraft(pool)
    draft.allocate(1, ONLINE)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 available"):
        draft.allocate(2, ONLINE)
    assert (draft.num_available, draft.num_online, draft.ref_cnt(1)) == (1, 1, 0)


def test_a_draft_says_what_it_would_evict_and_how_many_want_it() -> None:
    pool, wanted = BlockPool(4), PrefixNode(16, 2)
    blocks = pool.allocate(3, OFFLINE)
    pool.publish(zip(blocks, (b"a", b"b", b"c"), strict=True))
    pool.mark([(blocks[0], wanted)])
    pool.release(blocks, OFFLINE)
    draft = BlockPoolDraft(pool)
    assert [list(draft.next_evicted(count)) for count in (1, 2, 4)] == [[], [2], [2, 1, 0]]
    assert list(draft.next_evicted(3, keep={2})) == [1, 0]
    assert [draft.num_wanting(block) for block in blocks] == [2, 0, 0]
    assert draft.allocate(2, ONLINE) == [3, 2]
    assert list(draft.next_evicted(1)) == [1]
    draft.allocate(2, ONLINE)
    assert draft.num_wanting(blocks[0]) == 0  # what is in it now is another's
