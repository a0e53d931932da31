"""Which cached block goes first."""

import pytest

from neaptide.engine.kv.eviction import CountedEvictionOrder, EvictionOrder

KINDS = (EvictionOrder, CountedEvictionOrder)
pytestmark = pytest.mark.parametrize("kind", KINDS)
Kind = type[EvictionOrder] | type[CountedEvictionOrder]


def order(kind: Kind, *blocks: int) -> EvictionOrder | CountedEvictionOrder:
    made = kind()
    for block in blocks:
        made.add(block)
    return made


def test_the_block_that_came_first_goes_first(kind: Kind) -> None:
    blocks = order(kind, 3, 1, 2)
    assert list(blocks) == [3, 1, 2]
    assert [*blocks.pop(2), *blocks.pop(1)] == [3, 1, 2]


def test_a_block_that_was_in_use_again_goes_last(kind: Kind) -> None:
    blocks = order(kind, 3, 1, 2)
    blocks.remove(3)
    assert 3 not in blocks
    blocks.add(3)
    assert list(blocks) == [1, 2, 3]


def test_it_knows_how_many_it_has_and_which(kind: Kind) -> None:
    blocks = order(kind, 3, 1)
    blocks.pop(1)
    assert (len(blocks), 1 in blocks, 3 in blocks) == (1, True, False)


def test_nothing_is_taken_that_is_not_there(kind: Kind) -> None:
    with pytest.raises(KeyError):
        order(kind, 3).remove(1)
    assert order(kind, 3).pop(2) == [3]


def test_buckets_go_in_their_order_and_each_by_age(kind: Kind) -> None:
    blocks = order(kind)
    for block, bucket in ((5, 2), (6, 0), (7, 2), (8, 1)):
        blocks.add(block, bucket)
    assert list(blocks) == [6, 8, 5, 7]
    assert {number: list(blocks.bucket(number)) for number in blocks.numbers if list(blocks.bucket(number))} == {
        0: [6],
        1: [8],
        2: [5, 7],
    }
    assert [blocks.bucket_of(block) for block in (5, 6)] == [2, 0]
    assert blocks.pop(2) == [6, 8]


def test_only_the_counted_order_keeps_the_age_of_a_block_that_moves(kind: Kind) -> None:
    blocks = order(kind)
    for block, bucket in ((5, 3), (6, 2), (7, 2)):
        blocks.add(block, bucket)
    blocks.move(5, 2)
    assert list(blocks) == ([5, 6, 7] if kind is CountedEvictionOrder else [6, 7, 5])
