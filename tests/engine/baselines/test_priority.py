"""``priority``: schedules computed by hand from the rules of vLLM v1 with priorities. Blocks have 4 tokens."""

from pathlib import Path

from neaptide.engine.params import Tier
from tests.engine.harness import Harness, batch, flex, online


def online_beside_three_rows(policy: str, directory: Path) -> list[dict[str, int]]:
    harness = Harness(policy=policy, max_num_seqs=2, max_num_batched_tokens=8)
    harness.core.handle(batch(directory, "j", [[7] * 4, [8] * 4, [9] * 4], max_tokens=3))
    steps = [harness.step()]
    harness.core.handle(online("a", [10] * 5, max_tokens=2, arrival_s=harness.clock.now()))
    return steps + harness.run()


def test_online_goes_before_waiting_offline_work_but_nobody_gives_up_a_seat(tmp_path: Path) -> None:
    assert online_beside_three_rows("priority", tmp_path) == [
        {"j:0": 4, "j:1": 4},  # both seats
        {"j:0": 1, "j:1": 1},  # a waits for a seat
        {"j:0": 1, "j:1": 1},  # both end
        {"a": 5, "j:2": 3},  # a before the row that came first; the rest of the 8 tokens for the row
        {"a": 1, "j:2": 1},
        {"j:2": 1},
        {"j:2": 1},
    ]


def test_fcfs_serves_the_row_that_came_first(tmp_path: Path) -> None:
    assert online_beside_three_rows("fcfs", tmp_path)[3] == {"j:2": 4, "a": 4}


def test_victim_comes_last_in_priority_even_if_it_was_admitted_first_and_has_its_token() -> None:
    harness = Harness(num_blocks=4, policy="priority")
    harness.core.handle(flex("f", [8] * 5, max_tokens=6))
    steps = [harness.step()]
    harness.core.handle(online("a", [7] * 7, max_tokens=4, arrival_s=harness.clock.now()))
    assert steps + harness.run() == [
        {"f": 5},
        {"f": 1, "a": 7},  # two blocks each
        {"f": 1, "a": 1},
        {"a": 1},  # f had its token 8 in this step when token 9 of a found no block: f loses both
        {"a": 1},  # f needs two blocks, one is left; a ends
        {"f": 4},  # 4 of its 8 tokens are cached
        {"f": 1},
        {"f": 1},
    ]
    assert harness.ends["f"][0].num_preemptions == 1
    assert harness.ends["a"][0].num_preemptions == 0


def test_tier_priority_goes_before_tier_default() -> None:
    harness = Harness(policy="priority", max_num_batched_tokens=4)
    harness.core.handle(flex("f", [8] * 4, max_tokens=1))
    harness.core.handle(online("default", [7] * 4, max_tokens=1, arrival_s=0.001))
    harness.core.handle(online("priority", [9] * 4, max_tokens=1, arrival_s=0.002, tier=Tier.PRIORITY))
    assert harness.run() == [{"priority": 4}, {"default": 4}, {"f": 4}]


def test_step_in_which_everybody_looked_at_is_preempted_is_planned_again() -> None:
    harness = Harness(num_blocks=4, policy="priority")
    harness.core.handle(flex("f", [8] * 6, max_tokens=6))
    steps = [harness.step()]
    harness.core.handle(online("a", [7] * 7, max_tokens=3, arrival_s=harness.clock.now()))
    steps += [harness.step(), harness.step()]
    assert steps == [{"f": 6}, {"f": 1, "a": 7}, {"f": 1, "a": 1}]
    # f is looked at first, finds no block for token 9 and is itself the one to go.
    assert harness.step() == {"a": 1}
