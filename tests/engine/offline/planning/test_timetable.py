"""Starts that are laid down where it is known how long answers are."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.arrays import FloatArray
from neaptide.engine.offline.planning.blend import PoolWork, Ranked
from neaptide.engine.offline.planning.spread import MIN_ROWS
from neaptide.engine.offline.planning.timetable import (
    LATE_SHARE,
    MAX_ROWS,
    OPEN,
    ROOM_SHARE,
    Timetable,
    packed_starts,
    timetable,
)
from tests.engine.offline.planning.pools import MODEL

DENSE, SPARSE = (640, 2), 8000
"""(prompt, output) tokens of a row that wants compute; an answer that wants memory, behind a prompt of four."""


def most_held(prompts: FloatArray, lasting: FloatArray, starts: FloatArray) -> float:
    """In the last step of any of them."""
    ends = starts + lasting
    at = [((starts < end) & (ends >= end)) @ (prompts + end - starts) for end in ends]
    return float(max(at))


def starts_of(lasting: Sequence[int], room: float, prompts: Sequence[int] | None = None) -> list[float]:
    held = np.zeros(len(lasting)) if prompts is None else np.array(prompts, float)
    return packed_starts(held, np.array(lasting, float), room).tolist()


@pytest.mark.parametrize(
    ("lasting", "room", "starts"),
    [
        ([], 10, []),
        ([10, 10], 20, [0, 0]),  # both end in the last step, in all of the room
        ([10, 10], 10, [10, 0]),
        ([10, 10], 15, [5, 0]),  # the one has let go of five when the other is five steps from its end
        ([4, 3, 2], 6, [0, 0, 0]),
        ([2, 8], 8, [4, 0]),  # the short one is gone before the long one needs its room
    ],
)
def test_starts_by_hand(lasting: list[int], room: float, starts: list[float]) -> None:
    found = starts_of(lasting, room)
    assert found == starts
    assert not lasting or most_held(np.zeros(len(lasting)), np.array(lasting, float), np.array(found)) <= room


def test_a_prompt_is_held_as_long_as_its_answer_lasts() -> None:
    assert starts_of([10, 10], 20, [5, 5]) == [10, 0]  # 25 and 15 of a room of 20 would not do
    assert starts_of([10, 10], 30, [5, 5]) == [0, 0]


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=30), spare=st.integers(0, 99)
)
@settings(max_examples=100)
def test_no_step_holds_more_than_the_room_and_the_first_begins_at_once(rows: list[tuple[int, int]], spare: int) -> None:
    prompts, lasting = np.array(rows, float).T
    room = float((prompts + lasting).max()) + spare
    starts = packed_starts(prompts, lasting, room)
    assert starts.min() == 0.0
    assert most_held(prompts, lasting, starts) <= room + 1e-9


@pytest.mark.parametrize(("seed", "over_least"), [(0, 1.12), (1, 1.12), (2, 1.12)])
def test_memory_is_full_from_soon_after_the_start_to_the_end(seed: int, over_least: float) -> None:
    """Answers of even lengths that read twice what memory holds over the longest: as they fit they take 1.26 to 1.3
    times as many steps as memory needs."""
    lasting = np.random.default_rng(seed).integers(1, 2000, 157).astype(float)
    room = 25_000.0
    starts = packed_starts(np.zeros(157), lasting, room)
    least = float((lasting**2 / 2.0).sum()) / room
    assert 1.0 < float((starts + lasting).max()) / least < over_least


# ---- which rows have a start ----


def case(outputs: Sequence[int], num_dense: int = 40, pieces: int = 1) -> tuple[Ranked, PoolWork]:
    """Dense rows, each a piece of its own, and sparse ones in so many pieces."""
    prompts = np.array([DENSE[0]] * num_dense + [4] * len(outputs), np.int64)
    work = PoolWork.of(MODEL, prompts, np.array([DENSE[1]] * num_dense + list(outputs), float))
    piece = np.array([*range(num_dense), *(num_dense + k * pieces // len(outputs) for k in range(len(outputs)))])
    rows = np.arange(len(prompts))
    return Ranked(rows, np.zeros(len(rows), np.int64), work.compute_s, work.memory_s, piece), work


KNOWN = np.ones(40 + 2 * MIN_ROWS, np.bool_)
OUTPUTS = [SPARSE + k for k in range(2 * MIN_ROWS)]


def test_rows_of_the_sparse_end_have_starts() -> None:
    ranked, work = case(OUTPUTS)
    found = timetable(ranked, work, KNOWN, lambda first: 1000.0 * first)
    assert found is not None
    assert (found[:40] == OPEN).all()
    expected = packed_starts(np.full(len(OUTPUTS), 4.0), np.array(OUTPUTS, float), ROOM_SHARE * 40_000.0)
    assert found[40:].tolist() == expected.astype(int).tolist()


def test_there_is_no_timetable_of_estimates() -> None:
    ranked, work = case(OUTPUTS)
    known = KNOWN.copy()
    known[-1] = False
    assert timetable(ranked, work, known, lambda _: 40_000.0) is None
    known = KNOWN.copy()
    known[0] = False  # one of the dense end
    assert timetable(ranked, work, known, lambda _: 40_000.0) is not None


def test_there_is_none_where_one_answer_alone_is_too_long() -> None:
    ranked, work = case(OUTPUTS)
    least = (4 + max(OUTPUTS)) / ROOM_SHARE
    assert timetable(ranked, work, KNOWN, lambda _: least - 1.0) is None
    assert timetable(ranked, work, KNOWN, lambda _: least + 1.0) is not None


def test_there_is_none_where_others_want_the_same_room() -> None:
    ranked, work = case(OUTPUTS, pieces=2)  # half of what is sparse stands in another piece
    assert timetable(ranked, work, KNOWN, lambda _: 40_000.0) is None


@pytest.mark.parametrize("count", [MIN_ROWS - 1, MAX_ROWS + 1])
def test_there_is_none_of_too_few_rows_and_of_too_many(count: int) -> None:
    ranked, work = case([SPARSE] * count)
    assert timetable(ranked, work, np.ones(40 + count, np.bool_), lambda _: 40_000.0) is None


def test_an_empty_pool_has_none() -> None:
    nothing = np.zeros(0)
    work = PoolWork.of(MODEL, np.zeros(0, np.int64), nothing)
    ranked = Ranked(np.zeros(0, np.int64), np.zeros(0, np.int64), nothing, nothing, np.zeros(0, np.int64))
    assert timetable(ranked, work, np.zeros(0, np.bool_), lambda _: 1.0) is None


# ---- as steps go by ----


def kept(starts: Sequence[int], lasting: Sequence[int], kv_tokens: int = 100) -> Timetable:
    work_s = np.array([[1.0, 10.0 * k, k] for k in range(1, 1 + sum(start != OPEN for start in starts))])
    return Timetable(np.array(starts), np.array(lasting, float), kv_tokens, work_s)


def test_rows_are_due_from_their_step_on() -> None:
    table = kept([OPEN, 2, 0, 1], [1, 50, 50, 50])
    waiting, due = {1, 2, 3}, []
    for _ in range(4):
        assert table.begin_step(waiting.__contains__, 100)
        found = list(table.due(is_idle=False))
        due.append(found)
        waiting -= set(found)
    assert due == [[2], [3], [1], []]


def test_the_next_row_is_due_where_none_runs() -> None:
    table = kept([5, 7], [50, 50])
    assert table.begin_step(lambda _: True, 100)
    assert list(table.due(is_idle=False)) == []
    assert next(table.due(is_idle=True)) == 0


def test_work_is_left_until_rows_start() -> None:
    table = kept([OPEN, 1, 0], [1, 4, 4])
    waiting = {1, 2}
    assert table.begin_step(waiting.__contains__, 100)
    assert (table.work_left, table.steps_left, table.first_rank) == ((2.0, 30.0, 3.0), 5.0, 1)
    waiting.remove(2)
    assert table.begin_step(waiting.__contains__, 100)
    assert (table.work_left, table.steps_left) == ((1.0, 10.0, 1.0), 4.0)


def test_a_row_that_starts_late_breaks_it() -> None:
    late = int(LATE_SHARE * 200)
    table = kept([0], [200])
    assert [table.begin_step(lambda _: True, 100) for _ in range(late + 2)] == [True] * (late + 1) + [False]


def test_less_memory_than_it_was_made_for_breaks_it() -> None:
    assert kept([0], [200]).begin_step(lambda _: True, 100)
    assert not kept([0], [200]).begin_step(lambda _: True, 99)


def test_it_is_over_when_its_last_row_has_ended() -> None:
    table = kept([0, 2], [3, 2])
    assert [table.begin_step(lambda _: False, 100) for _ in range(5)] == [True] * 4 + [False]
