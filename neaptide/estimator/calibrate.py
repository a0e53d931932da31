"""A short calibration at engine start: micro-runs that warm the executor up and fit the iteration-time model."""

from collections.abc import Iterator

from neaptide.engine.batch import BatchShape, NewRequest, ScheduledRequest, StepPlan
from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import CostModel, Executor
from neaptide.engine.params import SamplingParams

ROUNDS = 2
MAX_STEP_S = 1.0
"""Shapes predicted to take longer are left out ..."""
MAX_TOTAL_S = 10.0
"""... and the rest after so long: start-up must stay short on a slow machine."""


def calibration_shapes(max_batched_tokens: int, max_seqs: int, max_model_len: int) -> list[list[tuple[int, int]]]:
    """Steps as lists of (tokens to compute, context tokens): prefill, decode and mixed, small ones first."""

    def prefill(tokens: int) -> list[tuple[int, int]]:
        return [(min(tokens, max_model_len // 2), 0)]

    def decode(requests: int, context: int) -> list[tuple[int, int]]:
        return [(1, min(context, max_model_len // 2))] * min(requests, max_seqs)

    steps = [
        prefill(16),
        decode(1, 64),
        prefill(64),
        decode(4, 64),
        decode(1, 512),
        decode(16, 128),
        prefill(128),
        decode(8, 64) + prefill(32),
        decode(32, 64),
        decode(32, 256),
        prefill(256),
        decode(16, 128) + prefill(128),
        decode(64, 256),
        prefill(512),
        decode(4, 1024),
    ]
    return [step for step in steps if sum(tokens for tokens, _ in step) <= max_batched_tokens]


def warm_up(
    executor: Executor,
    cost_model: CostModel,
    clock: Clock,
    block_size: int,
    shapes: list[list[tuple[int, int]]],
) -> Iterator[tuple[BatchShape, float]]:
    """Runs the shapes in rounds on an idle executor and shows the times to the cost model.

    Block contents are whatever is there: only the time matters. Ends after ``ROUNDS`` rounds or ``MAX_TOTAL_S``,
    whichever comes first. Yields each step's shape and seconds.
    """
    start_s = clock.now()
    finished: list[str] = []
    for step, parts in enumerate(shapes * ROUNDS):
        if clock.now() - start_s > MAX_TOTAL_S:
            break
        plan = _plan(step, parts, executor.num_blocks, block_size, finished)
        if plan is None or cost_model.predict(plan.shape).seconds > MAX_STEP_S:
            continue
        step_start_s = clock.now()
        executor.submit(plan).wait()
        seconds = clock.now() - step_start_s
        finished = [new.request_id for new in plan.new_requests]
        cost_model.observe(plan.shape, seconds)
        yield plan.shape, seconds
    executor.submit(StepPlan(0, [], BatchShape(), finished_ids=finished)).wait()


def _plan(
    step: int, parts: list[tuple[int, int]], num_blocks: int, block_size: int, finished: list[str]
) -> StepPlan | None:
    """A step over blocks counted from 0; None if they are too few."""
    plan = StepPlan(-1 - step, [], BatchShape(), finished_ids=finished)
    next_block = 0
    for index, (num_tokens, context) in enumerate(parts):
        request_id = f"calibrate-{step}-{index}"
        count = -(-(context + num_tokens) // block_size)
        if next_block + count > num_blocks:
            return None
        prompt = [7] * (context + num_tokens)
        plan.new_requests.append(NewRequest(request_id, prompt, SamplingParams(temperature=0.0)))
        block_ids = list(range(next_block, next_block + count))
        plan.scheduled.append(ScheduledRequest(request_id, prompt[context:], context, block_ids, True, 0))
        plan.shape.add(num_tokens, context)
        next_block += count
    return plan
