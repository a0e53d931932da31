"""Shares of the offline work: which lane the next request comes from."""

from pathlib import Path

import msgspec

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.turns import QUANTUM_TOKENS, ByShares
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from tests.engine.harness import batch

MAX_NUM_TOKENS = 4 * QUANTUM_TOKENS
ROW_TOKENS = QUANTUM_TOKENS // 2
"""Two rows are a turn."""


def job(directory: Path, name: str, rows: int, share: str = "", deadline_s: float = 1e9) -> AddBatch:
    message = batch(directory, name, [[9] * ROW_TOKENS] * rows)
    return msgspec.structs.replace(message, share=share, deadline_s=deadline_s)


def flex(name: str, share: str = "") -> Request:
    return Request(name, [9] * ROW_TOKENS, SamplingParams(), Tier.FLEX, 0.0, share=share)


def pool_of(*messages: AddBatch, weights: dict[str, float] | None = None) -> OfflinePool:
    pool = OfflinePool(turns=ByShares(weights or {}))
    for message in messages:
        pool.add_batch(message, 0.0, MAX_NUM_TOKENS)
    return pool


def drawn(pool: OfflinePool, count: int) -> list[str]:
    return [pool.pop().request_id.split(":")[0] for _ in range(count)]


def test_jobs_of_one_share_take_turns(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "huge", 20), job(tmp_path, "small", 3))
    assert drawn(pool, 8) == ["huge", "huge", "small", "small", "huge", "huge", "small", "huge"]


def test_shares_take_turns_however_many_jobs_they_have(tmp_path: Path) -> None:
    greedy = [job(tmp_path, f"greedy{k}", 9, "greedy") for k in range(3)]
    pool = pool_of(*greedy, job(tmp_path, "modest", 9, "modest"))
    names = drawn(pool, 16)
    assert names.count("modest") == 8
    assert [names.count(f"greedy{k}") for k in range(3)] == [4, 2, 2]


def test_a_share_has_as_many_turns_as_its_weight_says(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, 40, name) for name in ("one", "three")]
    names = drawn(pool_of(*jobs, weights={"three": 3.0}), 32)
    assert (names.count("one"), names.count("three")) == (8, 24)


def test_what_was_put_out_counts_as_well(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "talkative", 20, "a"), job(tmp_path, "terse", 20, "b"))
    (first,) = [pool.pop()]
    answered = Request(first.request_id, [9], SamplingParams(), Tier.BATCH, 0.0, share="a")
    answered._output_token_ids = [7] * (3 * QUANTUM_TOKENS)
    pool.ended(answered)
    assert drawn(pool, 6) == ["terse"] * 6


def test_a_share_that_comes_later_gets_no_arrears(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "early", 40, "early"))
    drawn(pool, 20)
    pool.add_batch(job(tmp_path, "late", 40, "late"), 0.0, MAX_NUM_TOKENS)
    names = drawn(pool, 8)
    assert (names.count("early"), names.count("late")) == (4, 4)


def test_flex_requests_count_as_a_job_and_go_first_at_equal_turns(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "rows", 9))
    for k in range(4):
        pool.add_flex(flex(f"flex{k}"))
    assert drawn(pool, 8) == ["flex0", "flex1", "rows", "rows", "flex2", "flex3", "rows", "rows"]


def test_what_flex_requests_put_out_counts_for_them(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "rows", 9))
    for k in range(4):
        pool.add_flex(flex(f"flex{k}"))
    answered = pool.pop()
    answered._output_token_ids = [7] * (2 * QUANTUM_TOKENS)
    pool.ended(answered)
    assert drawn(pool, 5) == ["rows"] * 4 + ["flex1"]


def test_a_request_that_was_aborted_before_its_turn_costs_its_share_nothing(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "rows", 9))
    for k in range(6):
        pool.add_flex(flex(f"flex{k}"))
    for k in range(4):
        pool.remove(f"flex{k}")
    assert drawn(pool, 3) == ["flex4", "flex5", "rows"]


def test_answers_that_are_to_come_make_a_job_urgent_as_well(tmp_path: Path) -> None:
    """A row a second; the job's 14 rows have answers of three times their prompts, as the first one had."""
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "talkative", 15, deadline_s=90.0))
    begin_steps(pool, 8)
    assert set(drawn(pool, 4)) == {"lax", "talkative"}
    answered = Request("talkative:0", [9], SamplingParams(), Tier.BATCH, 0.0)
    answered._output_token_ids = [7] * (3 * ROW_TOKENS)
    pool.ended(answered)
    for second in (9.0, 10.0):
        pool.turns.begin_step(second, pool.lanes)
    assert set(drawn(pool, 4)) == {"talkative"}


def test_looking_ahead_charges_nobody(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "a", 9), job(tmp_path, "b", 9))
    foreseen = [request.request_id.split(":")[0] for request in pool.in_turn()]
    assert foreseen == drawn(pool, 18)


def begin_steps(pool: OfflinePool, count: int, draws: int = 1) -> None:
    """A row a second, so that the rate is known."""
    for second in range(count):
        pool.turns.begin_step(float(second), pool.lanes)
        drawn(pool, draws)
    pool.turns.begin_step(float(count), pool.lanes)


def test_a_job_that_would_be_late_with_its_share_goes_before_the_others(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "urgent", 14, deadline_s=24.0))
    begin_steps(pool, 8)
    assert set(drawn(pool, 6)) == {"urgent"}


def test_a_job_that_is_late_whatever_is_done_takes_turns_like_the_others(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "lost", 30, deadline_s=12.0))
    begin_steps(pool, 8)
    names = drawn(pool, 8)
    assert (names.count("lax"), names.count("lost")) == (4, 4)


def test_time_without_offline_work_does_not_count_as_slow_work(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "first", 8))
    begin_steps(pool, 8)
    for second in range(9, 900):
        pool.turns.begin_step(float(second), pool.lanes)
    for message in (job(tmp_path, "lax", 60), job(tmp_path, "urgent", 14, deadline_s=924.0)):
        pool.add_batch(message, 900.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(900.0, pool.lanes)
    pool.turns.begin_step(901.0, pool.lanes)
    assert set(drawn(pool, 6)) == {"urgent"}


def test_of_two_urgent_jobs_the_one_with_less_time_to_lose_goes_first(tmp_path: Path) -> None:
    """A row a second: the first, due in 17 s, has 13 s to lose, the second, due in 23 s, 11."""
    pool = pool_of(job(tmp_path, "lax", 60))
    begin_steps(pool, 6)
    for message in (job(tmp_path, "soon", 4, deadline_s=24.0), job(tmp_path, "long", 12, deadline_s=30.0)):
        pool.add_batch(message, 6.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(7.0, pool.lanes)
    assert drawn(pool, 2) == ["long", "long"]


def test_a_job_is_not_left_to_the_last_moment(tmp_path: Path) -> None:
    """A row a second, 14 rows with half of that: urgent 35 s before the deadline, and 10 more."""
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "due", 14, deadline_s=40.0))
    begin_steps(pool, 1)
    assert set(drawn(pool, 6)) == {"due"}


def test_the_time_that_a_row_takes_to_its_end_is_no_time_to_spare(tmp_path: Path) -> None:
    """Urgent are 8 rows 30 s before the deadline, and 12.5 s earlier if a row takes 10 s from its first step on."""
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "due", 14, deadline_s=52.0))
    begin_steps(pool, 8)
    assert set(drawn(pool, 4)) == {"lax", "due"}
    row = Request("due:0", [9], SamplingParams(), Tier.BATCH, 0.0)
    row.admission_index, row.scheduled_s = 1, 0.0
    pool.begin_step(10.0, is_paused=False)
    pool.ended(row)
    pool.begin_step(11.0, is_paused=False)
    assert set(drawn(pool, 4)) == {"due"}
