"""Which blocks hold a request's tokens, and in which slot each lies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.kv.block_table import REVERSED, BlockTables

Tables = dict[int, list[int]]
"""Blocks by seat."""


def tables_of(tables: Tables, block_size: int) -> BlockTables:
    made = BlockTables(num_slots=4, max_tokens=6 * block_size, block_size=block_size)
    for slot, blocks in tables.items():
        made.append(slot, blocks)
    return made


some_tables = st.dictionaries(st.integers(0, 3), st.lists(st.integers(0, 99), max_size=6))


def test_token_lies_in_its_slot_of_its_block() -> None:
    tables = BlockTables(num_slots=2, max_tokens=12, block_size=4)
    tables.append(1, [7, 2, 9])
    assert tables.slots(1, 2, 10).tolist() == [30, 31, 8, 9, 10, 11, 36, 37]


@given(some_tables, st.integers(1, 5), st.data())
def test_slots_are_those_of_the_tokens_one_by_one(tables: Tables, block_size: int, data: st.DataObject) -> None:
    slot = data.draw(st.integers(0, 3))
    blocks = tables.get(slot, [])
    end = data.draw(st.integers(0, len(blocks) * block_size))
    start = data.draw(st.integers(0, end))
    expected = [blocks[token // block_size] * block_size + token % block_size for token in range(start, end)]
    assert tables_of(tables, block_size).slots(slot, start, end).tolist() == expected


def test_slots_beyond_31_bits_are_not_cut() -> None:
    tables = BlockTables(num_slots=1, max_tokens=4096, block_size=4096)
    tables.append(0, [2**20])
    assert tables.slots(0, 1, 3).tolist() == [2**32 + 1, 2**32 + 2]


def test_appended_blocks_stand_behind_those_held() -> None:
    tables = BlockTables(num_slots=3, max_tokens=16, block_size=4)
    tables.append(0, [5])
    tables.append(2, [8, 9])
    tables.append_one_each(np.array([2, 0]), [3, 4])
    assert [tables.blocks(slot) for slot in range(3)] == [[5, 4], [], [8, 9, 3]]


def test_cut_leaves_the_first_blocks_and_returns_the_others() -> None:
    tables = BlockTables(num_slots=1, max_tokens=16, block_size=4)
    tables.append(0, [5, 6, 7])
    assert tables.cut(0, 1) == [6, 7]
    assert tables.blocks(0) == [5]
    assert tables.cut(0, 2) == []
    assert tables.blocks(0) == [5]


@given(some_tables, st.integers(1, 5), st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_a_table_is_full_when_its_blocks_have_no_slot_for_the_next_token(
    tables: Tables, block_size: int, num_tokens: list[int]
) -> None:
    made = tables_of(tables, block_size)
    expected = [num_tokens[slot] >= len(tables.get(slot, [])) * block_size for slot in range(4)]
    assert made.are_full(np.arange(4), np.array(num_tokens)).tolist() == expected


def test_tokens_of_a_reversed_entry_lie_from_its_last_slot_back() -> None:
    tables = BlockTables(num_slots=1, max_tokens=12, block_size=4)
    tables.write(0, [7, 2 | REVERSED])
    assert tables.slots(0, 2, 7).tolist() == [30, 31, 11, 10, 9]
    tables.write(0, [3 | REVERSED])
    assert tables.blocks(0) == [3 | REVERSED]
