"""``lpm``: schedules computed by hand from SGLang's rules. Blocks have 4 tokens."""

from tests.engine.harness import Harness, flex, online


def cached_and_uncached(policy: str) -> dict[str, int]:
    harness = Harness(policy=policy, max_num_batched_tokens=22)
    harness.core.handle(online("first", [7] * 40, max_tokens=1))
    harness.run()
    harness.core.handle(flex("uncached", [8] * 20, max_tokens=1, arrival_s=1.0))
    harness.core.handle(flex("cached", [7] * 40 + [9] * 4, max_tokens=1, arrival_s=1.001))
    return harness.step()


def test_longest_cached_prefix_goes_first() -> None:
    assert cached_and_uncached("lpm") == {"cached": 4, "uncached": 18}


def test_fcfs_does_not_look_at_the_cache_for_its_order() -> None:
    assert cached_and_uncached("fcfs") == {"uncached": 20, "cached": 2}


def test_of_two_that_share_an_uncached_prefix_the_second_steps_back() -> None:
    harness = Harness(policy="lpm", max_num_batched_tokens=52)
    harness.core.handle(online("a", [7] * 40 + [8] * 4, max_tokens=1))
    harness.core.handle(online("b", [7] * 40 + [9] * 4, max_tokens=1, arrival_s=0.001))
    harness.core.handle(online("c", [10] * 8, max_tokens=1, arrival_s=0.002))
    assert harness.run() == [{"a": 44, "c": 8}, {"b": 4}]  # the prefix of b is cached by then


def test_shared_prefix_under_32_tokens_does_not_count() -> None:
    harness = Harness(policy="lpm", max_num_batched_tokens=40)
    harness.core.handle(online("a", [7] * 28 + [8] * 4, max_tokens=1))
    harness.core.handle(online("b", [7] * 28 + [9] * 4, max_tokens=1, arrival_s=0.001))
    harness.core.handle(online("c", [10] * 8, max_tokens=1, arrival_s=0.002))
    assert harness.step() == {"a": 32, "b": 8}


def test_queue_of_more_than_128_is_served_by_arrival() -> None:
    harness = Harness(policy="lpm", max_num_batched_tokens=4, num_blocks=256)
    harness.core.handle(online("first", [7] * 40, max_tokens=1))
    harness.run()
    for index in range(128):
        harness.core.handle(flex(f"f{index}", [8 + index] * 4, max_tokens=1, arrival_s=1.0 + index * 0.001))
    harness.core.handle(flex("cached", [7] * 40 + [9] * 4, max_tokens=1, arrival_s=2.0))
    assert harness.step() == {"f0": 4}
    assert harness.step() == {"cached": 4}  # 128 are left


def test_prefill_goes_before_decode_and_a_chunked_prompt_stalls_it() -> None:
    harness = Harness(policy="lpm", max_num_batched_tokens=8)
    harness.core.handle(online("a", [7] * 6, max_tokens=3))
    steps = [harness.step(), harness.step()]
    harness.core.handle(online("b", [8] * 20, max_tokens=2, arrival_s=harness.clock.now()))
    assert steps + harness.run() == [{"a": 6}, {"a": 1}, {"b": 8}, {"b": 8}, {"b": 4}, {"a": 1, "b": 1}]


def test_admission_reserves_all_output_of_those_admitted_and_a_share_of_those_running() -> None:
    harness = Harness(num_blocks=15, policy="lpm")
    harness.core.handle(online("a", [7] * 4, max_tokens=20))
    harness.core.handle(online("b", [8] * 4, max_tokens=24, arrival_s=0.001))
    # 14 blocks are left beside a: 56 tokens, less 20 + 4 for its output. b may need 4 + 4 + 24 = 32, and must stay
    # under it.
    assert harness.step() == {"a": 4}
    # No second look before a request ends, though 0.7 * 19 for a would leave enough.
    assert harness.step() == {"a": 1}


def test_retraction_sends_back_the_least_output_then_the_longest_prompt() -> None:
    harness = Harness(num_blocks=10, policy="lpm")
    harness.core.handle(online("a", [7] * 4, max_tokens=12))
    steps = [harness.step()]
    harness.core.scheduler._state.ratio = 0.0  # type: ignore[attr-defined]  # as if limits had never been reached for long
    harness.core.handle(online("f", [8] * 4, max_tokens=12, arrival_s=0.1))
    steps.append(harness.step())
    harness.core.handle(online("g", [9] * 8, max_tokens=12, arrival_s=0.2))
    assert steps + harness.run() == [
        {"a": 4},
        {"f": 4},  # 8 + 12 tokens of 36
        {"g": 8},  # 12 + 12 tokens of 32
        *[{"a": 1, "f": 1, "g": 1}] * 8,  # 3 + 3 + 4 blocks are full: all ten
        # Each needs one more block. g goes, then f, for four blocks are no room for 20 tokens of two requests.
        {"a": 1},
        # f needs 4 + 1 blocks and 3 tokens, 23; six blocks less 2 tokens for a are left, 22.
        {"a": 1},
        {"a": 1},  # a ends
        {"f": 1},  # 12 of its 13 tokens are cached; g does not fit beside it
        {"f": 1},
        {"f": 1},
        {"g": 5},  # 12 of its 17 tokens are cached: the tail of its blocks went first
        {"g": 1},
        {"g": 1},
    ]
    assert [harness.ends[r][0].num_preemptions for r in "afg"] == [0, 1, 1]
