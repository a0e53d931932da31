"""Which of the pool's requests stand for the others when a policy compares them."""

from pathlib import Path

import pytest

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from tests.engine.harness import batch

A, B, C = [1] * 16, [2] * 16, [3] * 16
PROMPTS = [[*A, 8], [*B, 8], [7] * 17, [*A, 9], [*C, 8], [*B, 9], [6] * 40, [*A, *[10] * 20], [*C, 9]]
"""Three prefixes that rows share, and two rows alone; rows 6 and 7 are twice as long as the others."""


@pytest.fixture
def pool(tmp_path: Path) -> OfflinePool:
    made = OfflinePool(by_prefix=True)
    assert made.add_batch(batch(tmp_path, "job", PROMPTS), 0.0, 64) == []
    return made


def heads(pool: OfflinePool, *taken: Request) -> list[tuple[int, str]]:
    draft = PoolDraft(pool)
    for request in taken:
        draft.take(request)
    return [(bucket, request.request_id) for bucket, request in draft.heads()]


def take(pool: OfflinePool, request_id: str) -> Request:
    (request,) = [request for _, request in PoolDraft(pool).heads() if request.request_id == request_id]
    pool.take(request)
    return request


def test_at_first_there_is_one_row_of_every_length(pool: OfflinePool) -> None:
    assert heads(pool) == [(5, "job:0"), (6, "job:7")]
    assert [request.request_id for request in pool.take_first_materialized()] == ["job:0", "job:7"]


def test_prefixes_of_rows_that_were_handed_out_stand_for_themselves(pool: OfflinePool) -> None:
    take(pool, "job:0")
    assert heads(pool) == [(5, "job:3"), (6, "job:7"), (5, "job:1"), (6, "job:6")]
    take(pool, "job:1")
    assert heads(pool) == [(5, "job:3"), (6, "job:7"), (5, "job:5"), (5, "job:2"), (6, "job:6")]
    take(pool, "job:2")  # shares nothing, so what comes next of its kind is as good as any other
    assert heads(pool) == [(5, "job:3"), (6, "job:7"), (5, "job:5"), (5, "job:4"), (6, "job:6")]


def test_what_a_draft_takes_makes_way_for_the_next(pool: OfflinePool) -> None:
    first = take(pool, "job:0")
    pool.give_back(first)
    (second,) = [request for _, request in PoolDraft(pool).heads() if request.request_id == "job:3"]
    assert heads(pool, first) == [(5, "job:3"), (6, "job:7"), (5, "job:1"), (6, "job:6")]
    assert heads(pool, second) == [(5, "job:0"), (6, "job:7"), (5, "job:1"), (6, "job:6")]


def test_a_row_that_leaves_by_turn_leaves_its_group(pool: OfflinePool) -> None:
    heads(pool)
    assert [pool.pop().request_id for _ in range(4)] == ["job:0", "job:3", "job:7", "job:1"]
    assert heads(pool) == [(5, "job:5"), (5, "job:2"), (6, "job:6")]


def test_rows_that_come_later_join_the_groups(tmp_path: Path) -> None:
    pool, message = OfflinePool(by_prefix=True), batch(tmp_path, "job", PROMPTS)
    for rows in ([1, 2, 3], [0, 4, 5, 6, 7, 8]):
        part = AddBatch("job", message.path, rows, message.params_table, [0] * len(rows), [], 1e9)
        pool.add_batch(part, 0.0, 64)
        first = heads(pool)
    assert first == [(5, "job:0"), (6, "job:7")]


def test_flex_requests_stand_by_length_in_their_order(pool: OfflinePool) -> None:
    for name, length in (("a", 9), ("b", 4), ("c", 8), ("d", 5)):
        pool.add_flex(Request(name, [7] * length, SamplingParams(), Tier.FLEX, 0.0))
    assert heads(pool) == [(4, "a"), (3, "b"), (5, "job:0"), (6, "job:7")]


def test_a_file_that_shares_nothing_has_a_row_of_every_length(tmp_path: Path) -> None:
    pool = OfflinePool(by_prefix=True)
    pool.add_batch(batch(tmp_path, "job", [[5] * 4, [6] * 9, [7] * 5]), 0.0, 64)
    assert heads(pool) == [(3, "job:0"), (4, "job:1")]


def test_prefixes_below_another_are_of_its_group(tmp_path: Path) -> None:
    pool = OfflinePool(by_prefix=True)
    pool.add_batch(batch(tmp_path, "job", [[*A, *B, 8], [*A, *B, 9], [*A, *C, 8]]), 0.0, 64)
    take(pool, "job:0")
    assert heads(pool) == [(6, "job:1")]
