"""One request's failure stays its own on vLLM's workers too."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import INTERNAL_ERROR, INVALID_TOKEN, NUMERICAL_ERROR, SamplingParams, Tier
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.vllm.runner_state import NULL_BLOCKS
from tests.executors.vllm.inside import worker_side
from tests.executors.vllm.inside.faults import (
    EVERYWHERE,
    PLACES,
    Late,
    Raises,
    in_workers,
    known_to_the_runner,
    num_failed_steps,
    vllm,
)
from tests.executors.vllm.inside.runs import BLOCK_SIZE, NUM_OUTPUT, Run, assert_greedy, prompts

Checkpoint = tuple[Path, PreTrainedModel]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("joins_at", [0, 4])
def test_only_the_poisoned_request_fails(
    checkpoint: Checkpoint,
    started: StartedExecutor,
    where: str,
    depth: int,
    joins_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raises = Raises(vllm(started)._workers, lambda ids: where if "bad" in ids else None, monkeypatch)
    run = Run(started.executor, overlap_depth=depth)
    asked = prompts(5, seed=12)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    for _ in range(joins_at):
        run.step()
    run.add("bad", asked[0][::-1])
    run.finish()
    assert raises.num_raised >= 2
    assert run.ends["bad"].error == INTERNAL_ERROR
    for i, prompt in enumerate(asked):
        assert run.ends[str(i)].error is None
        assert_greedy(checkpoint[1], prompt, run.tokens[str(i)])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", PLACES)
def test_so_does_one_that_raises_in_every_rank(
    checkpoint: Checkpoint, started: StartedExecutor, where: str, depth: int
) -> None:
    """What the runner has done of the step until then stays done."""
    run = Run(started.executor, overlap_depth=depth)
    asked = prompts(5, seed=12)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    for _ in range(4):
        run.step()
    in_workers(started, worker_side.poison, "bad", where)
    run.add("bad", asked[0][::-1])
    run.finish()
    num_raised = in_workers(started, worker_side.cure)
    assert min(num_raised) == max(num_raised) >= 2
    assert run.ends["bad"].error == INTERNAL_ERROR
    for i, prompt in enumerate(asked):
        assert run.ends[str(i)].error is None
        assert_greedy(checkpoint[1], prompt, run.tokens[str(i)])


def test_non_finite_logits_end_one_request_and_the_next_owner_of_its_blocks_is_well(
    checkpoint: Checkpoint, started: StartedExecutor
) -> None:
    run = Run(started.executor, num_blocks=6)
    bad, good, later = prompts(3, seed=13, low=60, high=80)
    run.add("bad", bad)
    run.add("good", good)
    run.step()
    request = run.core.scheduler.queues.find("bad")
    assert request is not None
    spoilt = request.block_ids
    num_blocks = vllm(started).num_blocks + NULL_BLOCKS
    in_workers(started, worker_side.spoil, num_blocks, [block + NULL_BLOCKS for block in spoilt])
    run.finish()
    assert run.ends["bad"].error == NUMERICAL_ERROR
    assert_greedy(checkpoint[1], good, run.tokens["good"])
    used: set[int] = set()
    run.device.before = lambda plan: used.update(_blocks_of(plan))
    run.add("later", later)
    run.finish()
    assert used & set(spoilt)
    assert_greedy(checkpoint[1], later, run.tokens["later"])


@pytest.mark.parametrize("depth", [0, 1])
def test_one_that_found_them_in_the_prefix_cache_is_computed_again(
    checkpoint: Checkpoint, started: StartedExecutor, depth: int
) -> None:
    run = Run(started.executor, overlap_depth=depth)
    (bad,) = prompts(1, seed=19, low=2 * BLOCK_SIZE + 1, high=2 * BLOCK_SIZE + 9)
    run.add("bad", bad)
    while not run.tokens["bad"]:
        run.step()
    request = run.core.scheduler.queues.find("bad")
    assert request is not None
    spoilt = [block + NULL_BLOCKS for block in request.block_ids[:2]]
    in_workers(started, worker_side.spoil, vllm(started).num_blocks + NULL_BLOCKS, spoilt)
    reader = [*bad[: 2 * BLOCK_SIZE], 7, 8, 9]
    run.add("reader", reader)
    run.finish()
    assert run.ends["bad"].error == NUMERICAL_ERROR
    assert run.ends["reader"].num_preemptions == 1
    assert_greedy(checkpoint[1], reader, run.tokens["reader"])


def _blocks_of(plan: StepPlan) -> list[int]:
    return [block for row in plan.rows.tolist() for block in plan.table.blocks.blocks(row)]


def test_unknown_token_ids_end_one_request(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    run = Run(started.executor)
    (prompt,) = prompts(1, seed=14)
    run.add("bad", [7, 256])
    run.add("good", prompt)
    run.finish()
    assert run.ends["bad"].error == INVALID_TOKEN
    assert_greedy(checkpoint[1], prompt, run.tokens["good"])


def test_the_runner_never_hears_of_a_bad_prompt_that_comes_in_chunks(
    checkpoint: Checkpoint, started: StartedExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(started.executor, overlap_depth=1, max_num_batched_tokens=16)
    (prompt,) = prompts(1, seed=14)
    run.add("good", prompt)
    while not run.tokens["good"]:
        run.step()
    run.add("bad", [7] * 60 + [256])
    run.finish()
    assert run.ends["bad"].error == INVALID_TOKEN
    assert num_failed_steps(caplog) == 0
    assert_greedy(checkpoint[1], prompt, run.tokens["good"])


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_prompt_whose_chunk_is_run_again_behind_the_next(
    checkpoint: Checkpoint,
    started: StartedExecutor,
    where: str,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a step in flight when one raises, the runner has heard the next chunk."""
    steps_of_new: list[Collection[str]] = []

    def due(ids: Collection[str]) -> str | None:
        steps_of_new.extend([ids] if "new" in ids else [])
        return where if len(steps_of_new) == chunk + 1 and steps_of_new[chunk] is ids else None

    raises = Raises(vllm(started)._workers, due, monkeypatch)
    run = Run(started.executor, overlap_depth=1, max_num_batched_tokens=16)
    running, new = prompts(2, seed=16, low=60, high=61)
    run.add("running", running)
    while not run.tokens["running"]:
        run.step()
    run.add("new", new)
    run.finish()
    assert raises.num_raised == num_failed_steps(caplog) == 1
    assert_greedy(checkpoint[1], running, run.tokens["running"])
    assert_greedy(checkpoint[1], new, run.tokens["new"])


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(("max_tokens", "num_steps"), [(0, 1), (NUM_OUTPUT, 1), (NUM_OUTPUT, 5)])
def test_a_step_that_is_run_again_right_behind_itself(
    checkpoint: Checkpoint,
    started: StartedExecutor,
    where: str,
    max_tokens: int,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one before it raised, and nobody is left of that: what was sampled in vain is not its last token."""
    steps: list[list[str]] = []

    def due(ids: Collection[str]) -> str | None:
        steps.append(list(ids))
        return where if "gone" in ids else None

    raises = Raises(vllm(started)._workers, due, monkeypatch)
    run = Run(started.executor, overlap_depth=1, max_num_batched_tokens=16)
    again, gone = prompts(2, seed=18, low=BLOCK_SIZE, high=BLOCK_SIZE + 1)
    run.add("again", again, Tier.FLEX, max_tokens=max_tokens)
    for _ in range(num_steps):
        run.step()  # its prompt takes two
    run.add("gone", gone)
    run.step()
    run.core.handle(AbortRequest(["gone"]))
    run.finish()
    assert raises.num_raised == 1
    assert steps[num_steps : num_steps + 3] == [["gone"], ["again"], ["again"]]
    run.add("reads", [*again, 7, 8, 9])
    run.finish()
    assert run.ends["reads"].num_cached_tokens == BLOCK_SIZE
    assert_greedy(checkpoint[1], [*again, 7, 8, 9], run.tokens["reads"])
    if max_tokens:
        assert_greedy(checkpoint[1], again, run.tokens["again"])


@pytest.mark.parametrize("depth", [0, 1])
def test_workers_that_do_not_answer_in_time_are_not_asked_again(
    started: StartedExecutor, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends: none of its requests is to blame, and a late answer may have the ids of the next step."""
    executor = vllm(started)
    run = Run(executor, overlap_depth=depth)
    for i, prompt in enumerate(prompts(3, seed=17)):
        run.add(str(i), prompt)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_silence", None, raising=False)
        late = Late(executor._workers, patch)
        for _ in range(3):
            run.step()
        tokens, late.is_due = {name: list(said) for name, said in run.tokens.items()}, True
        asked = late.num_asked + 2 * (1 + depth)
        if depth:
            run.step()
            late.is_due = False
        with pytest.raises(TimeoutError):
            run.step()
        assert late.num_asked == asked
        assert all(len(run.tokens[name]) == len(said) + depth for name, said in tokens.items())
    executor.recover(StepPlan.of_parts(0, []), executor._num_steps)


def test_a_step_that_vllm_has_no_room_for_is_refused(started: StartedExecutor) -> None:
    requests = [NewRequest(f"r{i}", [7] * 180, SamplingParams(max_tokens=1)) for i in range(3)]
    parts = [ScheduledRequest(f"r{i}", [7] * 180, 0, list(range(6 * i, 6 * i + 6)), True, 0) for i in range(3)]
    with pytest.raises(ValueError, match="540 tokens in one step, but vLLM was started for at most 512"):
        started.executor.submit(StepPlan.of_parts(0, parts, requests))
    started.executor.submit(StepPlan.of_parts(1, [], finished_ids=[f"r{i}" for i in range(3)])).wait()


def test_nothing_is_left_of_requests_that_ended(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    executor = vllm(started)
    run = Run(executor, num_blocks=16)
    for i, prompt in enumerate(prompts(60, seed=15)):
        run.add(f"x{i}", prompt, Tier.FLEX if i % 2 else Tier.DEFAULT, max_tokens=40)
        run.step()
        if i >= 3:
            run.core.handle(AbortRequest([f"x{i - 3}"]))
    for i in range(60):
        run.core.handle(AbortRequest([f"x{i}"]))
    run.add("last", [7, 8, 9], max_tokens=1)
    run.finish()
    occupancy = run.core.kv.occupancy()
    assert occupancy.online + occupancy.offline == 0
    run = Run(executor)
    run.add("probe", [7, 8, 9], max_tokens=NUM_OUTPUT)
    run.step()
    assert set(executor.translator.told) == known_to_the_runner(started) == {"probe"}
    run.finish()


def submissions(started: StartedExecutor, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count = 0
    execute = vllm(started)._workers.execute_model

    def execute_model(order: Any, non_block: bool = False) -> Any:
        nonlocal count
        count += 1
        return execute(order, non_block=non_block)

    monkeypatch.setattr(vllm(started)._workers, "execute_model", execute_model)
    return lambda: count


def test_a_plan_without_parts_costs_no_step(started: StartedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    count = submissions(started, monkeypatch)
    vllm(started).submit(StepPlan.of_parts(0, [], finished_ids=["probe"])).wait()
    assert count() == 0
