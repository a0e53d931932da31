"""The order of claims, and the fence."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neaptide.cluster.lease_order import (
    DEADLINE_GRAIN_S,
    LEASE_S,
    MAX_CHUNK_LINES,
    Board,
    Chunk,
    ChunkKey,
    Claim,
    End,
    Free,
    chunk_sizes,
    end_to_take,
    owners_in_turn,
)


def chunk(name: str, density: float, expires_at_s: int = 0) -> Chunk:
    return Chunk(ChunkKey(name, 0), expires_at_s, density, 1)


def taken(board: Board, end: End, now_s: float = 0.0, limit: int = 9) -> list[str]:
    return [claim.key.batch_id for claim in board.claim(end, now_s, limit)]


@pytest.mark.parametrize(("end", "expected"), [(End.DENSE, ["c", "b", "a"]), (End.SPARSE, ["a", "b", "c"])])
def test_among_equally_urgent_chunks_one_end_comes_first(end: End, expected: list[str]) -> None:
    board = Board()
    board.add([chunk("b", 1.0), chunk("a", 0.1), chunk("c", 9.0, DEADLINE_GRAIN_S - 1)])
    assert taken(board, end) == expected


def test_an_earlier_deadline_comes_before_any_density() -> None:
    board = Board()
    board.add([chunk("late", 9.0, DEADLINE_GRAIN_S), chunk("early", 0.1)])
    assert taken(board, End.DENSE) == ["early", "late"]


def test_replicas_that_take_from_both_ends_meet_in_the_middle() -> None:
    board = Board()
    board.add(chunk(str(density), density) for density in range(4))
    ends = [End.DENSE, End.SPARSE, End.DENSE, End.SPARSE, End.DENSE]
    assert [taken(board, end, limit=1) for end in ends] == [["3"], ["0"], ["2"], ["1"], []]


def test_who_lacks_compute_takes_the_dense_end() -> None:
    assert end_to_take(0.0, 0.0, 1.0) is End.DENSE
    assert end_to_take(3.0, 1.0, 2.0) is End.SPARSE
    assert end_to_take(1.0, 1.0, 2.0) is End.DENSE


def test_a_chunk_is_lent_again_when_its_lease_is_over_and_not_before() -> None:
    board = Board()
    board.add([chunk("a", 1.0)])
    (first,) = board.claim(End.DENSE, 0.0)
    assert board.claim(End.DENSE, LEASE_S - 0.1) == []
    assert board.claim(End.DENSE, LEASE_S) == [Claim(first.key, 2)]


def test_a_renewed_lease_begins_anew() -> None:
    board = Board()
    board.add([chunk("a", 1.0)])
    (claim,) = board.claim(End.DENSE, 0.0)
    assert board.renew(claim, 10.0)
    assert board.claim(End.DENSE, LEASE_S) == []
    assert board.claim(End.DENSE, 10.0 + LEASE_S) == [Claim(claim.key, 2)]


def test_a_zombie_has_no_say() -> None:
    board = Board()
    board.add([chunk("a", 1.0)])
    (zombie,) = board.claim(End.DENSE, 0.0)
    (successor,) = board.claim(End.DENSE, LEASE_S)
    assert not any((board.holds(zombie), board.renew(zombie, 20.0), board.release(zombie), board.complete(zombie)))
    assert board.complete(successor)
    assert not board.holds(successor)
    assert len(board) == 0


def test_results_are_taken_after_the_lease_while_nobody_else_has_claimed() -> None:
    board = Board()
    board.add([chunk("a", 1.0)])
    (claim,) = board.claim(End.DENSE, 0.0)
    assert board.renew(claim, 10 * LEASE_S)


def test_a_chunk_that_is_given_back_is_free_at_once() -> None:
    board = Board()
    board.add([chunk("a", 1.0)])
    (claim,) = board.claim(End.DENSE, 0.0)
    assert board.release(claim)
    assert board.claim(End.DENSE, 0.0) == [Claim(claim.key, 2)]


def test_a_batch_that_is_withdrawn_leaves_the_others() -> None:
    board = Board()
    board.add([chunk("a", 1.0), chunk("b", 1.0)])
    (a, b) = board.claim(End.DENSE, 0.0, 2)
    board.withdraw("a")
    assert (board.holds(a), board.holds(b)) == (False, True)


@given(st.integers(1, 60_000))
def test_chunks_are_even_and_of_32_to_64_lines(num_lines: int) -> None:
    sizes = chunk_sizes(num_lines)
    assert sum(sizes) == num_lines
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= MAX_CHUNK_LINES
    assert min(sizes) >= min(num_lines, MAX_CHUNK_LINES // 2)


def test_equally_urgent_chunks_are_claimed_for_the_owners_in_turn() -> None:
    free = [Free("greedy", 0, 99), Free("modest", 0, 2)]
    assert owners_in_turn(free, {}, 4) == {"greedy": 2, "modest": 2}
    assert owners_in_turn(free, {"greedy": 4}, 2) == {"modest": 2}
    assert owners_in_turn(free, {"greedy": 4}, 4) == {"modest": 2, "greedy": 2}
    assert owners_in_turn(free, {"modest": 1}, 1) == {"greedy": 1}
    assert owners_in_turn([], {"modest": 1}, 4) == {}


def test_an_earlier_deadline_comes_before_any_turn() -> None:
    free = [Free("greedy", 1, 9), Free("greedy", 0, 2), Free("modest", 1, 9)]
    assert owners_in_turn(free, {"greedy": 7}, 4) == {"greedy": 2, "modest": 2}
