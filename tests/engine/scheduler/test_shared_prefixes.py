"""Rows that share a prefix: it is computed once, and kept as long as a row wants it."""

from pathlib import Path

import msgspec
import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv import prefix_index
from neaptide.engine.kv.prefix_index import chained_hash
from neaptide.engine.messages import CancelBatch
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, batch, flex, online

A, B = [1] * 32, [2] * 32
"""Documents of two units, eight blocks each."""


class DearPrompts(ConstantCostModel):
    """A step with a chunk of more than one token in it takes 10 ms, and 200 for the chunk's sake."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.21 if shape.prefill_requests else 0.01, 0.0)


def cached_tokens(harness: Harness) -> dict[str, int]:
    return {request_id: output.num_cached_tokens for request_id, (output,) in harness.ends.items()}


def test_rows_of_a_prefix_follow_one_another_and_read_it_in_the_step_that_computes_it(tmp_path: Path) -> None:
    harness = Harness(max_num_batched_tokens=40)
    harness.core.handle(batch(tmp_path, "job", [[*A, 9], [*B, 9], [*A, 8], [*B, 8]], max_tokens=1))
    assert harness.run() == [
        {"job:2": 33, "job:0": 1, "job:3": 6},
        {"job:3": 27, "job:1": 1},
    ]
    assert cached_tokens(harness) == {"job:0": 32, "job:1": 32, "job:2": 0, "job:3": 0}


def test_a_row_waits_for_the_prefix_that_another_is_computing(tmp_path: Path) -> None:
    """Beside the chat only single tokens are cheap enough. The row that goes on with the document takes one a step; one
    that began with another would compute the rest of the document by itself."""
    harness = Harness(cost_model=DearPrompts(0.01), max_num_batched_tokens=20, late_price_s=1000.0)
    harness.core.handle(batch(tmp_path, "job", [[*A, *A, 9], [*A, *A, 8]], max_tokens=1))
    harness.step()
    harness.core.handle(online("chat", [20, 21], max_tokens=8))
    assert [harness.step() for _ in range(3)] == [{"chat": 2, "job:1": 18}, *2 * [{"chat": 1, "job:1": 1}]]
    harness.run()
    assert cached_tokens(harness) == {"job:1": 0, "job:0": 64, "chat": 0}


def test_a_row_does_not_wait_for_one_that_sits_out(tmp_path: Path) -> None:
    """The chat leaves four blocks; the row that has the document's first seven needs five for its next tokens, and one
    that ends with the document two."""
    harness = Harness(num_blocks=20, max_num_batched_tokens=28)
    harness.core.handle(batch(tmp_path, "job", [[*A, 9], [*A, *[8] * 40]], max_tokens=1))
    assert harness.step() == {"job:1": 28}
    harness.core.handle(online("chat", [20] * 36, max_tokens=1))
    assert [harness.step(), harness.step()] == [{"chat": 28}, {"chat": 8, "job:0": 5}]
    harness.run()


def test_a_shared_prefix_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks for either document, one for what each row has of its own. The first and the last row end in the
    first document, so that neither's hashes may go on into the second."""
    texts: list[bytes] = []

    def counted(parent: bytes, text: bytes) -> bytes:
        texts.append(text)
        return chained_hash(parent, text)

    monkeypatch.setattr(prefix_index, "chained_hash", counted)
    harness = Harness(max_num_batched_tokens=200, max_num_seqs=1)
    rows = [[*A, 4, 4, 4, 4, 9], [*A, *B, 5, 5, 5, 5, 9], [*A, *B, 6, 6, 6, 6, 9], [*A, 7, 7, 7, 7, 9]]
    harness.core.handle(batch(tmp_path, "job", rows, max_tokens=1))
    harness.run()
    assert len(texts) == 8 + 8 + 4
    assert sorted(cached_tokens(harness).values()) == [0, 32, 32, 64]


def test_a_prefix_that_rows_want_outlives_what_no_row_wants(tmp_path: Path) -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=33, max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[*A, 9], [*A, 8], [*A, 7]], max_tokens=1))
    harness.step()
    for k in range(3):  # chats that need most of the cache between the rows
        harness.core.handle(online(f"chat{k}", [20 + k] * 33, max_tokens=1))
        harness.step()
    harness.run()
    cached = cached_tokens(harness)
    assert [cached[f"job:{row}"] for row in (2, 1, 0)] == [0, 32, 32]


def test_what_a_cancelled_job_wanted_is_wanted_no_more(tmp_path: Path) -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=33, max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "gone", [[*A, 9], [*A, 8], [*A, 7]], max_tokens=1))
    harness.step()
    harness.core.handle(batch(tmp_path, "stays", [[*B, 9], [*B, 8]], max_tokens=1))
    harness.core.handle(CancelBatch("gone"))
    harness.step()
    harness.core.handle(online("chat", [20] * 17, max_tokens=1))
    harness.run()
    assert cached_tokens(harness)["stays:0"] == 32


def test_rows_that_come_later_want_a_prefix_that_others_have_begun(tmp_path: Path) -> None:
    harness = Harness(num_blocks=20, max_num_batched_tokens=33, max_num_seqs=1)
    job = batch(tmp_path, "job", [[*A, 9], [*A, 8], [*A, 7]], max_tokens=1)
    harness.core.handle(msgspec.structs.replace(job, rows=[0, 1], params_index=[0, 0]))
    harness.step()
    harness.core.handle(msgspec.structs.replace(job, rows=[2], params_index=[0]))
    (prefix_node,) = harness.core.scheduler.queues.pool.pop().prefix_nodes[:-1]
    assert prefix_node.num_wanting == 2


def test_flex_requests_alone_are_served_step_by_step_as_chats_alone() -> None:
    """Two documents in no order, the first request a step before the others; targets that bind nobody."""
    prompts = [[*document, *[own] * 5] for own, document in enumerate([A, B, A, A, B, B, A, B], start=50)]
    steps = []
    for ask in (online, flex):
        harness = Harness(max_num_batched_tokens=48, ttft_slo_s=3600.0, tpot_slo_s=3600.0)
        messages = [ask(f"r{i}", p, ttft_slo_s=3600.0, tpot_slo_s=3600.0) for i, p in enumerate(prompts)]
        harness.core.handle(messages[0])
        steps.append([harness.step()])
        for message in messages[1:]:
            harness.core.handle(message)
        steps[-1] += harness.run()
        assert list(cached_tokens(harness).values()).count(32) == 6
    assert steps[0] == steps[1]
    assert steps[0][:2] == [{"r0": 37}, {"r0": 1, "r1": 37, "r2": 5, "r3": 5}]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_baselines_keep_file_order(policy: str, tmp_path: Path) -> None:
    harness = Harness(policy=policy, max_num_batched_tokens=33)
    harness.core.handle(batch(tmp_path, "job", [[*A, 9], [*B, 9], [*A, 8]], max_tokens=1))
    assert [request_id for step in harness.run() for request_id in step] == ["job:0", "job:1", "job:2"]


def test_counts_that_are_left_over_from_a_batch_that_has_ended_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    harness.core.handle(batch(tmp_path, "a", [[7] * 8 + [row] for row in range(2)], max_tokens=1))
    monkeypatch.setattr(harness.core.kv, "want_no_more", lambda path, count=1: None)
    with pytest.raises(AssertionError):
        harness.run()
