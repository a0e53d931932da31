"""``priority-v0``: schedules computed by hand from the rules of vLLM 0.6 with priorities. Blocks have 4 tokens."""

from pathlib import Path

from tests.engine.harness import Harness, batch, flex, online


def test_online_request_takes_the_seat_of_the_last_offline_one(tmp_path: Path) -> None:
    harness = Harness(policy="priority-v0", max_num_seqs=2)
    harness.core.handle(batch(tmp_path, "j", [[8] * 4, [9] * 4], max_tokens=5))
    steps = [harness.step()]
    harness.core.handle(online("a", [7] * 5, max_tokens=2, arrival_s=harness.clock.now()))
    assert steps + harness.run() == [
        {"j:0": 4, "j:1": 4},
        {"j:0": 1},  # no prefill found a seat, so j:1 makes way; this step still decodes
        {"a": 5},
        {"a": 1, "j:0": 1},  # a ends
        {"j:1": 1},  # a prefill of one token: the other four are cached
        {"j:0": 1, "j:1": 1},
        {"j:0": 1, "j:1": 1},  # j:0 ends
        {"j:1": 1},
    ]
    assert harness.ends["j:1"][0].num_preemptions == 1


def test_only_as_many_make_way_as_the_prompt_needs() -> None:
    harness = Harness(num_blocks=6, policy="priority-v0")
    for index, request_id in enumerate("fgh"):
        max_tokens = 3 if request_id == "f" else 2
        harness.core.handle(flex(request_id, [8 + index] * 6, max_tokens, arrival_s=index * 0.001))
    assert harness.step() == {"f": 6, "g": 6, "h": 6}  # two blocks each
    harness.core.handle(online("a", [7] * 11, max_tokens=1, arrival_s=harness.clock.now()))
    assert harness.step() == {"f": 1}  # three blocks: h and g make way
    assert harness.step() == {"a": 11}
    harness.run()
    assert [harness.ends[r][0].num_preemptions for r in "fgh"] == [0, 1, 1]


def test_when_all_make_way_the_prefill_is_in_the_same_step() -> None:
    harness = Harness(num_blocks=4, policy="priority-v0")
    harness.core.handle(flex("f", [8] * 6, max_tokens=4))
    assert harness.step() == {"f": 6}
    harness.core.handle(online("a", [7] * 11, max_tokens=1, arrival_s=harness.clock.now()))
    assert harness.step() == {"a": 11}


def test_online_request_does_not_preempt_an_earlier_online_one() -> None:
    harness = Harness(policy="priority-v0", max_num_seqs=1)
    harness.core.handle(online("a", [7] * 4, max_tokens=3))
    harness.core.handle(online("b", [8] * 4, max_tokens=1, arrival_s=0.001))
    assert harness.run() == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 4}]
