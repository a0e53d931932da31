"""BatchLLM: groups in the planned order, decodes first, memory to a threshold, no job put off for ever."""

from pathlib import Path

import msgspec

from neaptide.engine.offline.turns import GUARD_S
from tests.engine.harness import Harness, batch
from tests.engine.offline.planning.orders import plan


def batchllm(**fields: object) -> Harness:
    return Harness(**({"policy": "batchllm"} | fields))  # type: ignore[arg-type]


def test_rows_go_group_by_group_as_planned(tmp_path: Path) -> None:
    harness = batchllm(max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[row + 5] * 6 for row in range(4)], max_tokens=1))
    harness.core.handle(plan(("job", 2), ("job", 0), ("job", 3), ("job", 1)))
    assert [next(iter(step)) for step in harness.run()] == ["job:2", "job:0", "job:3", "job:1"]


def test_decodes_have_their_tokens_before_a_prompt_that_was_begun(tmp_path: Path) -> None:
    harness = batchllm(max_num_batched_tokens=8)
    harness.core.handle(batch(tmp_path, "job", [[7] * 20, [8] * 4], max_tokens=3))
    harness.core.handle(plan(("job", 1), ("job", 0)))
    assert harness.step() == {"job:1": 4, "job:0": 4}
    assert harness.step() == {"job:1": 1, "job:0": 7}
    assert list(harness.step()) == ["job:1", "job:0"]


def test_prompts_are_admitted_up_to_the_memory_threshold(tmp_path: Path) -> None:
    harness = batchllm(num_blocks=40)
    harness.core.handle(batch(tmp_path, "job", [[row + 5] * 16 for row in range(12)], max_tokens=2))
    # Nine prompts of four blocks leave 4 of 40 blocks, and beside a tenth none: two have to stay free.
    assert len(harness.step()) == 9


def test_a_job_that_has_waited_for_long_goes_before_younger_ones(tmp_path: Path) -> None:
    harness = batchllm(max_num_seqs=1)
    old = batch(tmp_path, "old", [[9] * 4], max_tokens=1)
    harness.core.handle(msgspec.structs.replace(old, deadline_s=2e9))
    harness.core.scheduler.queues.pool.begin_step(0.0, False)
    harness.core.scheduler.queues.pool.begin_step(GUARD_S + 1.0, False)
    harness.core.handle(batch(tmp_path, "young", [[row + 20] * 4 for row in range(3)], max_tokens=1))
    harness.core.handle(plan(*(("young", row) for row in range(3)), ("old", 0)))
    pool = harness.core.scheduler.queues.pool
    assert next(iter(pool)).request_id == "old:0"


def test_a_job_is_not_old_because_no_step_was_made_for_long_before_it_came(tmp_path: Path) -> None:
    harness = batchllm(max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "first", [[9] * 4], max_tokens=1))
    harness.core.scheduler.queues.pool.begin_step(100_000.0, False)  # the machine has been up for a day
    harness.core.handle(batch(tmp_path, "second", [[row + 20] * 4 for row in range(2)], max_tokens=1))
    harness.core.scheduler.queues.pool.begin_step(100_001.0, False)
    harness.core.handle(plan(("second", 1), ("first", 0), ("second", 0)))
    pool = harness.core.scheduler.queues.pool
    assert [request.request_id for request in pool] == ["second:1", "first:0", "second:0"]


def test_young_jobs_go_as_planned_whatever_their_deadlines(tmp_path: Path) -> None:
    harness = batchllm(max_num_seqs=1)
    late = batch(tmp_path, "late", [[9] * 4, [10] * 4], max_tokens=1)
    harness.core.handle(batch(tmp_path, "early", [[30] * 4], max_tokens=1))
    harness.core.handle(msgspec.structs.replace(late, deadline_s=2e9))
    harness.core.handle(plan(("late", 1), ("early", 0), ("late", 0)))
    assert [request.request_id for request in harness.core.scheduler.queues.pool] == ["late:1", "early:0", "late:0"]
