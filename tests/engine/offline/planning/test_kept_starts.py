"""A pool whose plan has a timetable: what starts when, and what happens where it cannot be kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.messages import PlanReady
from neaptide.engine.offline.planned import Ends, PlannedOrder
from neaptide.engine.offline.planning.timetable import LATE_SHARE, OPEN
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from tests.engine.harness import batch
from tests.engine.offline.planning.orders import plan, two_ends

KV_TOKENS = 1000
DENSE, LASTING = 3, 100
"""Rows at the left end of every plan here; how long the others last."""


def planned(starts: Sequence[int], batch_ids: Sequence[str] = ("a",)) -> PlanReady:
    """Dense rows, then rows with these starts, dealt out to the batches in turn."""
    count = DENSE + len(starts)
    names = [(batch_ids[k % len(batch_ids)], k // len(batch_ids)) for k in range(count)]
    densities = [9.0] * DENSE + [0.1] * len(starts)
    lasting = [1] * DENSE + [LASTING] * len(starts)
    ends = two_ends([10] * count, densities, 1.0, None, lasting, [*[OPEN] * DENSE, *starts], KV_TOKENS)
    return plan(*names, ends=ends)


def following(directory: Path, message: PlanReady) -> OfflinePool:
    pool = OfflinePool()
    pool.looks_ahead = True
    rows = np.frombuffer(message.rows, "<i4")
    for number, batch_id in enumerate(message.batch_ids):
        of_batch = int(np.count_nonzero(np.frombuffer(message.batches, "<i4") == number))
        assert pool.add_batch(batch(directory, batch_id, [[1]] * of_batch), 0.0, 64) == []
    assert len(pool) == len(rows)
    pool.follow(PlannedOrder.of(message))
    return pool


def stepped(pool: OfflinePool, kv_tokens: int = KV_TOKENS, most: int = 1 << 30) -> list[str]:
    """What one step takes, of as many as it may."""
    pool.begin_step(0.0, is_paused=False)
    pool.begin_planned_step(kv_tokens)
    draft, taken = PoolDraft(pool), list[Request]()
    while len(taken) < most and draft.peek() is not None:
        taken.append(draft.pop())
    for request in taken:
        pool.take(request)
    return [request.request_id for request in taken]


def test_rows_start_in_their_steps_and_dense_ones_whenever_there_is_room(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([2, 0, 3, 0]))
    # Rows 4 and 6 stand in the middle and at the end: their start counts, not their place.
    assert stepped(pool, most=3) == ["a:4", "a:6", "a:0"]
    assert stepped(pool) == ["a:1", "a:2"]  # then nothing but rows that wait for their start
    assert [stepped(pool) for _ in range(3)] == [["a:3"], ["a:5"], []]


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 0, 5]))
    pool.begin_step(0.0, is_paused=False)
    pool.begin_planned_step(KV_TOKENS)
    assert [r.request_id for r in pool] == [r.request_id for r in pool] == ["a:3", "a:4", "a:0", "a:1", "a:2"]


def test_the_next_row_starts_early_where_none_of_them_runs(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([4, 6]))
    assert stepped(pool) == ["a:3", "a:0", "a:1", "a:2"]


def test_rows_of_several_batches_start_by_one_timetable(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([1, 0, 2, 0], ["a", "b"]))
    # Ranks 3 to 6 are rows b:1, a:2, b:2 and a:3.
    assert stepped(pool, most=2) == ["a:2", "a:3"]
    assert stepped(pool, most=1) == ["b:1"]
    assert stepped(pool, most=1) == ["b:2"]


def test_a_flex_request_need_not_wait_for_a_start(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 9]))
    assert stepped(pool) == ["a:3", "a:0", "a:1", "a:2"]
    pool.add_flex(Request("chat", [1], SamplingParams(max_tokens=1), Tier.FLEX, 0.0))
    assert stepped(pool) == ["chat"]


def test_rows_that_no_plan_knows_need_not_wait_for_a_start(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 9]))
    assert stepped(pool) == ["a:3", "a:0", "a:1", "a:2"]
    pool.add_batch(batch(tmp_path, "new", [[1]]), 0.0, 64)
    assert stepped(pool) == ["new:0"]


def test_with_less_memory_rows_start_as_they_fit(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 50, 90]))
    assert stepped(pool, most=1) == ["a:3"]
    # From the back, by what they will hold.
    assert stepped(pool, KV_TOKENS - 16, most=2) == ["a:5", "a:4"]


def test_a_timetable_that_was_given_up_is_not_taken_up_again(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 50, 90]))
    assert stepped(pool, KV_TOKENS - 16, most=1) == ["a:5"]
    assert stepped(pool, most=1) == ["a:4"]


def test_a_row_that_finds_no_room_in_time_breaks_the_timetable(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 0, 900]))
    assert stepped(pool, most=1) == ["a:3"]
    late = int(LATE_SHARE * LASTING)
    for _ in range(late):
        assert stepped(pool, most=0) == []
    assert stepped(pool, most=1) == ["a:5"]  # from the back


def test_a_row_that_is_gone_breaks_nothing(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 0, 900], ["a", "b"]))
    # Ranks 3 to 5 are rows b:1, a:2 and b:2.
    assert stepped(pool, most=1) == ["b:1"]
    pool.cancel_batch("a")
    assert [stepped(pool, most=1) for _ in range(6)] == [["b:0"], [], [], [], [], []]


def test_a_plan_that_comes_while_long_answers_run_has_no_timetable(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 0, 90]))
    assert stepped(pool, most=1) == ["a:3"]
    pool.follow(PlannedOrder.of(planned([0, 0, 90])))
    assert stepped(pool, most=2) == ["a:5", "a:4"]


def test_other_policies_heed_no_timetable(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([900, 900]))
    pool.looks_ahead = False
    pool.follow(PlannedOrder.of(planned([900, 900])))
    assert sorted(r.request_id for r in pool) == [f"a:{row}" for row in range(DENSE + 2)]


def test_work_left_is_that_of_the_rows_that_wait_and_steps_those_of_the_timetable(tmp_path: Path) -> None:
    pool = following(tmp_path, planned([0, 5]))
    stepped(pool, most=0)
    whole = pool.left()
    assert whole.planned_steps == 5 + LASTING
    assert stepped(pool, most=1) == ["a:3"]  # one of a lower rank than the one that waits
    stepped(pool, most=0)
    left = pool.left()
    assert left.planned_steps == 3 + LASTING
    # Each row of the plan reads for a second, a million tokens; the one that runs has still to read what it will hold.
    still_held = sum(10.0 - LASTING / 2.0 + age for age in range(1, LASTING)) + (LASTING - 1) / 2.0
    assert whole.held_tokens - left.held_tokens == pytest.approx(1e6 - still_held)


def test_in_a_window_of_both_kinds_rows_have_their_own_part_of_it() -> None:
    """Else a dense row beside long answers looks like one of them, and compute seems to come too soon."""
    held, lasting = np.full(32, 10.0), np.ones(32)
    held[31], lasting[31] = 100.0, 100.0
    starts = np.full(32, OPEN)
    ends = Ends(held, lasting, [2.0] * 16, [5.0] * 16, 2.0, 1e-3, 1e-6, np.arange(32))  # windows of two rows
    assert ends.work_between(30, 30)[:2] == pytest.approx((5.0, 2.5))
    starts[31] = 0
    ends = replace(ends, starts=starts)
    own_s = 5.0 * 10_000 / 10_010
    assert ends.work_between(31, 31) == pytest.approx((10.0 * 150 / 160.5, own_s, 0.99 * own_s * 10_000 / 10_010))
    assert ends.work_between(30, 31)[:2] == pytest.approx((10.0, 5.0))
    assert ends.work_between(28, 28) == pytest.approx((5.0, 2.5, 0.0))


@settings(max_examples=60, deadline=None)
@given(starts=st.lists(st.integers(0, 30), min_size=1, max_size=8), lasting=st.integers(1, 40), rooms=st.data())
def test_every_row_starts_once_and_none_before_its_step(
    tmp_path_factory: pytest.TempPathFactory, starts: list[int], lasting: int, rooms: st.DataObject
) -> None:
    """Whatever room there is in each step, until the timetable is broken."""
    directory = tmp_path_factory.mktemp("job")
    pool, ends_at, found = following(directory, planned(starts)), dict[Request, int](), list[str]()
    for step in range(400):
        for request in [request for request, end in ends_at.items() if end <= step]:
            pool.ended(request)
            del ends_at[request]
        taken = stepped(pool, most=rooms.draw(st.integers(0, 3)) if step < 50 else 3)
        is_kept = pool.left().planned_steps > 0.0
        was_idle = not any(int(request.request_id[2:]) >= DENSE for request in ends_at)
        for name in taken:
            row = int(name[2:])
            if is_kept and row >= DENSE and not was_idle:
                assert starts[row - DENSE] <= step
            ends_at[pool.jobs["a"].started[name]] = step + lasting
        found += taken
        if not len(pool):
            break
    assert sorted(found) == sorted(f"a:{row}" for row in range(DENSE + len(starts)))
