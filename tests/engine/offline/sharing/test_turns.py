"""Shares of the offline work: which lane the next request comes from."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.lanes import JobLane
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.sharing import urgency
from neaptide.engine.offline.sharing.by_shares import ByShares
from neaptide.engine.offline.sharing.tenant_account import QUANTUM_TOKENS
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


def end(pool: OfflinePool, request: Request, num_tokens: int) -> None:
    """It has put out so many."""
    request._output_token_ids = [7] * num_tokens
    pool.ended(request)


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
    end(pool, pool.pop(), 3 * QUANTUM_TOKENS)
    assert drawn(pool, 6) == ["terse"] * 6


def test_prompts_and_answers_count_by_the_weight(tmp_path: Path) -> None:
    jobs = job(tmp_path, "double", 20, "a"), job(tmp_path, "single", 20, "b")
    pool = pool_of(*jobs, weights={"a": 2.0})
    end(pool, pool.pop(), 3 * QUANTUM_TOKENS)
    assert pool.turns.shares.had["a"] == (ROW_TOKENS + 3 * QUANTUM_TOKENS) / 2  # type: ignore[attr-defined]


def test_an_answer_is_taken_back_by_the_weight_that_it_was_charged_with(tmp_path: Path) -> None:
    """16 quanta were expected, which is 4 at the weight of then; taken back by the new weight they would be 32."""
    one = batch(tmp_path, "changed", [[9] * ROW_TOKENS] * 9, max_tokens=16 * QUANTUM_TOKENS)
    pool = OfflinePool(turns=ByShares({"changed": 4.0}))
    pool.add_batch(msgspec.structs.replace(one, share="changed"), 0.0, 99 * QUANTUM_TOKENS)
    end(pool, pool.pop(), 16 * QUANTUM_TOKENS)  # the first tells
    running = pool.pop()
    pool.add_batch(job(tmp_path, "other", 9, "other"), 0.0, MAX_NUM_TOKENS)
    pool.turns.set_weights({"changed": 0.5})
    end(pool, running, 0)
    assert drawn(pool, 6) == ["changed", *["other"] * 5]


def test_a_share_that_comes_later_gets_no_arrears(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "early", 40, "early"))
    drawn(pool, 20)
    pool.add_batch(job(tmp_path, "late", 40, "late"), 0.0, MAX_NUM_TOKENS)
    names = drawn(pool, 8)
    assert (names.count("early"), names.count("late")) == (4, 4)


def test_a_job_that_comes_later_gets_no_arrears_from_those_of_its_share(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "early", 40))
    drawn(pool, 20)
    pool.add_batch(job(tmp_path, "late", 40), 0.0, MAX_NUM_TOKENS)
    names = drawn(pool, 8)
    assert (names.count("early"), names.count("late")) == (4, 4)


def test_what_is_there_of_long_answers_when_another_comes_is_no_debt(tmp_path: Path) -> None:
    """It was put out while nobody else waited, though it is more than was expected; what comes later is one."""
    pool = pool_of(job(tmp_path, "a", 40, "a"))
    requests = [pool.pop() for _ in range(4)]
    for request in requests:
        request._output_token_ids = [7] * QUANTUM_TOKENS
    pool.turns.begin_step(1.0)  # else it was looked up a moment ago
    pool.add_batch(job(tmp_path, "b", 40, "b"), 0.0, MAX_NUM_TOKENS)
    shares = pool.turns.shares.had  # type: ignore[attr-defined]
    ahead_tokens = shares["a"] - shares["b"]
    assert ahead_tokens == 0
    end(pool, requests[0], 2 * QUANTUM_TOKENS)
    assert shares["a"] - shares["b"] == QUANTUM_TOKENS


def test_a_new_jobs_answers_are_expected_to_be_as_long_as_others_of_its_share(tmp_path: Path) -> None:
    limits = {"params_table": [SamplingParams(max_tokens=QUANTUM_TOKENS)]}
    jobs = [msgspec.structs.replace(job(tmp_path, name, 4, "a"), **limits) for name in ("old", "new")]
    pool = pool_of(*jobs)
    lanes, request = [pool.jobs[name] for name in ("old", "new")], pool.pop()
    expected = lambda: [pool.turns.expected_answer(lane, request) for lane in lanes]  # type: ignore[attr-defined]  # noqa: E731
    assert expected() == [256, 256]
    end(pool, request, 1000)
    assert expected() == [1000, 1000]
    end(pool, pool.pop(), 2000)
    assert expected()[1] == 1500


def test_what_a_share_had_alone_costs_it_nothing_later(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "old", 60, "a"))
    for request in [pool.pop() for _ in range(60)]:
        pool.ended(request)
    for name, share in (("b", "b"), ("a", "a")):
        pool.add_batch(job(tmp_path, name, 20, share), 0.0, MAX_NUM_TOKENS)
    names = drawn(pool, 8)
    assert (names.count("a"), names.count("b")) == (4, 4)


@pytest.mark.parametrize("share", ["b", "a"])
def test_who_comes_and_goes_with_single_requests_does_not_go_first_for_that(tmp_path: Path, share: str) -> None:
    """Beside a job of another share, and of its own."""
    pool, names = pool_of(job(tmp_path, "rows", 40, "a")), list[str]()
    for k in range(16):
        if not any(request.request_id.startswith("flex") for request in pool.flex):
            pool.add_flex(flex(f"flex{k}", share))
        names += drawn(pool, 1)
    assert names.count("rows") == pytest.approx(8, abs=1)


def test_answers_are_charged_for_before_they_are_there(tmp_path: Path) -> None:
    """Of two quanta each: a row is more than a turn, where by its prompt alone it is half of one."""
    long = msgspec.structs.replace(
        job(tmp_path, "long", 20, "a"), params_table=[SamplingParams(max_tokens=2 * QUANTUM_TOKENS)]
    )
    pool = OfflinePool(turns=ByShares({}))
    for message in (long, job(tmp_path, "short", 40, "b")):
        pool.add_batch(message, 0.0, 8 * MAX_NUM_TOKENS)
    end(pool, pool.pop(), 2 * QUANTUM_TOKENS)  # the first tells
    assert drawn(pool, 12) == ["short"] * 4 + ["long"] + ["short"] * 6 + ["long"]


@pytest.mark.parametrize("tokens", [0, QUANTUM_TOKENS])
def test_what_an_answer_was_in_the_end_counts_and_not_what_was_expected(tmp_path: Path, tokens: int) -> None:
    """Also of a request that ends without any, for it is cancelled, or fails. Nothing counts twice."""
    pool = pool_of(job(tmp_path, "a", 40, "a"), job(tmp_path, "b", 40, "b"))
    shares = pool.turns.shares.had  # type: ignore[attr-defined]
    requests = [pool.pop() for _ in range(8)]
    assert shares["a"] == 4 * (ROW_TOKENS + 4), "four are the most of an answer here"
    for request in requests:
        pool.give_back(request)
        assert pool.pop() is request
        end(pool, request, tokens)
    assert shares == {"a": 4 * (ROW_TOKENS + tokens), "b": 4 * (ROW_TOKENS + tokens)}


def test_what_is_still_to_come_of_who_was_alone_counts_for_who_comes(tmp_path: Path) -> None:
    """While 4 rows put out two quanta each, the other is to have 8 of its own; one half is due to where a turn ends."""
    pool = pool_of(job(tmp_path, "a", 40, "a"))
    end(pool, pool.pop(), 2 * QUANTUM_TOKENS)
    pool.turns.expected_answer = lambda lane, request: 2 * QUANTUM_TOKENS if lane.share == "a" else 0  # type: ignore
    drawn(pool, 4)
    pool.add_batch(job(tmp_path, "b", 40, "b"), 0.0, MAX_NUM_TOKENS)
    assert drawn(pool, 16) == ["b"] * 15 + ["a"]


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
        pool.turns.begin_step(second)
    assert set(drawn(pool, 4)) == {"talkative"}


def test_looking_ahead_charges_nobody(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "a", 9), job(tmp_path, "b", 9))
    foreseen = [request.request_id.split(":")[0] for request in pool.in_turn()]
    assert foreseen == drawn(pool, 18)


def test_what_is_foreseen_is_what_is_handed_out_whatever_shares_and_jobs_there_are(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"j{k}", 3 + k, f"key{k % 3}", deadline_s=40.0 if k == 4 else 1e9) for k in range(7)]
    pool = pool_of(*jobs, weights={"key1": 2.0, "key2": 0.5})
    for k in range(6):
        pool.add_flex(flex(f"flex{k}", f"key{k % 2}"))
    begin_steps(pool, 3)
    assert list(pool.turns.urgency.places) == [pool.jobs["j4"]]  # type: ignore[attr-defined]
    foreseen = [request.request_id for request in pool.in_turn()]
    assert [pool.pop().request_id for _ in range(len(pool))] == foreseen


def test_a_look_goes_by_answers_as_well(tmp_path: Path) -> None:
    """Of two quanta: after one of its rows the other has four."""
    long = msgspec.structs.replace(
        job(tmp_path, "a", 9, "a"), params_table=[SamplingParams(max_tokens=2 * QUANTUM_TOKENS)]
    )
    pool = OfflinePool(turns=ByShares({}))
    for message in (long, job(tmp_path, "b", 40, "b")):
        pool.add_batch(message, 0.0, 8 * MAX_NUM_TOKENS)
    end(pool, pool.pop(), 2 * QUANTUM_TOKENS)
    foreseen = [request.request_id for request in pool.in_turn()]
    assert [pool.pop().request_id for _ in range(len(pool))] == foreseen


def test_of_many_jobs_only_those_are_looked_at_that_have_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(*(job(tmp_path, f"j{k}", 1) for k in range(12)))
    asked: list[JobLane] = []
    length = JobLane.__len__
    monkeypatch.setattr(JobLane, "__len__", lambda lane: asked.append(lane) or length(lane))  # type: ignore[func-returns-value]
    pool.begin_step(0.0, is_paused=False)
    assert len(pool) == 12
    pool.pop()
    assert len({id(lane) for lane in asked}) == 1
    assert [len(pool.take_first_materialized()), len(pool)] == [1, 11]


def begin_steps(pool: OfflinePool, count: int, draws: int = 1) -> None:
    """A row a second, so that the rate is known."""
    for second in range(count):
        pool.turns.begin_step(float(second))
        drawn(pool, draws)
    pool.turns.begin_step(float(count))


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
        pool.turns.begin_step(float(second))
    for message in (job(tmp_path, "lax", 60), job(tmp_path, "urgent", 14, deadline_s=924.0)):
        pool.add_batch(message, 900.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(900.0)
    pool.turns.begin_step(901.0)
    assert set(drawn(pool, 6)) == {"urgent"}


def test_of_two_urgent_jobs_the_one_that_is_due_first_goes_first(tmp_path: Path) -> None:
    """A row a second: the first, due in 17 s, has 13 s to lose, the second, due in 23 s, 11."""
    pool = pool_of(job(tmp_path, "lax", 60))
    begin_steps(pool, 6)
    for message in (job(tmp_path, "long", 12, deadline_s=30.0), job(tmp_path, "soon", 4, deadline_s=24.0)):
        pool.add_batch(message, 6.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(7.0)
    assert drawn(pool, 6) == ["soon"] * 4 + ["long"] * 2


@pytest.mark.parametrize("jobs_at_once", [256, 2])
def test_in_overload_the_jobs_that_fit_are_in_time_and_not_all_of_them_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs_at_once: int
) -> None:
    """A row a second and 65 s; two of four jobs of 30 rows fit, the older ones. Judged in parts as well."""
    monkeypatch.setattr(urgency, "LANES_AT_ONCE", jobs_at_once)
    pool = pool_of(*(job(tmp_path, f"j{k}", 30, deadline_s=65.0) for k in range(4)), job(tmp_path, "lax", 90))
    done = Counter[str]()
    for second in range(65):
        for part in range(3):
            pool.turns.begin_step(second + part / 4)
        done.update(drawn(pool, 1))
    assert (done["j0"], done["j1"]) == (30, 30)
    assert done["lax"] >= 1, "what cannot be in time takes turns"


def test_a_job_that_does_not_fit_behind_one_that_has_time_yet_is_not_urgent(tmp_path: Path) -> None:
    """A row a second: 6 rows due in 36 s are in time with their third; 30 rows due 0.3 s later are not with them."""
    pool = pool_of(job(tmp_path, "lax", 60))
    begin_steps(pool, 6)
    for message in (job(tmp_path, "soon", 6, deadline_s=43.0), job(tmp_path, "big", 30, deadline_s=43.3)):
        pool.add_batch(message, 6.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(7.0)
    assert set(drawn(pool, 6)) == {"lax", "soon", "big"}


def test_an_urgent_job_that_is_cancelled_has_no_turn(tmp_path: Path) -> None:
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "urgent", 14, deadline_s=24.0))
    begin_steps(pool, 8)
    pool.cancel_batch("urgent")
    assert set(drawn(pool, 2)) == {"lax"}


def test_a_job_that_is_cancelled_while_jobs_are_judged_is_not_urgent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urgency, "LANES_AT_ONCE", 1)
    pool = pool_of(job(tmp_path, "lax", 60), job(tmp_path, "urgent", 14, deadline_s=24.0))
    begin_steps(pool, 1)
    pool.cancel_batch("urgent")
    pool.turns.begin_step(1.1)
    assert drawn(pool, 1) == ["lax"]


@pytest.mark.parametrize(("weight", "is_urgent"), [(1.0, True), (4.0, False)])
def test_what_a_job_would_have_by_its_weight_says_whether_it_is_urgent(
    tmp_path: Path, weight: float, is_urgent: bool
) -> None:
    """A row a second, 8 rows due in 28 s: by halves 16 s, by four fifths 10, and a quarter and 10 s more."""
    pool = pool_of(job(tmp_path, "lax", 60, "a"), weights={"b": weight})
    begin_steps(pool, 8)
    pool.add_batch(job(tmp_path, "due", 8, "b", deadline_s=37.0), 8.0, MAX_NUM_TOKENS)
    pool.turns.begin_step(9.0)
    assert (set(pool.turns.urgency.places) == {pool.jobs["due"]}) is is_urgent  # type: ignore[attr-defined]


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
