"""What the tests that run in vLLM's interpreter share: one executor, for vLLM keeps one model in a process.

The environment says which: NEAPTIDE_TEST_FAMILY (llama), NEAPTIDE_TEST_WEIGHTS (not quantised), NEAPTIDE_TEST_RANKS
(1), and what ``second_runner`` and ``asynchronous`` name.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.registry import start_executor
from tests.executors.vllm.inside import asynchronous, second_runner
from tests.executors.vllm.inside.families import bring_own_code, write_checkpoint, write_tokenizer
from tests.executors.vllm.inside.quantised import quantise
from tests.executors.vllm.inside.runs import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DTYPE,
    LIMITS,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    WEIGHTS,
)

FAMILY = os.environ.get("NEAPTIDE_TEST_FAMILY", "llama")
RANKS = int(os.environ.get("NEAPTIDE_TEST_RANKS", "1"))


if second_runner.is_wanted():  # before any test imports vLLM
    second_runner.pretend_a_back_end()
    second_runner.stand_in_for_kernels()
    if RANKS > 1:
        second_runner.prepare_ranks()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model that brings code of its own along, which nobody runs: vLLM knows the families."""
    directory = tmp_path_factory.mktemp(FAMILY)
    write_tokenizer(directory)
    model = write_checkpoint(FAMILY, directory)
    if WEIGHTS:
        model = quantise(WEIGHTS, directory)
    bring_own_code(directory)
    return directory, model


@pytest.fixture(scope="session")
def started(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[StartedExecutor]:
    arguments = {"enforce_eager": "true"} | ({"tensor_parallel_size": str(RANKS)} if RANKS > 1 else {})
    config = EngineConfig(
        cache=CacheConfig(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, host_cache_bytes=NUM_HOST_BLOCKS * BLOCK_BYTES + 1
        ),
        scheduler=SchedulerConfig(**LIMITS),
        executor=ExecutorConfig(
            kind="vllm", model_path=str(checkpoint[0]), dtype=DTYPE, num_threads=1, arguments=arguments
        ),
    )
    with asynchronous.forced():
        started = start_executor(config, MonotonicClock())
        yield started
        started.executor.close()
