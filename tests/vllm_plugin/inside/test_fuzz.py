"""Thousands of steps of vLLM's real scheduler and KV manager under our scheduler, with drawn requests and aborts."""

import os
import random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from lab.benchmarks.vllm_inside.virtual import Setup, Token, VirtualServer, token_at
from neaptide.engine.steps.plan import BatchShape
from neaptide_vllm.scheduling.step import Step

STEPS = int(os.environ.get("NEAPTIDE_TEST_FUZZ_STEPS", "5000")) // 6
"""Steps of each of the six servers that schedule synchronously, and of each of six that do not."""
CAPACITIES = ((60, 4, 64), (120, 12, 256), (400, 32, 512))
"""Blocks, requests that run at once, and tokens of a step."""
MOST_OPEN = 60
MOST_IDLE_STEPS = 50
MAX_MODEL_LEN = 512
pytestmark = pytest.mark.timeout(600 + STEPS)


class Fuzz:
    """Draws requests, and follows each of them to its end."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.draw = random.Random(seed)
        self.server = VirtualServer(setup, self._step_s)
        self.shared = [self._tokens(96) for _ in range(3)]
        self.open: set[str] = set()
        self.aborted: set[str] = set()
        self.wanted: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.num_preempted = 0
        self.num_idle = 0
        self.num_planned_shapes = 0
        shape_of = self.server.scheduler._shape_of

        def compared(step: Step, output: SchedulerOutput) -> BatchShape:
            if (planned := step.planned_shape(output)) is not None:
                assert planned == self.server.scheduler._read_shape(output)
                self.num_planned_shapes += 1
            return shape_of(step, output)

        self.server.scheduler._shape_of = compared

    def _step_s(self, parts: Any) -> float:
        return 0.004 + 2e-4 * sum(num_tokens for num_tokens, _ in parts) * self.draw.uniform(0.9, 1.3)

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(10, 5000) for _ in range(count)]

    def arrive(self) -> None:
        draw = self.draw
        if draw.random() < 0.15:
            self._add(0)
        if draw.random() < 0.25 and len(self.open) < MOST_OPEN:
            self._add(draw.choice((1, 1, 2)))
        if draw.random() < 0.03 and self.open:
            request_id = draw.choice(sorted(self.open))
            self.server.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self.aborted.add(request_id)
            self.open.remove(request_id)

    def _add(self, priority: int) -> None:
        draw, request_id = self.draw, f"r{len(self.wanted)}"
        prompt = draw.choice(self.shared) if draw.random() < 0.4 else []
        prompt = prompt + self._tokens(draw.choice((1, 3, 16, 17, 60, 130, 300)))
        max_tokens = min(draw.choice((1, 2, 5, 30, 90)), MAX_MODEL_LEN - 1 - len(prompt))
        targets = None
        if draw.random() < 0.5:
            targets = {"ttft_ms": draw.choice((50, 400, "2000")), "tpot_ms": draw.choice((5, 60, -1, "no"))}
        self.wanted[request_id], self.outputs[request_id] = max_tokens, []
        self.open.add(request_id)
        arrival_s = self.server.now_s - 0.05 * draw.random()
        self.server.add(request_id, prompt, max_tokens, priority, arrival_s, targets)

    def step(self) -> None:
        output, tokens = self.server.step()
        self.num_preempted += len(output.preempted_req_ids or ())
        for token in tokens:
            self._take(token)
        self.server.check_integrity()
        is_idle = not output.num_scheduled_tokens and bool(self.open)
        self.num_idle = self.num_idle + 1 if is_idle else 0
        assert self.num_idle < MOST_IDLE_STEPS, "no request moves"

    def _take(self, token: Token) -> None:
        assert token.request_id not in self.ended, "a token after the end"
        self.outputs[token.request_id].append(token.token_id)
        if token.is_last:
            self.ended.add(token.request_id)
            self.open.discard(token.request_id)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("has_prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("capacity", range(len(CAPACITIES)))
def test_no_request_is_lost_doubled_or_stuck(is_async: bool, has_prefix_cache: bool, capacity: int) -> None:
    num_blocks, max_num_seqs, max_tokens = CAPACITIES[capacity]
    settings = {"ttft_ms": 400, "tpot_ms": 60} if has_prefix_cache else {}
    setup = Setup(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        is_async=is_async,
        has_prefix_cache=has_prefix_cache,
        settings=settings,
    )
    fuzz = Fuzz(STEPS + capacity, setup)
    for _ in range(STEPS):
        fuzz.arrive()
        fuzz.step()
    for _ in range(4 * STEPS):
        if not fuzz.open:
            break
        fuzz.step()
    assert not fuzz.open, "some requests never end"
    scheduler = fuzz.server.scheduler
    while scheduler.has_requests():
        fuzz.step()
    for request_id in fuzz.ended:
        expected = [token_at(request_id, position) for position in range(fuzz.wanted[request_id])]
        assert fuzz.outputs[request_id] == expected
    assert fuzz.ended | fuzz.aborted == set(fuzz.wanted)
    assert not scheduler.requests
    assert not scheduler.online
    assert not scheduler.running
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks - 1
    assert capacity or fuzz.num_preempted, "few blocks preempt"
    assert fuzz.num_planned_shapes > STEPS // 2, "most steps are as planned"
