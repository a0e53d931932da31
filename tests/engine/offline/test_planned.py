"""A pool that follows a plan: its order, what it leaves to turns, rows that come and go meanwhile."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.dual_scan import MemoryShares
from neaptide.engine.offline.planned import FULL_SHARE, STEADY_SHARE, Ends, PlannedOrder, Scan
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.offline.row_source import RowKey
from neaptide.engine.offline.sharing.by_shares import LEAD_TOKENS, ByShares
from neaptide.engine.offline.turns import Turns
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from tests.engine.harness import batch
from tests.engine.offline.planning.orders import plan, two_ends

MAX_NUM_TOKENS = 64


def pool_of(*messages: AddBatch, **arguments: object) -> OfflinePool:
    pool = OfflinePool(**arguments)  # type: ignore[arg-type]
    for message in messages:
        assert pool.add_batch(message, 0.0, MAX_NUM_TOKENS) == []
    return pool


def follow(pool: OfflinePool, *rows: tuple[str, int], **fields: object) -> None:
    pool.follow(PlannedOrder.of(plan(*rows, **fields)))  # type: ignore[arg-type]


def rows_of(message: AddBatch, *rows: int) -> AddBatch:
    return msgspec.structs.replace(message, rows=list(rows), params_index=[0] * len(rows))


def drain(pool: OfflinePool) -> list[str]:
    materialized = [request.request_id for request in pool]
    popped = [pool.pop().request_id for _ in range(len(pool))]
    assert popped == materialized, "what is handed out is not what was to be seen"
    return popped


@pytest.mark.parametrize("by_prefix", [False, True])
def test_rows_of_several_jobs_go_in_the_order_of_the_plan(tmp_path: Path, by_prefix: bool) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 3), batch(tmp_path, "b", [[2]] * 2), by_prefix=by_prefix)
    follow(pool, ("b", 1), ("a", 2), ("a", 0), ("b", 0), ("a", 1))
    assert drain(pool) == ["b:1", "a:2", "a:0", "b:0", "a:1"]


def test_rows_that_no_plan_knows_stand_behind_in_the_order_of_today(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 5))
    follow(pool, ("a", 3), ("a", 1))
    assert drain(pool) == ["a:3", "a:1", "a:0", "a:2", "a:4"]


def test_rows_that_are_gone_are_skipped(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 3))
    assert pool.pop().request_id == "a:0"
    follow(pool, ("a", 2), ("gone", 0), ("a", 0), ("a", 9), ("a", 1))
    assert drain(pool) == ["a:2", "a:1"]


@pytest.mark.parametrize("by_prefix", [False, True])
def test_rows_that_come_after_the_plan_stand_behind_it(tmp_path: Path, by_prefix: bool) -> None:
    whole = batch(tmp_path, "a", [[1] * 16, [2] * 16, [3] * 16, [2] * 17])
    pool = pool_of(rows_of(whole, 0, 1), by_prefix=by_prefix)
    follow(pool, ("a", 1), ("a", 0))
    pool.add_batch(rows_of(whole, 2, 3), 1.0, MAX_NUM_TOKENS)
    # By prefix row 3 follows row 1, which the tree has before row 2.
    assert drain(pool) == ["a:1", "a:0", *(["a:3", "a:2"] if by_prefix else ["a:2", "a:3"])]


def test_a_job_that_the_new_plan_does_not_have_forgets_the_one_before(tmp_path: Path) -> None:
    """Its places in the old plan mean nothing in the new one, and may be none of its windows."""
    pool = pool_of(batch(tmp_path, "a", [[1]] * 2), batch(tmp_path, "b", [[2]] * 3))
    follow(
        pool, ("a", 0), ("a", 1), ("b", 2), ("b", 1), ("b", 0), ends=two_ends([1] * 5, [5.0, 4.0, 3.0, 2.0, 1.0], 1.0)
    )
    follow(pool, ("a", 1), ("a", 0), ends=two_ends([1] * 2, [2.0, 1.0], 1.0))
    assert sorted(drain(pool)) == ["a:0", "a:1", "b:0", "b:1", "b:2"]


def test_a_new_plan_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 4))
    follow(pool, ("a", 3), ("a", 2), ("a", 1), ("a", 0))
    assert pool.pop().request_id == "a:3"
    follow(pool, ("a", 0), ("a", 2), ("a", 3), ("a", 1))
    assert drain(pool) == ["a:0", "a:2", "a:1"]


def test_a_plan_goes_before_the_order_of_a_policys_key(tmp_path: Path) -> None:
    by_row: RowKey = lambda tokens, row: -row  # noqa: E731
    one, two = batch(tmp_path, "a", [[1]] * 2), batch(tmp_path, "other", [[1]] * 5)
    pool = pool_of(one, row_key=by_row)
    pool.add_batch(msgspec.structs.replace(rows_of(two, 3, 4), batch_id="a"), 0.0, MAX_NUM_TOKENS)
    follow(pool, ("a", 0))
    assert drain(pool) == ["a:0", "a:4", "a:3", "a:1"]


def test_jobs_with_other_deadlines_take_turns_by_these(tmp_path: Path) -> None:
    early = msgspec.structs.replace(batch(tmp_path, "early", [[1]] * 2), deadline_s=100.0)
    pool = pool_of(batch(tmp_path, "late", [[1]] * 2), early)
    follow(pool, ("late", 1), ("early", 1), ("early", 0), ("late", 0))
    assert drain(pool) == ["early:1", "early:0", "late:1", "late:0"]


def test_a_flex_request_goes_before_the_plan(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 2), turns=ByShares({}))
    pool.add_flex(Request("chat", [1], SamplingParams(max_tokens=1), Tier.FLEX, 0.0))
    follow(pool, ("a", 1), ("a", 0))
    assert drain(pool) == ["chat", "a:1", "a:0"]


def test_a_plan_may_put_one_job_ahead_of_another_but_not_for_long(tmp_path: Path) -> None:
    tokens = LEAD_TOKENS // 4 + 1
    one = batch(tmp_path, "a", [[1] * tokens for _ in range(8)])
    pool = OfflinePool(turns=ByShares({}))
    for message in (one, batch(tmp_path, "b", [[2] * tokens for _ in range(8)])):
        pool.add_batch(message, 0.0, 10 * LEAD_TOKENS)
    follow(pool, *(("a", row) for row in range(8)), *(("b", row) for row in range(8)))
    order = [name.partition(":")[0] for name in drain(pool)]
    # Four rows are more than the lead; then b catches up with each row that puts it within the lead again.
    assert order == ["a"] * 4 + ["b", "a"] * 4 + ["b"] * 4


def test_shares_hold_in_the_long_run_whatever_the_plan_prefers(tmp_path: Path) -> None:
    tokens = LEAD_TOKENS // 2
    pool = OfflinePool(turns=ByShares({"double": 2.0}))
    for name, share in (("a", "single"), ("b", "double")):
        message = batch(tmp_path, name, [[1] * tokens for _ in range(60)])
        pool.add_batch(msgspec.structs.replace(message, share=share), 0.0, 10 * LEAD_TOKENS)
    follow(pool, *(("a", row) for row in range(60)), *(("b", row) for row in range(60)))
    names = [pool.pop().request_id.partition(":")[0] for _ in range(60)]
    assert names.count("a") == pytest.approx(20, abs=3)


def test_an_urgent_job_goes_before_the_plan(tmp_path: Path) -> None:
    turns = ByShares({})
    pool = pool_of(batch(tmp_path, "a", [[1]] * 2), batch(tmp_path, "b", [[1]] * 2), turns=turns)
    follow(pool, ("a", 0), ("a", 1), ("b", 0), ("b", 1))
    turns.urgency.places = {pool.jobs["b"]: 0}
    assert drain(pool) == ["b:0", "b:1", "a:0", "a:1"]


# ---- two ends ----


def test_the_end_that_is_further_from_its_part_of_the_memory_is_next(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 6))
    ends = two_ends([10, 10, 10, 30, 30, 30], [3.0, 3.0, 3.0, 1.0, 1.0, 1.0], root_density=1.5)
    follow(pool, *(("a", row) for row in range(6)), ends=ends)
    # A quarter of the memory for the left end: one of 10 for each one of 30. The right one first, for none is held.
    assert drain(pool) == ["a:5", "a:0", "a:4", "a:1", "a:3", "a:2"]


def test_a_target_outside_of_both_densities_leaves_one_end_alone(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 4))
    follow(pool, *(("a", row) for row in range(4)), ends=two_ends([1] * 4, [4.0, 3.0, 2.0, 1.0], 2.0))
    pool.target_density = 9.0
    assert drain(pool) == ["a:0", "a:1", "a:2", "a:3"]


def test_what_a_request_held_is_given_back_to_its_end_when_it_ends(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 8))
    follow(pool, *(("a", row) for row in range(8)), ends=two_ends([1] * 8, [3.0] * 4 + [1.0] * 4, 2.0))
    first = [pool.pop() for _ in range(4)]
    assert [request.request_id for request in first] == ["a:7", "a:0", "a:6", "a:1"]
    for request in first[1::2]:  # both of the left end
        pool.ended(request)
    assert [pool.pop().request_id for _ in range(3)] == ["a:2", "a:3", "a:5"]


def test_rows_that_come_first_go_before_either_end(tmp_path: Path) -> None:
    ends = two_ends([1] * 6, [3.0] * 3 + [1.0] * 3, 2.0)
    orders = []
    for num_first in (0, 2):
        pool = pool_of(batch(tmp_path, f"a{num_first}", [[1]] * 6))
        told = msgspec.structs.replace(ends, num_first=num_first)
        follow(pool, *((f"a{num_first}", row) for row in range(6)), ends=told)
        orders.append([int(request_id.partition(":")[2]) for request_id in drain(pool)])
    assert orders == [[5, 0, 4, 1, 3, 2], [0, 1, 5, 4, 3, 2]]


def test_a_new_plan_says_how_long_rows_last_that_run(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 4))
    rows = [("a", row) for row in range(4)]
    follow(pool, *rows, ends=two_ends([1] * 4, [3.0, 3.0, 1.0, 1.0], 2.0, lasting_steps=[8] * 4))
    running = pool.pop()
    assert running.request_id == "a:3"
    assert pool.left().longest_steps == 8
    follow(pool, *rows, ends=two_ends([1] * 4, [3.0, 3.0, 1.0, 1.0], 2.0, lasting_steps=[8, 8, 8, 50]))
    assert pool.left().longest_steps == 50


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 6))
    follow(pool, *(("a", row) for row in range(6)), ends=two_ends([1] * 6, [3.0] * 3 + [1.0] * 3, 2.0))
    assert [r.request_id for r in pool] == [r.request_id for r in pool]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), by_prefix=st.booleans(), has_shares=st.booleans())
def test_every_row_is_handed_out_once_whatever_plans_come(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, by_prefix: bool, has_shares: bool
) -> None:
    directory = tmp_path_factory.mktemp("jobs")
    turns: Turns | None = ByShares({}) if has_shares else None
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=3)
    messages = [
        batch(directory, f"j{k}", [[*data.draw(prompts)] * 8 for _ in range(size)]) for k, size in enumerate(sizes)
    ]
    everything = {f"j{k}:{row}" for k, size in enumerate(sizes) for row in range(size)}
    pool = pool_of(*messages, by_prefix=by_prefix, turns=turns)
    names = [(f"j{k}", row) for k, size in enumerate(sizes) for row in range(size)]
    found = []
    while len(pool):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
            densities = sorted(data.draw(st.lists(st.floats(0.1, 9), min_size=len(order), max_size=len(order))))
            ends = two_ends([1] * len(order), densities[::-1], 1.0) if order and data.draw(st.booleans()) else None
            follow(pool, *order, ends=ends)
        draft = PoolDraft(pool)
        expected = draft.peek()
        taken = pool.pop()
        assert taken is expected
        found.append(taken.request_id)
        pool.ended(taken)
    assert sorted(found) == sorted(everything)


def ends_of(*lengths: tuple[float, float], token_s: float = 1e-3, kv_token_s: float = 1e-6) -> Ends:
    """Of rows with these prompt and output tokens."""
    prompt, output = np.array(lengths).T
    held = prompt + output / 2.0
    compute_s, memory_s = token_s * (prompt + output), kv_token_s * output * held
    densities = (compute_s / memory_s).tolist()
    root_density, turns = float(compute_s.sum() / memory_s.sum()), np.arange(len(held))
    return Ends(held, output, densities, memory_s.tolist(), root_density, token_s, kv_token_s, turns)


def test_a_row_reads_what_it_holds_in_each_step() -> None:
    ends = ends_of((600.0, 40.0), (0.0, 1000.0), (100.0, 16_000.0))
    assert ends.memory_s == pytest.approx([1e-6 * 40 * 620, 1e-6 * 1000 * 500, 1e-6 * 16_000 * 8100])


def test_work_between_is_that_of_the_rows_and_decodes_read_for_all_tokens_but_the_first() -> None:
    ends = ends_of((600.0, 40.0), (600.0, 40.0), (100.0, 16_000.0))
    short_s, long_s = 1e-6 * 40 * 620, 1e-6 * 16_000 * 8100
    assert ends.work_between(0, 1) == pytest.approx((1.28, 2 * short_s, 2 * short_s * 39 / 40))
    compute_s, memory_s, decodes_s = ends.work_between(0, 2)
    assert compute_s / memory_s == pytest.approx(ends.root_density)
    assert decodes_s == pytest.approx(2 * short_s * 39 / 40 + long_s * 15_999 / 16_000)


def test_what_rows_share_is_read_by_each_and_held_once() -> None:
    own = ends_of((60.0, 40.0), (60.0, 40.0), (100.0, 16_000.0))
    shared = replace(own, window_memory_s=[3.0 * memory_s for memory_s in own.window_memory_s])
    (compute_s, memory_s) = (sum(column) for column in zip(*((d * m, m) for d, m in windows_of(shared)), strict=True))
    assert shared.work_between(0, 2)[:2] == pytest.approx((compute_s, memory_s))
    assert shared.work_between(0, 2)[2] == pytest.approx(3.0 * own.work_between(0, 2)[2])
    assert shared.held_density(0) == pytest.approx(3.0 * shared.density(0))


def windows_of(ends: Ends) -> list[tuple[float, float]]:
    return list(zip(ends.densities, ends.window_memory_s, strict=True))


def test_long_answers_start_as_far_apart_as_a_steady_state_has_them() -> None:
    """Each holds 500 tokens for 1,000 steps; of 50,000 tokens 75 can be at work, so one starts every 13.3 steps."""
    ends = ends_of(*[(600.0, 40.0)] * 4, *[(0.0, 1000.0)] * 4)
    shares, starts = MemoryShares(), []
    for step in range(1, 41):
        shares.begin_step()
        scan = Scan(ends, shares, 0.01, kv_tokens=50_000)
        while scan.is_right_next(0, 7):
            scan.take(f"row-{len(starts)}", True, 7)
            starts.append(step)
    assert starts == [1, 14, 27]
    assert pytest.approx(13.3, abs=0.1) == 1000 * 500 / (STEADY_SHARE * 50_000)


def test_long_answers_start_while_all_that_they_will_hold_fits() -> None:
    """Ten at once hold 10,000 tokens together just before they end, and a prompt of 600 has room beside them."""
    ends = ends_of(*[(600.0, 40.0)] * 4, *[(0.0, 1000.0)] * 4)
    shares, starts = MemoryShares(), list[int]()
    kv_tokens = math.ceil(10_600.02 / FULL_SHARE)
    for step in range(1, 1101):
        shares.begin_step()
        scan = Scan(ends, shares, 0.001, kv_tokens, looks_ahead=True)
        while scan.is_right_next(0, 7):
            scan.take(f"row-{len(starts)}", True, 7)
            starts.append(step)
        if step == 1001:
            for number in range(10):
                shares.end(f"row-{number}")
    assert starts == [1] * 10 + [1002] * 10


def test_what_runs_of_the_other_end_leaves_the_right_end_its_part() -> None:
    ends = ends_of(*[(600.0, 40.0)] * 4, *[(0.0, 1000.0)] * 4)
    shares = MemoryShares()
    target = (ends.density(0) + ends.density(7)) / 2.0  # each end has half of the memory
    scan, count = Scan(ends, shares, target, kv_tokens=math.ceil(10_000 / FULL_SHARE), looks_ahead=True), 0
    while scan.is_right_next(0, 7):
        scan.take(f"row-{count}", True, 7)
        count += 1
    assert count == 4  # 5,000 tokens, less the prompts of a step


def test_prompts_of_two_steps_have_room_beside_the_right_end() -> None:
    """Half of 10,000 tokens for each end; the left one also has the prompts of two steps, 264 tokens each: so 4,472 are
    left for answers that hold 100 at their end."""
    ends = ends_of(*[(60.0, 40.0)] * 4, *[(0.0, 100.0)] * 4)
    shares, kv_tokens = MemoryShares(), math.ceil(10_000 / FULL_SHARE)
    target = (ends.density(0) + ends.density(7)) / 2.0
    assert ends.paced(target, kv_tokens) == pytest.approx(264, abs=0.5)
    scan, count = Scan(ends, shares, target, kv_tokens, looks_ahead=True), 0
    while scan.is_right_next(0, 7):
        scan.take(f"row-{count}", True, 7)
        count += 1
    assert count == 44


def test_a_pool_without_rows_of_the_plan_has_the_density_of_the_whole(tmp_path: Path) -> None:
    pool = pool_of(batch(tmp_path, "a", [[1]] * 4))
    follow(pool, *(("a", row) for row in range(4)), ends=two_ends([10] * 4, [3.0, 3.0, 1.0, 1.0], 2.0))
    left = pool.left()
    assert 1.0 < left.density < 3.0
    for _ in range(3):
        pool.pop()
    assert pool.left().density != left.density
    pool.pop()
    assert pool.left().density == 2.0
