"""Batches in the pool: parts of one batch, their order, and how they leave."""

from pathlib import Path

import msgspec
import pytest

from neaptide.engine.messages import AddBatch, CancelBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.params import FinishReason, SamplingParams
from tests.engine.harness import Harness, batch

MAX_NUM_TOKENS = 64


def part(message: AddBatch, rows: list[int], **fields: object) -> AddBatch:
    return msgspec.structs.replace(message, rows=rows, params_index=[0] * len(rows), **fields)


def drain(pool: OfflinePool) -> list[str]:
    return [pool.pop().request_id for _ in range(len(pool))]


def test_further_parts_stand_behind_the_first_and_before_later_batches(tmp_path: Path) -> None:
    pool = OfflinePool()
    a, b = batch(tmp_path, "a", [[i + 1] for i in range(6)]), batch(tmp_path, "b", [[9]])
    for message in (part(a, [0, 1]), b, part(a, [2, 4]), part(a, [3])):
        assert pool.add_batch(message, 0.0, MAX_NUM_TOKENS) == []
    assert len(pool) == 6
    assert drain(pool) == ["a:0", "a:1", "a:2", "a:4", "a:3", "b:0"]
    assert len(pool) == 0


def test_a_part_may_come_when_the_ones_before_have_been_handed_out(tmp_path: Path) -> None:
    pool = OfflinePool()
    message = batch(tmp_path, "a", [[1], [2]])
    pool.add_batch(part(message, [0]), 0.0, MAX_NUM_TOKENS)
    assert drain(pool) == ["a:0"]
    pool.add_batch(part(message, [1]), 0.0, MAX_NUM_TOKENS)
    assert drain(pool) == ["a:1"]


def test_a_batch_whose_further_part_comes_late_stands_before_batches_with_later_deadlines(tmp_path: Path) -> None:
    pool = OfflinePool()
    early, late = batch(tmp_path, "early", [[1], [2]]), batch(tmp_path, "late", [[8], [9]])
    pool.add_batch(part(early, [0], deadline_s=100.0), 0.0, MAX_NUM_TOKENS)
    pool.add_batch(part(late, [0, 1], deadline_s=200.0), 0.0, MAX_NUM_TOKENS)
    assert [pool.pop().request_id, pool.pop().request_id] == ["early:0", "late:0"]
    pool.add_batch(part(early, [1], deadline_s=100.0), 0.0, MAX_NUM_TOKENS)
    assert drain(pool) == ["early:1", "late:1"]


def test_a_row_has_its_batchs_deadline_and_arrived_when_it_came(tmp_path: Path) -> None:
    pool = OfflinePool()
    pool.add_batch(part(batch(tmp_path, "a", [[1]]), [0], deadline_s=100.0), 3.0, MAX_NUM_TOKENS)
    request = pool.pop()
    assert (request.deadline_s, request.arrival_s) == (100.0, 3.0)


def test_each_part_has_its_own_token_file_and_parameters(tmp_path: Path) -> None:
    pool = OfflinePool()
    first = batch(tmp_path, "a", [[1, 2]], max_tokens=3)
    other = batch(tmp_path, "elsewhere", [[5], [6, 7]], max_tokens=8)
    pool.add_batch(first, 0.0, MAX_NUM_TOKENS)
    pool.add_batch(msgspec.structs.replace(other, batch_id="a", rows=[1], params_index=[0]), 1.0, MAX_NUM_TOKENS)
    requests = [pool.pop(), pool.pop()]
    assert [(r.request_id, r.token_ids.tolist(), r.params.max_tokens) for r in requests] == [
        ("a:0", [1, 2], 3),
        ("a:1", [6, 7], 8),
    ]


def test_rows_that_can_never_run_are_returned_and_the_others_stay(tmp_path: Path) -> None:
    pool = OfflinePool()
    message = batch(tmp_path, "a", [[1], [], [1] * 60, [1] * 61], max_tokens=4)
    long = SamplingParams(max_tokens=MAX_NUM_TOKENS)
    message = msgspec.structs.replace(
        message, rows=[0, 1, 2, 3, 0], params_index=[0, 0, 0, 0, 1], params_table=[*message.params_table, long]
    )
    assert pool.add_batch(message, 0.0, MAX_NUM_TOKENS) == [1, 3, 0]
    assert drain(pool) == ["a:0", "a:2"]


def test_a_part_that_names_rows_that_are_not_there_leaves_the_others(tmp_path: Path) -> None:
    pool = OfflinePool()
    message = batch(tmp_path, "a", [[1], [2]])
    pool.add_batch(part(message, [0]), 0.0, MAX_NUM_TOKENS)
    with pytest.raises(ValueError, match="line 2 was requested"):
        pool.add_batch(part(message, [1, 2]), 0.0, MAX_NUM_TOKENS)
    with pytest.raises(FileNotFoundError):
        pool.add_batch(part(message, [1], path=str(tmp_path / "missing")), 0.0, MAX_NUM_TOKENS)
    assert drain(pool) == ["a:0"]


def test_cancel_drops_all_parts(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1)
    message = batch(tmp_path, "a", [[i + 1] for i in range(6)])
    for rows in ([0, 1], [2, 3], [4, 5]):
        harness.core.handle(part(message, rows))
    harness.core.handle(batch(tmp_path, "b", [[9]]))
    harness.step()
    harness.core.handle(CancelBatch("a"))
    assert len(harness.core.scheduler.queues.pool) == 1
    harness.run()
    assert {request_id: harness.reason(request_id) for request_id in harness.ends} == {
        "a:0": FinishReason.ABORT,
        "b:0": FinishReason.LENGTH,
    }


def test_rows_come_in_the_order_of_their_key_whatever_message_they_came_with(tmp_path: Path) -> None:
    pool = OfflinePool(lambda tokens, row: tokens.prompt(row))
    a = batch(tmp_path, "a", [[5], [3], [9], [1], [7], [4]])
    pool.add_batch(part(a, [0, 1, 2]), 0.0, MAX_NUM_TOKENS)
    assert pool.pop().request_id == "a:1"
    pool.add_batch(part(a, [3, 4, 5]), 0.0, MAX_NUM_TOKENS)
    assert drain(pool) == ["a:3", "a:5", "a:0", "a:4", "a:2"]


def test_looking_at_a_row_leaves_it_in_its_place_and_makes_its_request_once(tmp_path: Path) -> None:
    pool = OfflinePool(lambda tokens, row: tokens.prompt(row))
    a = batch(tmp_path, "a", [[5], [3]])
    pool.add_batch(part(a, [0]), 0.0, MAX_NUM_TOKENS)
    materialized = PoolDraft(pool).peek()
    assert PoolDraft(pool).peek() is materialized
    pool.add_batch(part(a, [1]), 0.0, MAX_NUM_TOKENS)
    first = pool.pop()
    assert first.request_id == "a:1"
    assert PoolDraft(pool).peek() is materialized
    assert pool.pop() is materialized
    assert pool.take_first_materialized() == [materialized, first]


def test_parameters_follow_their_rows_into_another_order(tmp_path: Path) -> None:
    pool = OfflinePool(lambda tokens, row: tokens.prompt(row))
    message = msgspec.structs.replace(
        batch(tmp_path, "a", [[2], [], [1]]),
        params_table=[SamplingParams(max_tokens=3), SamplingParams(max_tokens=8)],
        params_index=[0, 0, 1],
    )
    assert pool.add_batch(message, 0.0, MAX_NUM_TOKENS) == [1]
    assert [(r.request_id, r.params.max_tokens) for r in (pool.pop(), pool.pop())] == [("a:2", 8), ("a:0", 3)]
