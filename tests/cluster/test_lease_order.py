"""The order in which chunks are leased, and how many a server leases at once."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neaptide.cluster.lease_order import (
    DEADLINE_GRAIN_S,
    MAX_CHUNK_LINES,
    ChunkKey,
    Free,
    LeaseChunk,
    Side,
    chunk_sizes,
    owners_in_turn,
    side_to_lease,
    sort_key,
)

DENSE, SPARSE = Side.COMPUTE_BOUND, Side.MEMORY_BOUND


def chunk(name: str, density: float, expires_at_s: int = 0) -> LeaseChunk:
    return LeaseChunk(ChunkKey(name, 0), expires_at_s, density, 1)


def in_order(chunks: list[LeaseChunk], side: Side) -> list[str]:
    chunks = sorted(chunks, key=lambda one: sort_key(one.deadline_class, one.density, one.key, side))
    return [one.key.batch_id for one in chunks]


@pytest.mark.parametrize(("side", "expected"), [(DENSE, ["c", "b", "a"]), (SPARSE, ["a", "b", "c"])])
def test_among_equally_urgent_chunks_one_side_comes_first(side: Side, expected: list[str]) -> None:
    assert in_order([chunk("b", 1.0), chunk("a", 0.1), chunk("c", 9.0, DEADLINE_GRAIN_S - 1)], side) == expected


def test_an_earlier_deadline_comes_before_any_density() -> None:
    assert in_order([chunk("late", 9.0, DEADLINE_GRAIN_S), chunk("early", 0.1)], DENSE) == ["early", "late"]


def test_chunks_of_equal_density_come_in_the_order_of_their_names() -> None:
    for side in Side:
        assert in_order([chunk("b", 1.0), chunk("a", 1.0)], side) == ["a", "b"]


def test_who_lacks_compute_leases_the_dense_side() -> None:
    assert side_to_lease(0.0, 0.0, 1.0) is DENSE
    assert side_to_lease(3.0, 1.0, 2.0) is SPARSE
    assert side_to_lease(1.0, 1.0, 2.0) is DENSE


@given(st.integers(1, 60_000))
def test_chunks_are_even_and_of_32_to_64_lines(num_lines: int) -> None:
    sizes = chunk_sizes(num_lines)
    assert sum(sizes) == num_lines
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= MAX_CHUNK_LINES
    assert min(sizes) >= min(num_lines, MAX_CHUNK_LINES // 2)


def test_equally_urgent_chunks_are_leased_for_the_owners_in_turn() -> None:
    free = [Free("greedy", 0, 99), Free("modest", 0, 2)]
    assert owners_in_turn(free, {}, 4) == {"greedy": 2, "modest": 2}
    assert owners_in_turn(free, {"greedy": 4}, 2) == {"modest": 2}
    assert owners_in_turn(free, {"greedy": 4}, 4) == {"modest": 2, "greedy": 2}
    assert owners_in_turn(free, {"modest": 1}, 1) == {"greedy": 1}
    assert owners_in_turn([], {"modest": 1}, 4) == {}


def test_an_earlier_deadline_comes_before_any_turn() -> None:
    free = [Free("greedy", 1, 9), Free("greedy", 0, 2), Free("modest", 1, 9)]
    assert owners_in_turn(free, {"greedy": 7}, 4) == {"greedy": 2, "modest": 2}
