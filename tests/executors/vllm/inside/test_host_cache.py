"""KV blocks in the workers' host memory: copied byte for byte, and what is computed from those that came back."""

import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.vllm.runner_state import NULL_BLOCKS
from neaptide.kernels import host_rows
from tests.executors.vllm.inside.faults import vllm
from tests.executors.vllm.inside.runs import NUM_BLOCKS, NUM_HOST_BLOCKS, Run, assert_greedy, prompts

Checkpoint = tuple[Path, PreTrainedModel]
needs_the_worker_at_hand = pytest.mark.skipif(
    os.environ.get("NEAPTIDE_TEST_RANKS", "1") != "1", reason="the workers are processes of their own"
)


def blocks_of(started: StartedExecutor) -> list[torch.Tensor]:
    """Each layer's, those that vLLM keeps to itself left out, with the block as the first dimension."""
    found = []
    for cache in vllm(started)._workers.driver_worker.worker.model_runner.kv_caches:
        dim = next(d for d, size in enumerate(cache.shape) if size == NUM_BLOCKS + NULL_BLOCKS)
        found.append(cache.movedim(dim, 0)[NULL_BLOCKS:])
    return found


def copy(
    started: StartedExecutor, saves: list[tuple[int, int]] | None = None, loads: list[tuple[int, int]] | None = None
) -> None:
    plan = StepPlan.of_parts(0, [])
    plan.saves, plan.loads = saves or [], loads or []
    started.executor.submit(plan).wait()


def test_host_memory_holds_as_many_blocks_as_fit(started: StartedExecutor) -> None:
    assert started.num_host_blocks == NUM_HOST_BLOCKS


@needs_the_worker_at_hand
def test_blocks_come_back_byte_for_byte(started: StartedExecutor) -> None:
    layers = blocks_of(started)
    with torch.inference_mode():
        for layer in layers:
            layer.copy_(torch.randn_like(layer))
    before = [layer[[3, NUM_BLOCKS - 1]].clone() for layer in layers]
    copy(started, saves=[(3, 2), (NUM_BLOCKS - 1, NUM_HOST_BLOCKS - 1)])
    with torch.inference_mode():
        for layer in layers:
            layer.zero_()
    copy(started, loads=[(2, 5), (NUM_HOST_BLOCKS - 1, 0)])
    for layer, saved in zip(layers, before, strict=True):
        assert torch.equal(layer[[5, 0]], saved)
        others = [block for block in range(NUM_BLOCKS) if block not in (5, 0)]
        assert not layer[others].any()


@needs_the_worker_at_hand
def test_a_step_saves_a_block_before_it_loads_another_into_it(started: StartedExecutor) -> None:
    layers = blocks_of(started)
    with torch.inference_mode():
        for layer in layers:
            layer[1], layer[2] = 1.0, 2.0
    copy(started, saves=[(1, 0)])
    copy(started, saves=[(2, 1)], loads=[(0, 2)])
    copy(started, loads=[(1, 3)])
    for layer in layers:
        assert (layer[2] == 1.0).all()
        assert (layer[3] == 2.0).all()


@needs_the_worker_at_hand
def test_a_step_raises_if_a_copy_to_host_memory_failed(
    started: StartedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_rows._Thread, "_write", lambda *args: 1 / 0)
    plan = StepPlan.of_parts(0, [])
    plan.saves = [(1, 0)]
    with pytest.raises(ZeroDivisionError):
        started.executor.submit(plan).wait()
    new = NewRequest("a", [7, 8, 9], SamplingParams(max_tokens=1, temperature=0.0))
    plan = StepPlan.of_parts(0, [ScheduledRequest("a", [7, 8, 9], 0, [0], True, 0)], [new])
    plan.saves = [(1, 0)]
    handle = started.executor.submit(plan)
    with pytest.raises(ZeroDivisionError):
        handle.wait()
    monkeypatch.undo()
    again = StepPlan.of_parts(0, [ScheduledRequest("a", [7, 8, 9], 0, [0], True, 0)], [new])
    assert started.executor.submit(again).wait().errors == {}
    started.executor.submit(StepPlan.of_parts(0, [], finished_ids=["a"])).wait()


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_were_pushed_out_come_back_from_host_memory_and_say_the_same(
    checkpoint: Checkpoint, started: StartedExecutor, depth: int
) -> None:
    """Two of four blocks each are computed; two online ones of as many take all but one of nine."""
    run = Run(started.executor, 9, NUM_HOST_BLOCKS, overlap_depth=depth)
    asked = prompts(4, seed=9, low=110, high=111)
    for name, prompt in zip("ab", asked, strict=False):
        run.add(name, prompt, Tier.FLEX)
    while min(len(run.tokens[name]) for name in "ab") < 2:
        run.step()
    for name, prompt in zip("xy", asked[2:], strict=True):
        run.add(name, prompt)
    run.finish()
    assert {name for name, end in run.ends.items() if end.num_preemptions} == {"a", "b"}
    assert run.loaded_blocks >= 5
    for name, prompt in zip("abxy", asked, strict=True):
        assert_greedy(checkpoint[1], prompt, run.tokens[name])
