"""``fcfs-v0``: schedules computed by hand from the rules of vLLM 0.6. Blocks have 4 tokens."""

from tests.engine.harness import Harness, flex, online


def test_steps_are_whole_prompts_or_decodes_never_both() -> None:
    harness = Harness(policy="fcfs-v0", max_num_batched_tokens=8)
    harness.core.handle(online("a", [7] * 6, max_tokens=3))
    harness.core.handle(flex("f", [8] * 10, max_tokens=2, arrival_s=0.001))
    steps = [harness.step(), harness.step()]
    harness.core.handle(online("b", [9] * 3, max_tokens=2, arrival_s=harness.clock.now()))
    assert steps + harness.run() == [
        {"a": 6, "f": 10},  # prompts are not cut: the token budget is the context length
        {"a": 1, "f": 1},
        {"b": 3},  # a new prompt stalls every decode
        {"a": 1, "b": 1},
    ]


def test_last_running_request_is_preempted_and_waits_at_the_front() -> None:
    harness = Harness(num_blocks=4, policy="fcfs-v0", max_num_seqs=2)
    harness.core.handle(online("a", [7] * 7, max_tokens=4))
    harness.core.handle(flex("f", [8] * 6, max_tokens=6, arrival_s=0.001))
    harness.core.handle(flex("g", [9] * 4, max_tokens=1, arrival_s=0.002))
    assert harness.run() == [
        {"a": 7, "f": 6},  # two blocks each; g finds no seat
        {"a": 1, "f": 1},
        {"a": 1},  # token 9 of a needs a third block: f goes
        {"a": 1},  # f needs two blocks and stands before g, which needs one; a ends
        {"f": 4, "g": 4},  # 4 of the 8 tokens of f are cached
        {"f": 1},
        {"f": 1},
        {"f": 1},
    ]
    assert harness.ends["f"][0].num_preemptions == 1


def test_admission_leaves_one_percent_of_the_blocks() -> None:
    harness = Harness(num_blocks=200, policy="fcfs-v0")
    harness.core.handle(online("a", [7] * 760, max_tokens=4))  # 190 blocks
    harness.core.handle(online("b", [8] * 36, max_tokens=1, arrival_s=0.001))  # 9 of the 10 left, 2 must stay
    assert harness.step() == {"a": 760}


def test_prompt_that_leaves_exactly_one_percent_of_the_blocks_is_admitted() -> None:
    harness = Harness(num_blocks=200, policy="fcfs-v0")
    harness.core.handle(online("a", [7] * 760, max_tokens=4))
    harness.core.handle(online("b", [8] * 32, max_tokens=1, arrival_s=0.001))
    assert harness.step() == {"a": 760, "b": 32}


def test_first_request_may_use_every_block() -> None:
    harness = Harness(num_blocks=200, policy="fcfs-v0")
    harness.core.handle(online("a", [7] * 799, max_tokens=1))
    assert harness.run() == [{"a": 799}]
