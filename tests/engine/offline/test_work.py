"""What is left of a batch, and the least time that it takes: numbers that can be added up by hand."""

from pathlib import Path

import pytest

from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.work import WholeDevice, Work
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch

STEP_S = 0.01
MAX_NUM_TOKENS = 4096


def device(max_step_tokens: int = 2048, max_num_seqs: int = 256, kv_tokens: int = 1_000_000) -> WholeDevice:
    return WholeDevice(ConstantCostModel(STEP_S), max_step_tokens, max_num_seqs, kv_tokens)


def rows_of(num_rows: int, prompt: int, answer: int) -> Work:
    """Nothing of them is done."""
    prompts, answers = num_rows * prompt, num_rows * answer
    return Work(num_rows, prompts + answers, prompts, prompts, answers, answers - num_rows)


@pytest.mark.parametrize(
    ("whole", "work", "num_steps"),
    [
        pytest.param(device(), Work(), 0, id="nothing is left"),
        pytest.param(device(), rows_of(2, 10, 256), 255, id="one answer's tokens follow one another"),
        pytest.param(device(), rows_of(100, 2048, 1), 100, id="prompts fill the steps' tokens"),
        pytest.param(device(max_step_tokens=4), rows_of(4, 1, 8), 8, id="decodes do, too"),
        pytest.param(device(max_num_seqs=2), rows_of(8, 1, 101), 400, id="two seats for eight answers"),
        pytest.param(device(kv_tokens=399), rows_of(4, 9, 91), 120, id="memory for three rows of four"),
        pytest.param(device(kv_tokens=5), rows_of(2, 9, 11), 20, id="memory for none: one after another"),
    ],
)
def test_the_least_number_of_steps(whole: WholeDevice, work: Work, num_steps: int) -> None:
    assert whole.least_seconds(work) == pytest.approx(num_steps * STEP_S)


def test_prompts_and_answers_share_every_step() -> None:
    """50 steps of 2 decodes and 4 prompt tokens, 16 ms each."""
    whole = WholeDevice(PerTokenCost(), 2048, 256, 1_000_000)
    assert whole.least_seconds(rows_of(2, 100, 51)) == pytest.approx(50 * 0.016)


def test_what_rows_share_takes_no_time_and_is_held_once() -> None:
    """A prefix of 1,000 tokens and 24 of its own for every row: 1,240 tokens are computed and 1,250 held."""
    shared = Work(10, 10 * 1025, 10 * 1024, 1240, 10, 0)
    assert device(max_step_tokens=124).least_seconds(shared) == pytest.approx(10 * STEP_S)
    answers = Work(10, 10 * 1124, 10 * 1024, 1240, 1000, 990)
    assert device(kv_tokens=2240).least_seconds(answers) == pytest.approx(99 * STEP_S)


def test_rows_that_wait(tmp_path: Path) -> None:
    harness = Harness(num_blocks=100)
    harness.core.handle(batch(tmp_path, "a", [[1] * 10, [2] * 20], max_tokens=300))
    assert work_of(harness, "a") == Work(2, 30 + 2 * 256, 30, 30, 2 * 256, 2 * 255)


def test_a_row_on_its_way(tmp_path: Path) -> None:
    """Three steps: a chunk of 6 tokens, the last 2 with the first token of the answer, a decode."""
    harness = Harness(max_num_batched_tokens=6)
    harness.core.handle(batch(tmp_path, "a", [[1] * 8], max_tokens=5))
    found = []
    for _ in range(3):
        harness.step()
        found.append(work_of(harness, "a"))
    assert found == [Work(1, 13, 2, 2, 5, 4), Work(1, 13, 0, 0, 4, 4), Work(1, 13, 0, 0, 3, 3)]


def test_a_preempted_row_has_all_to_compute_again(tmp_path: Path) -> None:
    harness = Harness()
    harness.core.handle(batch(tmp_path, "a", [[1] * 8], max_tokens=5))
    harness.step()
    queues = harness.core.scheduler.queues
    queues.preempt(queues.running_offline["a:0"])
    assert work_of(harness, "a") == Work(1, 13, 9, 9, 4, 3)


def test_answers_are_expected_to_be_as_long_as_those_that_have_ended(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1, eos_token_ids=frozenset(range(1000)))
    harness.core.handle(batch(tmp_path, "a", [[1] * 8, [2] * 8], max_tokens=50))
    harness.step()
    assert harness.ends["a:0"][0].new_token_ids == []
    assert work_of(harness, "a") == Work(1, 8, 8, 8, 0, 0)


def test_a_row_beyond_its_expected_answer_has_a_token_left(tmp_path: Path) -> None:
    harness = Harness(num_blocks=200)
    harness.core.handle(batch(tmp_path, "a", [[1] * 8], max_tokens=400))
    for _ in range(300):
        harness.step()
    assert work_of(harness, "a") == Work(1, 309, 0, 0, 1, 1)


def test_a_batch_is_forgotten_with_its_last_row(tmp_path: Path) -> None:
    harness = Harness()
    harness.core.handle(batch(tmp_path, "a", [[1] * 8, [2] * 8], max_tokens=2))
    assert set(harness.core.scheduler.queues.pool.jobs) == {"a"}
    harness.run()
    assert not harness.core.scheduler.queues.pool.jobs


def test_shared_prefixes_of_rows_that_wait_are_new_once(tmp_path: Path) -> None:
    pool = OfflinePool(by_prefix=True)
    document = [7] * 32
    prompts = [document + [row + 8] * 8 for row in range(3)] + [[5] * 10]
    pool.add_batch(batch(tmp_path, "a", prompts, max_tokens=1), 0.0, MAX_NUM_TOKENS)
    table = Harness().core.scheduler.queues.table
    job = pool.jobs["a"]
    assert (job.work(table).prompt_tokens, job.work(table).new_tokens) == (3 * 40 + 10, 32 + 3 * 8 + 10)
    pool.pop()
    (source,) = job.sources
    assert (source.num_prompt_tokens_left, source.num_new_tokens_left) == (2 * 40 + 10, 2 * 8 + 10)


def work_of(harness: Harness, batch_id: str) -> Work:
    queues = harness.core.scheduler.queues
    return queues.pool.jobs[batch_id].work(queues.table)
