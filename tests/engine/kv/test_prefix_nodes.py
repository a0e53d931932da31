"""Prefix segments: what their blocks are worth, and when."""

from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.eviction import (
    LAST_USE,
    NUM_BUCKETS,
    PLANNED,
    SEEN_ONLINE,
    UNWANTED,
    WANTED,
    planned_bucket,
    wanted_bucket,
)
from neaptide.engine.kv.prefix_nodes import PrefixNode, nodes_of_blocks, own_node
from neaptide.engine.params import RequestClass

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def cached(pool: BlockPool, name: bytes, *prefix_nodes: PrefixNode, owner: RequestClass = OFFLINE) -> int:
    (block,) = pool.allocate(1, owner)
    pool.publish([(block, name)])
    for prefix_node in prefix_nodes:
        pool.mark([(block, prefix_node)])
    pool.release([block], owner)
    return block


def test_buckets_double() -> None:
    assert [wanted_bucket(n) for n in (1, 2, 3, 4, 7, 8)] == [WANTED, 3, 3, 4, 4, 5]
    assert wanted_bucket(1 << 40) == PLANNED - 1
    assert UNWANTED < SEEN_ONLINE < WANTED < PLANNED


def test_what_comes_next_has_the_last_bucket_and_what_comes_last_the_first() -> None:
    assert [planned_bucket(use) for use in (0, 1)] == [NUM_BUCKETS - 1, NUM_BUCKETS - 2]
    assert planned_bucket(LAST_USE) == planned_bucket(1 << 40) == PLANNED


def test_what_is_wanted_most_goes_last() -> None:
    pool = BlockPool(5, by_reuse=True)
    often = cached(pool, b"often", PrefixNode(16, 9))
    once = cached(pool, b"once", PrefixNode(16, 1))
    chat = cached(pool, b"chat", owner=ONLINE)
    nobody = cached(pool, b"nobody")
    assert list(pool.eviction_order()) == [nobody, chat, once, often]
    assert pool.allocate(3, OFFLINE) == [4, nobody, chat]


def test_by_age_alone_nothing_of_that_counts() -> None:
    pool = BlockPool(3)
    order = [cached(pool, b"often", PrefixNode(16, 9)), cached(pool, b"chat", owner=ONLINE), cached(pool, b"nobody")]
    assert list(pool.eviction_order()) == order


def test_blocks_go_earlier_as_fewer_want_them() -> None:
    pool, shared = BlockPool(2, by_reuse=True), PrefixNode(16, 4)
    first, other = cached(pool, b"a", shared), cached(pool, b"b", PrefixNode(16, 2))
    assert list(pool.eviction_order()) == [other, first]
    for _ in range(3):
        pool.want_less((shared,))
    assert list(pool.eviction_order()) == [first, other]
    pool.check_integrity([])


def test_a_block_that_two_jobs_share_stays_for_the_other_one() -> None:
    pool, mine, theirs = BlockPool(1, by_reuse=True), PrefixNode(16, 1), PrefixNode(16, 5)
    block = cached(pool, b"a", mine, theirs)
    pool.want_less((theirs,), 5)
    assert pool.bucket_of(pool.nodes_of(block), OFFLINE) == WANTED
    pool.want_less((mine,))
    assert pool.bucket_of(pool.nodes_of(block), OFFLINE) == UNWANTED


def test_what_an_online_request_read_last_stays_its_when_no_row_wants_it_any_more() -> None:
    """A system prompt that a batch shares with chats: the batch ends, and the chats go on."""
    for counted in (False, True):
        pool, shared = BlockPool(3, by_reuse=True, counted=counted), PrefixNode(16, 3)
        chat = cached(pool, b"system prompt", shared, owner=ONLINE)
        row = cached(pool, b"document", shared)
        pool.want_less((shared,), 3)
        nobody = cached(pool, b"nobody")
        assert list(pool.eviction_order()) == [row, nobody, chat]
        pool.check_integrity([])


def test_counted_exactly_five_are_more_than_four_and_jobs_add_up() -> None:
    def order(counted: bool) -> list[bytes | None]:
        pool = BlockPool(4, by_reuse=True, counted=counted)
        cached(pool, b"five", PrefixNode(16, 5))
        cached(pool, b"two and four", PrefixNode(16, 2), PrefixNode(16, 4))
        cached(pool, b"four", PrefixNode(16, 4))
        cached(pool, b"chat", owner=ONLINE)
        pool.check_integrity([])
        return [pool.hash_of(block) for block in pool.eviction_order()]

    assert order(counted=True) == [b"chat", b"four", b"five", b"two and four"]
    assert order(counted=False) == [b"chat", b"five", b"two and four", b"four"]  # from 4 to 7 is one class


def test_counted_exactly_every_request_that_ends_moves_a_block() -> None:
    pool, shared = BlockPool(3, by_reuse=True, counted=True), PrefixNode(16, 7)
    blocks = [cached(pool, b"a", shared), cached(pool, b"b", PrefixNode(16, 6)), cached(pool, b"c", owner=ONLINE)]
    orders = []
    for _ in range(3):
        pool.want_less((shared,), 1 if shared.num_wanting > 5 else 5)
        pool.check_integrity([])
        orders.append([blocks.index(block) for block in pool.eviction_order()])
    # Six want each: the one that was released first goes first. Then five; then none, not even who chats.
    assert orders == [[2, 0, 1], [2, 0, 1], [0, 2, 1]]


def test_a_prefix_ends_in_the_first_segment_that_reaches_so_far() -> None:
    document, chapter, own = PrefixNode(32, 9), PrefixNode(48, 3), own_node()
    path = (document, chapter, own)
    assert nodes_of_blocks(path, 0, [0, 1, 2, 3, 4], 16) == [document, document, chapter, own, own]
    assert nodes_of_blocks(path, 2, [7, 8], 16) == [chapter, own]
    assert nodes_of_blocks(path, 0, [0, 1], 32) == [
        document,
        own,
    ]  # a block that reaches into the next is the next's


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([ONLINE, OFFLINE])), min_size=1, max_size=12), st.data())
def test_no_block_that_is_wanted_goes_while_one_is_left_that_is_wanted_less(
    made: list[tuple[int, RequestClass]], data: st.DataObject
) -> None:
    pool = BlockPool(len(made), by_reuse=True)
    prefix_nodes = [PrefixNode(16, count) for count in (1, 4, 20)]
    belongs = {
        cached(pool, bytes([k]), prefix_nodes[s], owner=owner): prefix_nodes[s] for k, (s, owner) in enumerate(made)
    }
    for _ in range(data.draw(st.integers(0, 20))):
        prefix_node = data.draw(st.sampled_from([s for s in prefix_nodes if s.num_wanting] or [None]))
        if prefix_node is not None:
            pool.want_less((prefix_node,))
    pool.check_integrity([])
    wanted = [belongs[block].num_wanting.bit_length() for block in pool.eviction_order()]
    assert wanted == sorted(wanted)


def planned(use: int | None, num_wanting: int = 1) -> PrefixNode:
    return PrefixNode(16, num_wanting, lambda: use)


def test_what_a_plan_wants_sooner_stays_longer_however_few_want_it() -> None:
    pool = BlockPool(6, by_reuse=True)
    often = cached(pool, b"often, in a while", planned(7, 20))
    soon = cached(pool, b"once, soon", planned(2))
    unplanned = cached(pool, b"often, behind the plan", planned(None, 20))
    chat = cached(pool, b"chat", owner=ONLINE)
    nobody = cached(pool, b"nobody", planned(1, 0))
    assert list(pool.eviction_order()) == [nobody, chat, unplanned, often, soon]


def test_a_block_of_two_jobs_comes_as_soon_as_that_of_one() -> None:
    pool = BlockPool(2, by_reuse=True)
    both, one = cached(pool, b"both", planned(9), planned(3)), cached(pool, b"one", planned(5))
    assert list(pool.eviction_order()) == [one, both]


def test_a_preempted_request_comes_before_all_that_is_planned() -> None:
    pool, first, back = BlockPool(2, by_reuse=True), planned(1), planned(None)
    blocks = [cached(pool, b"back", back), cached(pool, b"first", first)]
    back.num_returned = 1
    pool.look_up_uses([back])
    assert list(pool.eviction_order()) == blocks[::-1]


def test_counted_exactly_a_plan_does_not_count() -> None:
    """As published, Echo knows how many want a block and not when."""
    pool = BlockPool(2, by_reuse=True, counted=True)
    soon, often = cached(pool, b"soon", planned(1)), cached(pool, b"often", planned(9, 2))
    assert list(pool.eviction_order()) == [soon, often]


USES = st.none() | st.integers(0, 6)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([ONLINE, OFFLINE])), min_size=1, max_size=12),
    st.lists(st.tuples(USES, st.integers(0, 2)), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), USES), max_size=10),
)
def test_no_block_goes_while_one_is_left_that_the_plan_wants_later_or_not_at_all(
    made: list[tuple[int, RequestClass]], first: list[tuple[int | None, int]], then: list[tuple[int, int | None]]
) -> None:
    pool = BlockPool(len(made), by_reuse=True)
    uses = [use for use, _ in first]
    prefix_nodes = [PrefixNode(16, num, lambda k=k: uses[k]) for k, (_, num) in enumerate(first)]  # type: ignore[misc]
    belongs = {cached(pool, bytes([k]), prefix_nodes[s], owner=owner): s for k, (s, owner) in enumerate(made)}
    for number, use in then:
        uses[number] = use
        pool.look_up_uses([prefix_nodes[number]])
        pool.check_integrity([])
    order = [belongs[block] for block in pool.eviction_order()]
    wanted = [s for s in order if prefix_nodes[s].num_wanting]
    assert order[len(order) - len(wanted) :] == wanted, "what no request wants goes first"
    unplanned = [s for s in wanted if uses[s] is None]
    assert wanted[: len(unplanned)] == unplanned
    known = [uses[s] or 0 for s in wanted[len(unplanned) :]]
    assert known == sorted(known, reverse=True)
