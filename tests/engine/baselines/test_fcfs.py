"""``fcfs``: schedules computed by hand from the rules of vLLM v1. Blocks have 4 tokens."""

from pathlib import Path

import pytest

from neaptide.engine.messages import SetOffline
from neaptide.engine.scheduler.baselines.vllm_v1 import VllmV1Fcfs
from tests.engine.harness import Harness, batch, flex, online


def test_one_queue_by_arrival_with_mixed_steps_and_chunked_prompts() -> None:
    harness = Harness(policy="fcfs", max_num_batched_tokens=8)
    harness.core.handle(online("a", [7] * 6, max_tokens=3, arrival_s=0.0))
    harness.core.handle(online("b", [9] * 3, max_tokens=2, arrival_s=0.002))
    harness.core.handle(flex("f", [8] * 10, max_tokens=2, arrival_s=0.001))
    assert harness.run() == [
        {"a": 6, "f": 2},  # the offline request came before b: it gets the rest of the 8 tokens
        {"a": 1, "f": 7},  # running requests first, in order of admission; nothing is left for b
        {"a": 1, "f": 1, "b": 3},  # the last prompt token of f
        {"f": 1, "b": 1},
    ]


def test_request_that_finds_no_block_and_is_the_last_preempts_itself_and_waits_at_the_front() -> None:
    harness = Harness(num_blocks=4, policy="fcfs", max_num_seqs=2)
    harness.core.handle(online("a", [7] * 6, max_tokens=6))
    harness.core.handle(flex("f", [8] * 7, max_tokens=4, arrival_s=0.001))
    harness.core.handle(flex("g", [9] * 4, max_tokens=1, arrival_s=0.002))
    assert harness.run() == [
        {"a": 6, "f": 7},  # two blocks each, all four are held; g finds no seat
        {"a": 1, "f": 1},  # token 8 of f fills its second block
        {"a": 1},  # f needs a third block and is the last one running; none starts in a step that preempts
        {"a": 1},  # a takes a third block; f would need all three that it had and one is left; g stands behind f
        {"a": 1},
        {"a": 1},  # a ends
        {"f": 5, "g": 4},  # one of the blocks of f is still cached: 4 of its 9 tokens
        {"f": 1},
    ]
    assert harness.ends["f"][0].num_preemptions == 1
    assert harness.ends["a"][0].num_preemptions == 0


def test_older_request_that_finds_no_block_preempts_the_last_one() -> None:
    harness = Harness(num_blocks=4, policy="fcfs")
    harness.core.handle(online("a", [7] * 7, max_tokens=4))
    harness.core.handle(online("b", [8] * 6, max_tokens=6, arrival_s=0.001))
    assert harness.run() == [
        {"a": 7, "b": 6},  # two blocks each
        {"a": 1, "b": 1},
        {"a": 1},  # token 9 of a needs a third block: b goes
        {"a": 1},  # b needs two blocks, one is left; a ends
        {"b": 4},  # 4 of its 8 tokens are cached
        {"b": 1},
        {"b": 1},
        {"b": 1},
    ]
    assert harness.ends["b"][0].num_preemptions == 1


def test_prompt_starts_only_if_blocks_for_all_of_it_are_free() -> None:
    harness = Harness(num_blocks=5, policy="fcfs", max_num_batched_tokens=12)
    harness.core.handle(online("a", [7] * 8, max_tokens=2))
    harness.core.handle(online("b", [8] * 16, max_tokens=1, arrival_s=0.001))
    harness.core.handle(online("c", [9] * 2, max_tokens=1, arrival_s=0.002))
    assert harness.run() == [
        {"a": 8},  # its chunk of 4 tokens would fit, but b needs four blocks and three are free; c stands behind it
        {"a": 1},
        {"b": 12},  # the blocks are taken chunk by chunk
        {"b": 4, "c": 2},
    ]


def test_watermark_is_left_free_beside_running_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmV1Fcfs, "watermark", 0.25)
    harness = Harness(num_blocks=8, policy="fcfs")
    harness.core.handle(online("a", [7] * 28, max_tokens=1))
    harness.core.handle(online("b", [8] * 4, max_tokens=2, arrival_s=0.001))
    harness.core.handle(online("c", [9] * 20, max_tokens=1, arrival_s=0.002))
    assert harness.run() == [
        {"a": 28},  # seven of eight blocks: nothing runs yet. b would leave none
        {"b": 4, "c": 20},  # one and five: two are left
        {"b": 1},
    ]


def test_cached_prefix_is_not_computed_again() -> None:
    harness = Harness(policy="fcfs")
    harness.core.handle(online("a", [7] * 8, max_tokens=1))
    harness.run()
    harness.core.handle(online("b", [7] * 8 + [9], max_tokens=1))
    assert harness.run() == [{"b": 1}]


def test_rows_that_arrive_at_one_instant_keep_their_order_through_preemption(tmp_path: Path) -> None:
    harness = Harness(num_blocks=6, policy="fcfs")
    harness.core.handle(batch(tmp_path, "j", [[7] * 4, [8] * 4, [9] * 4, [10] * 4], max_tokens=9))
    harness.run()
    ends = [request_id for event, request_id in harness.log if event == "end"]
    assert ends == ["j:0", "j:1", "j:2", "j:3"]
    assert any(harness.ends[row][0].num_preemptions for row in ends)


def test_paused_offline_work_sits_out_and_gives_its_blocks_to_online_work() -> None:
    harness = Harness(num_blocks=4, policy="fcfs")
    harness.core.handle(flex("f", [8] * 9, max_tokens=4))
    assert harness.step() == {"f": 9}
    harness.core.handle(SetOffline(True))
    harness.core.handle(online("a", [7] * 3, max_tokens=2))
    assert harness.run() == [{"a": 3}, {"a": 1}]  # one block was left: f keeps its three
    harness.core.handle(online("b", [9] * 5, max_tokens=1))
    assert harness.run() == [{"b": 5}]
    harness.core.handle(SetOffline(False))
    assert harness.run() == [{"f": 2}, {"f": 1}, {"f": 1}]  # 10 tokens, two blocks of them still cached
