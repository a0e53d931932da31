"""Whatever happens to a request on the way, its greedy text is the one that ``transformers`` gives it."""

import os
from pathlib import Path

import pytest
import vllm as package
from transformers import PreTrainedModel

from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import Tier
from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside import second_runner
from tests.executors.vllm.inside.faults import vllm
from tests.executors.vllm.inside.runs import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NUM_OUTPUT,
    Run,
    assert_all_greedy,
    assert_greedy,
    prompts,
)

Checkpoint = tuple[Path, PreTrainedModel]
both_depths = pytest.mark.parametrize("depth", [0, 1])
HITS = 0.75
"""Least share of tokens that are compared: one of four prompts is too close to call after two tokens, on a Llama."""


def named(asked: list[list[int]]) -> dict[str, list[int]]:
    return {str(i): prompt for i, prompt in enumerate(asked)}


def test_what_its_step_times_depend_on_is_said(started: StartedExecutor) -> None:
    """A profile that is kept belongs to that."""
    profiled = started.profiled
    assert profiled is not None
    runner = "V2" if second_runner.is_wanted() else "V1"
    ranks = os.environ.get("NEAPTIDE_TEST_RANKS", "1")
    words = ["vllm", package.__version__, runner, "enforce_eager=true"]
    words += [f"tensor_parallel_size={ranks}"] if ranks != "1" else []
    assert profiled.build == " ".join(words)
    assert profiled.device_name.startswith(f"{ranks} x ") == (ranks != "1")
    assert profiled.num_threads == 1, "as asked for, though torch was imported before"
    assert (profiled.dtype_name, profiled.kv_bytes_per_token) == ("float32", BLOCK_BYTES // BLOCK_SIZE)


def test_a_prefix_from_the_cache_lacks_no_layer(started: StartedExecutor) -> None:
    """Some of vLLM's models keep a window's keys out of prefixes, for its scheduler to compute them again."""
    assert not getattr(vllm(started)._vllm_config.cache_config, "swa_bounded_replay", False)


def test_alone(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    for prompt in prompts(3, seed=1):
        run = Run(started.executor)
        run.add("a", prompt)
        run.finish()
        assert_greedy(checkpoint[1], prompt, run.tokens["a"])


@both_depths
def test_batched(checkpoint: Checkpoint, started: StartedExecutor, depth: int) -> None:
    run = Run(started.executor, overlap_depth=depth)
    asked = prompts(12, seed=2)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    assert_all_greedy(checkpoint[1], named(asked), run)


@pytest.mark.parametrize("max_tokens_per_step", [1, 7, 33])
def test_chunked(checkpoint: Checkpoint, started: StartedExecutor, max_tokens_per_step: int) -> None:
    run = Run(started.executor, max_num_batched_tokens=max_tokens_per_step)
    asked = prompts(2, seed=3)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    assert_all_greedy(checkpoint[1], named(asked), run)


@both_depths
def test_with_prefix_hits(checkpoint: Checkpoint, started: StartedExecutor, depth: int) -> None:
    run = Run(started.executor, overlap_depth=depth)
    prefix = prompts(1, seed=4, low=70, high=71)[0]
    asked = [prefix + tail for tail in prompts(4, seed=5, low=1, high=40)]
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
        for _ in range(1 + depth):
            run.step()  # its prompt is in the cache before the next arrives
    run.finish()
    assert_all_greedy(checkpoint[1], named(asked), run, HITS)
    for i in range(len(asked)):
        assert run.ends[str(i)].num_cached_tokens == (64 if i else 0)


def test_with_prefix_hits_in_the_step_that_computes_the_prefix(
    checkpoint: Checkpoint, started: StartedExecutor
) -> None:
    run = Run(started.executor, policy="fcfs")
    prefix = prompts(1, seed=4, low=70, high=71)[0]
    asked = [prefix + tail for tail in prompts(3, seed=5, low=1, high=40)] + [prefix[:65]]
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.step()
    assert all(len(tokens) == 1 for tokens in run.tokens.values())
    run.finish()
    assert_all_greedy(checkpoint[1], named(asked), run)
    for i in range(len(asked)):
        assert run.ends[str(i)].num_cached_tokens == (64 if i else 0)


@both_depths
def test_preempted_at_every_second_step_beside_aborts(
    checkpoint: Checkpoint, started: StartedExecutor, depth: int
) -> None:
    run = Run(started.executor, num_blocks=18, max_num_batched_tokens=96, overlap_depth=depth)
    asked = prompts(20, seed=9, low=30, high=100)
    assert sum(len(prompt) + NUM_OUTPUT for prompt in asked) > 2 * 18 * BLOCK_SIZE
    for i, prompt in enumerate(asked):
        run.add(f"r{i}", prompt, Tier.DEFAULT if i % 4 == 0 else Tier.FLEX)
        run.add(f"x{i}", prompt[::-1], Tier.FLEX)
    queues = run.core.scheduler.queues
    steps = 0
    while run.core.has_work:
        run.step()
        steps += 1
        if steps % 2 == 0 and len(queues.running_offline) > 1:
            run.preempt(next(iter(queues.running_offline.values())))  # at depth 1 its token in flight is lost
        if steps % 3 == 0:
            run.core.handle(AbortRequest([f"x{steps // 3}"]))
    assert sum(end.num_preemptions for end in run.ends.values()) > 20
    assert_all_greedy(checkpoint[1], {f"r{i}": prompt for i, prompt in enumerate(asked)}, run)


@pytest.mark.parametrize("policy", ["neaptide", "fcfs"])
def test_requests_that_push_each_other_out(checkpoint: Checkpoint, started: StartedExecutor, policy: str) -> None:
    run = Run(started.executor, num_blocks=9, policy=policy)
    asked = prompts(8, seed=6, low=40, high=80)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt, Tier.FLEX if i % 2 else Tier.DEFAULT)
        run.step()
    run.finish()
    assert_all_greedy(checkpoint[1], named(asked), run)


def test_an_id_may_be_used_again(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    run = Run(started.executor)
    first, second = prompts(2, seed=11)
    run.add("a", first)
    run.step()
    run.core.handle(AbortRequest(["a"]))
    run.add("a", second)
    run.finish()
    assert_greedy(checkpoint[1], second, run.tokens["a"])
