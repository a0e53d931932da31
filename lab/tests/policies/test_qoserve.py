"""``qoserve``: order, relegation and chunks by hand. A step takes 10 ms and 1 ms per token; blocks have 4 tokens."""

from pathlib import Path

import pytest

from lab.tests.policies.chats import add_chat
from neaptide_lab.policies.qoserve import QoServe, hybrid_order, step_sizes
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch


def qoserve(**fields: object) -> Harness:
    values: dict[str, object] = {"policy": "qoserve", "cost_model": PerTokenCost(), "num_blocks": 9000}
    return Harness(**(values | fields))  # type: ignore[arg-type]


def scheduler_of(harness: Harness) -> QoServe:
    assert isinstance(harness.core.scheduler, QoServe)
    return harness.core.scheduler


def order(harness: Harness) -> list[str]:
    return [request.request_id for request in harness.core.scheduler.queues.waiting_online]


@pytest.mark.parametrize(
    ("alpha_s", "expected"),
    [
        (0.0, ["urgent", "middle", "short"]),  # 1, 2 and 3 s
        (0.008, ["middle", "short", "urgent"]),  # 1 + 3.2, 2 + 0.8, 3 + 0.08
        (1.0, ["short", "middle", "urgent"]),  # 10, 100 and 400 tokens
    ],
)
def test_alpha_goes_from_the_earliest_deadline_to_the_shortest_job(alpha_s: float, expected: list[str]) -> None:
    harness = qoserve(policy="fcfs")
    for name, tokens, ttft in (("urgent", 400, 1.0), ("middle", 100, 2.0), ("short", 10, 3.0)):
        add_chat(harness, name, tokens, ttft)
    waiting = harness.core.scheduler.queues.waiting_online
    assert [request.request_id for request in sorted(waiting, key=hybrid_order(alpha_s))] == expected


def test_prompts_wait_in_the_hybrid_order() -> None:
    harness = qoserve()
    for name, tokens, ttft in (("urgent", 400, 1.0), ("middle", 100, 2.0), ("short", 10, 3.0)):
        add_chat(harness, name, tokens, ttft)
    assert order(harness) == ["middle", "short", "urgent"]


def test_a_started_prompt_is_put_back_by_what_it_lacks() -> None:
    harness = qoserve(max_num_batched_tokens=300)
    add_chat(harness, "long", 400, 2.0)
    assert harness.step() == {"long": 300}  # 100 tokens are left: 2 + 0.8
    add_chat(harness, "other", 200, 2.0)  # 0.31 + 2 + 1.6
    assert harness.step() == {"long": 100, "other": 200}


def test_a_prompt_that_cannot_be_in_time_waits_behind_the_others() -> None:
    """A full step of 100 tokens takes 110 ms: 909 tokens a second. 200 tokens take 220 ms."""
    harness = qoserve(max_num_batched_tokens=100)
    add_chat(harness, "doomed", 200, 0.21)  # 0.21 + 1.6
    add_chat(harness, "long", 300, 5.0)  # 5 + 2.4
    assert order(harness) == ["doomed", "long"]
    assert [harness.step() for _ in range(4)] == [
        {"long": 100},
        {"long": 100},
        {"long": 100},
        {"doomed": 99, "long": 1},
    ]


def test_one_that_can_be_in_time_is_not_relegated_and_neither_is_one_that_has_started() -> None:
    harness = qoserve(max_num_batched_tokens=100)
    add_chat(harness, "first", 200, 0.23)
    assert harness.step() == {"first": 100}
    harness.clock.sleep_until(1.0)
    add_chat(harness, "another", 100, 1.0)
    assert harness.step() == {"first": 100}  # late, and still ahead
    assert harness.step() == {"first": 1, "another": 99}


def test_a_relegated_prompt_is_not_reprieved() -> None:
    harness = qoserve(max_num_batched_tokens=100)
    add_chat(harness, "doomed", 200, 0.21)
    add_chat(harness, "other", 100, 5.0)
    harness.step()
    scheduler_of(harness)._prefill_rate = 1e9
    add_chat(harness, "late", 100, 5.0)
    assert harness.step() == {"other": 1, "late": 99}


def test_sizes_of_a_step() -> None:
    assert step_sizes(2048) == [128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048]
    assert step_sizes(2552)[-2:] == [2304, 2552]
    assert step_sizes(100) == [100]


def test_the_chunk_is_as_large_as_the_streams_slack_allows() -> None:
    """1.2 times the prediction must fit: 512 tokens take 1.2 * 522 ms = 626 ms, 768 take 934 ms."""
    harness = qoserve()
    add_chat(harness, "stream", 8, 1.0, max_tokens=20, tpot_slo_s=0.1)
    harness.step()  # ends at 18 ms; its second token is due at 1.1 s by its arrival
    add_chat(harness, "long", 3000, 30.0)
    harness.clock.sleep_until(0.2)
    assert harness.step() == {"stream": 1, "long": 511}


def test_a_policy_that_counts_from_the_first_token_has_less_slack() -> None:
    harness = qoserve(policy="neaptide_lab.policies.qoserve:QoServePaced")
    add_chat(harness, "stream", 8, 1.0, max_tokens=20, tpot_slo_s=0.4)
    harness.step()  # the second token is due at 418 ms
    add_chat(harness, "long", 3000, 30.0)
    assert harness.step() == {"stream": 1, "long": 255}  # 1.2 * 266 ms = 319 ms of 400


def test_without_slack_a_step_has_128_tokens() -> None:
    harness = qoserve()
    add_chat(harness, "stream", 8, 0.01, max_tokens=20, tpot_slo_s=0.001)
    harness.step()
    add_chat(harness, "long", 3000, 30.0)
    harness.clock.sleep_until(0.2)
    assert harness.step() == {"stream": 1, "long": 127}


def test_while_memory_is_low_a_step_has_at_most_512_tokens() -> None:
    """Less than 32 steps of 1,000 tokens are left."""
    harness = qoserve(num_blocks=7000)
    add_chat(harness, "long", 3000, 30.0)
    assert harness.step() == {"long": 512}


def test_offline_work_takes_what_is_left_of_the_step_within_the_slack(tmp_path: Path) -> None:
    harness = qoserve()
    add_chat(harness, "stream", 8, 1.0, max_tokens=20, tpot_slo_s=0.1)
    harness.step()
    harness.core.handle(batch(tmp_path, "job", [[9] * 3000]))
    add_chat(harness, "short", 100, 30.0)
    harness.clock.sleep_until(0.5)
    # 0.6 s are left, 1.2 * 500 ms: 490 tokens. The step's size is 256, of which the chunk of `short` takes 100.
    assert harness.step() == {"stream": 1, "short": 100, "job:0": 155}


def test_alone_offline_work_has_whole_steps(tmp_path: Path) -> None:
    harness = qoserve()
    harness.core.handle(batch(tmp_path, "job", [[9] * 3000]))
    assert harness.step() == {"job:0": 2048}


def test_offline_work_gives_its_memory_and_its_slot(tmp_path: Path) -> None:
    harness = qoserve(num_blocks=10, max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[9] * 30]))
    assert harness.step() == {"job:0": 30}
    add_chat(harness, "chat", 30, 1.0)
    assert harness.step() == {"chat": 30}
