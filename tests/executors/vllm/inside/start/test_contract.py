"""What we read of vLLM's objects is there once it has started; of its classes ``tools/vllm_contract.py`` knows."""

import os

import pytest

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside import second_runner, worker_side
from tests.executors.vllm.inside.faults import in_workers, vllm
from tests.executors.vllm.inside.runs import Run, prompts
from tools.vllm_contract import INSTANCES

IS_V2 = second_runner.is_wanted()
NUM_RANKS = int(os.environ.get("NEAPTIDE_TEST_RANKS", "1"))


def test_the_engine_has_what_we_read_of_it(started: StartedExecutor) -> None:
    engine = vllm(started)._engine
    assert worker_side.missing(engine, INSTANCES["engine"]) == []
    if NUM_RANKS > 1:
        assert worker_side.missing(engine.model_executor, INSTANCES["processes"]) == []
        assert len(engine.model_executor.workers) == NUM_RANKS


def test_the_runner_of_each_rank_has_what_we_read_of_it(started: StartedExecutor) -> None:
    paths = INSTANCES["V2" if IS_V2 else "V1"]
    assert in_workers(started, worker_side.missing_in_runner, paths) == [[]] * NUM_RANKS
    assert (
        in_workers(started, worker_side.missing_in_runner, ("kv_caches.no_such",))
        == [["kv_caches.no_such"]] * NUM_RANKS
    )


@pytest.mark.skipif(IS_V2, reason="V2 has none: its draws depend on seed and position")
def test_a_request_with_a_seed_has_a_generator_of_its_own(started: StartedExecutor) -> None:
    run = Run(started.executor)
    seeded, other = prompts(2, seed=41)
    run.add("seeded", seeded, temperature=1.0, seed=1)
    run.add("other", other, temperature=1.0)
    run.step()
    run.step()
    assert in_workers(started, worker_side.generators, "seeded") == [[True, True]] * NUM_RANKS
    assert in_workers(started, worker_side.generators, "other") == [[False, False]] * NUM_RANKS
    run.finish()
