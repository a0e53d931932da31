"""Steps that are recorded and replayed: padded, and with room for other work, on Triton's kernels interpreted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu.random_llama import TINY, write_model_dir
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.executors.torch import step_graphs
from neaptide.executors.torch.model_runner import ModelRunner
from neaptide.executors.torch.step_graphs import Recorder, Replay, StepGraphs
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.paged_attention import StepTables
from neaptide.kernels.prefix_attention.attention import PrefixPlan

SHAPE = replace(TINY, layers=2)
BLOCK_SIZE, NUM_BLOCKS = 16, 60
SIZES = (2, 4, 8)


def recorded(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """What a graph does: the same again, into the same tensor."""
    out = compute().clone()

    def replay() -> None:
        out.copy_(compute())

    return replay, out


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    directory: Path = tmp_path_factory.mktemp("llama")
    write_model_dir(directory, SHAPE, torch.float32, torch.device("cpu"))
    config = ExecutorConfig(model_path=str(directory), device="cpu", dtype="float32", gpu_kernels="triton")
    executor = TorchExecutor(config, CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), MonotonicClock())
    with torch.inference_mode():
        yield executor._runner
    executor.close()


@pytest.fixture(scope="module")
def graphs(runner: ModelRunner) -> StepGraphs:
    return StepGraphs(runner.model, runner.kv_cache, runner.plan_attention, recorded, SIZES)


def planned(runner: ModelRunner, query_lens: list[int], seq_lens: list[int], tables: list[list[int]]) -> PrefixPlan:
    sizes = np.array(list(map(len, tables)))
    entries = 2 * np.concatenate([np.array(table) for table in tables])
    step = StepTables(entries, np.cumsum(sizes) - sizes)
    plan = runner.plan_attention(np.array(query_lens), np.array(seq_lens), step)
    assert isinstance(plan, PrefixPlan)
    return plan


Step = tuple[list[int], list[int], list[list[int]]]
SHARED, LONG = list(range(10, 15)), list(range(20, 40))
MERGED = [False, False, True, True, True]
"""Of the steps: by prefix, by the split, by prefix."""
STEPS: list[Step] = [
    ([1], [5], [[7]]),
    ([3, 1], [3, 40], [[2], [9, 4, 11]]),
    ([1, 1, 1], [88, 84, 95], [[*SHARED, 1], [*SHARED, 2], [*SHARED, 3]]),  # a prefix for three: parts to merge
    ([1, 6], [301, 60], [LONG, [*range(40, 44)]]),  # split
    ([1, 1], [82, 83], [[*SHARED, 1], [*SHARED, 2]]),  # fewer than before: nothing of the larger steps is left
]


def test_replayed_steps_compute_what_the_model_does(runner: ModelRunner, graphs: StepGraphs) -> None:
    torch.manual_seed(0)
    for layer in runner.kv_cache:
        layer[:NUM_BLOCKS].normal_()
    for (query_lens, seq_lens, tables), is_merged in zip(STEPS, MERGED, strict=True):
        plan, count = planned(runner, query_lens, seq_lens, tables), sum(query_lens)
        assert (len(plan.merges) > 0) == is_merged
        tokens = torch.randint(3, SHAPE.vocab, (count,))
        positions = torch.cat([torch.arange(end - num, end) for num, end in zip(query_lens, seq_lens, strict=True)])
        caches = [layer.clone() for layer in runner.kv_cache]
        expected = runner.model.forward(tokens, positions, caches, plan)
        assert graphs.takes(plan)
        found = graphs.forward(tokens, positions, plan)
        assert found.shape == (count, SHAPE.hidden)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(runner.kv_cache, caches, strict=True):
            torch.testing.assert_close(ours[:NUM_BLOCKS], theirs[:NUM_BLOCKS], atol=1e-4, rtol=1e-4)
        assert runner.kv_cache[0][NUM_BLOCKS].any(), "where padding goes"


def test_a_step_of_more_tokens_or_with_more_work_than_there_is_room_for_is_launched(
    runner: ModelRunner, graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not graphs.takes(planned(runner, [9], [9], [[1]]))
    step = planned(runner, [1], [301], [LONG])
    assert graphs.takes(step)
    monkeypatch.setattr(graphs._plans[0], "items", graphs._plans[0].items[:1])
    assert not graphs.takes(step)


def test_a_replay_that_computes_something_else_is_refused(runner: ModelRunner) -> None:
    def stale(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        return lambda: None, compute().clone()

    with pytest.raises(RuntimeError, match="a replayed step is off by"):
        StepGraphs(runner.model, runner.kv_cache, runner.plan_attention, stale, SIZES)


def test_whatever_fails_leaves_a_runner_that_launches(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler's errors are of any kind, and not a RuntimeError."""

    def fail() -> Recorder:
        raise TypeError("no such option\nmore of it")

    monkeypatch.setattr(step_graphs, "cuda_recorder", fail)
    monkeypatch.setattr(runner, "kv_cache", [SimpleNamespace(device=torch.device("cuda"))])
    runner.record_graphs()
    assert runner.graphs is None
    assert [message.partition(": ")[2] for message in caplog.messages] == ["TypeError: no such option"]
