"""Which cached block goes first."""

import pytest

from neaptide.engine.kv.eviction import EvictionOrder


def order(*blocks: int) -> EvictionOrder:
    made = EvictionOrder()
    for block in blocks:
        made.add(block)
    return made


def test_the_block_that_came_first_goes_first() -> None:
    blocks = order(3, 1, 2)
    assert list(blocks) == [3, 1, 2]
    assert [*blocks.pop(2), *blocks.pop(1)] == [3, 1, 2]


def test_a_block_that_was_in_use_again_goes_last() -> None:
    blocks = order(3, 1, 2)
    blocks.remove(3)
    assert 3 not in blocks
    blocks.add(3)
    assert list(blocks) == [1, 2, 3]


def test_it_knows_how_many_it_has_and_which() -> None:
    blocks = order(3, 1)
    blocks.pop(1)
    assert (len(blocks), 1 in blocks, 3 in blocks) == (1, True, False)


def test_nothing_is_taken_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        order(3).remove(1)
    assert order(3).pop(2) == [3]
