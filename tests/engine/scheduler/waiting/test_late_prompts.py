"""Online requests that are late: they stand behind those that can be in time, but do not wait for ever."""

from collections.abc import Iterator

from neaptide.engine.scheduler.packing import LATE_PATIENCE_TARGETS, LATE_SHARE, STREAM_PATIENCE_TARGETS
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, online

STEP_S, TTFT_S, TPOT_S = 0.1, 0.5, 0.2
PATIENCE_S = (LATE_PATIENCE_TARGETS + 1) * TTFT_S
CHAT_STEPS = 24
"""A chat holds ten blocks of four tokens at its end."""


def harness_of(num_blocks: int = 100, max_num_seqs: int = 64) -> Harness:
    model = ConstantCostModel(STEP_S)
    return Harness(
        num_blocks, cost_model=model, max_num_batched_tokens=512, max_num_seqs=max_num_seqs, ttft_slo_s=TTFT_S
    )


def add(harness: Harness, name: str, num_tokens: int, max_tokens: int, tpot_s: float = TPOT_S) -> None:
    now_s, token = harness.clock.now(), 7 + sum(name.encode()) % 900
    targets = {"ttft_slo_s": TTFT_S, "tpot_slo_s": tpot_s}
    harness.core.handle(online(name, [token] * num_tokens, max_tokens, arrival_s=now_s, **targets))


def chats(harness: Harness, every_steps: int, until_s: float = 60.0) -> Iterator[dict[str, int]]:
    """Steps of a load of chats."""
    number = 0
    while harness.clock.now() < until_s:
        if number % every_steps == 0:
            add(harness, f"chat{number}", 16, CHAT_STEPS)
        number += 1
        yield harness.step()


def after(steps: Iterator[dict[str, int]], harness: Harness, name: str) -> float:
    """When the request has had its first token."""
    for _ in steps:
        if harness.tokens[name]:
            break
    return harness.clock.now()


def test_a_large_prompt_gets_memory_though_chats_that_are_in_time_take_all_that_comes_free() -> None:
    harness = harness_of()
    steps = chats(harness, every_steps=4)
    for _ in range(60):
        next(steps)
    arrival_s = harness.clock.now()
    add(harness, "large", 360, 2)
    waited_s = after(steps, harness, "large") - arrival_s
    assert waited_s < TTFT_S + PATIENCE_S + CHAT_STEPS * STEP_S
    assert waited_s > PATIENCE_S, "chats in time had to wait for one that is late, and it had not waited for long"


def test_a_late_prompt_gets_a_seat() -> None:
    harness = harness_of(max_num_seqs=6)
    steps = chats(harness, every_steps=4)
    for _ in range(60):
        next(steps)
    arrival_s = harness.clock.now()
    add(harness, "late", 4, 2)
    harness.clock.sleep_until(arrival_s + 2 * TTFT_S)
    assert after(steps, harness, "late") - arrival_s < 3 * TTFT_S + PATIENCE_S + CHAT_STEPS * STEP_S


def test_what_is_kept_for_late_prompts_is_kept_for_a_tenth_of_the_time() -> None:
    harness = harness_of()
    steps = chats(harness, every_steps=4)
    for _ in range(60):
        next(steps)
    add(harness, "large", 360, 2)
    first_s = after(steps, harness, "large")
    late = harness.core.scheduler._late  # type: ignore[attr-defined]
    stood_s = late.stood_s(first_s)
    assert 0.0 < stood_s < TTFT_S + CHAT_STEPS * STEP_S
    add(harness, "larger", 370, 2)
    assert after(steps, harness, "larger") - first_s > (1.0 / LATE_SHARE - 1.0) * stood_s


def test_a_stream_that_was_pushed_out_comes_back_before_prompts_that_are_in_time() -> None:
    harness = harness_of()
    add(harness, "stream", 280, 100, tpot_s=2 * TPOT_S)
    harness.step()
    steps, queues = chats(harness, every_steps=2), harness.core.scheduler.queues
    while "stream" in queues.running_online:
        next(steps)
    (stream,) = (request for request in queues.waiting_online if request.request_id == "stream")
    late_s = stream.next_deadline_s
    for _ in steps:
        if "stream" in queues.running_online:
            break
    assert late_s < harness.clock.now() < late_s + (STREAM_PATIENCE_TARGETS + 1) * TTFT_S + CHAT_STEPS * STEP_S
