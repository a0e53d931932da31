"""BROS's Round-Robin baseline by hand. Every step takes 10 ms; which class a step serves is all that matters."""

from pathlib import Path

from neaptide.engine.messages import SetOffline
from tests.engine.harness import Harness, batch, flex, online


def round_robin(**fields: object) -> Harness:
    return Harness(**({"policy": "round-robin"} | fields))  # type: ignore[arg-type]


def prompt(num_tokens: int) -> list[int]:
    return list(range(6, 6 + num_tokens))


def test_classes_take_turns_and_one_without_work_gives_its_turn_away(tmp_path: Path) -> None:
    harness = round_robin()
    harness.core.handle(batch(tmp_path, "be", [prompt(8)] * 2, max_tokens=3))
    harness.core.handle(online("a", prompt(5), max_tokens=3))
    steps = [
        harness.step(),  # RT: a's prompt
        harness.step(),  # BE: both prompts
        harness.step(),  # RT
        harness.step(),  # BE
    ]
    assert steps == [{"a": 5}, {"be:0": 8, "be:1": 8}, {"a": 1}, {"be:0": 1, "be:1": 1}]
    harness.core.handle(online("b", prompt(6), max_tokens=4, arrival_s=0.04))
    assert harness.step() == {"a": 1, "b": 6}  # RT: decode and prompt in one batch; a ends
    assert harness.step() == {"be:0": 1, "be:1": 1}  # BE: both end
    assert harness.step() == {"b": 1}  # RT
    assert harness.step() == {"b": 1}  # BE has nothing: RT again
    harness.core.handle(flex("c", prompt(4), max_tokens=1))
    assert harness.step() == {"c": 4}  # BE's turn, which it had only given away
    assert harness.step() == {"b": 1}


def test_a_class_alone_runs_at_every_step(tmp_path: Path) -> None:
    harness = round_robin()
    harness.core.handle(batch(tmp_path, "be", [prompt(8)], max_tokens=3))
    assert harness.run() == [{"be:0": 8}, {"be:0": 1}, {"be:0": 1}]


def test_online_requests_wait_for_memory_that_offline_ones_hold(tmp_path: Path) -> None:
    """Memory knows no classes: first come, first served."""
    harness = round_robin(num_blocks=4)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)] * 2, max_tokens=3))
    assert harness.step() == {"be:0": 8, "be:1": 8}  # all four blocks
    harness.core.handle(online("a", prompt(5), max_tokens=2, arrival_s=0.01))
    # RT's turn, no block is free. BE: be:0 must grow and drops be:1, which was admitted last.
    assert harness.step() == {"be:0": 1}
    # RT: one block is free, a needs two.
    assert harness.step() == {"be:0": 1}
    # be:0 has ended.
    assert harness.step() == {"a": 5}
    # BE: be:1 needs three blocks for its 9 tokens, two are free. RT instead, and the turn stays BE's.
    assert harness.step() == {"a": 1}
    assert harness.step() == {"be:1": 9}


def test_a_resident_request_drops_the_youngest_of_either_class(tmp_path: Path) -> None:
    harness = round_robin(num_blocks=4)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)], max_tokens=8))
    assert harness.step() == {"be:0": 8}
    harness.core.handle(online("a", prompt(7), max_tokens=9, arrival_s=0.01))
    assert harness.step() == {"a": 7}
    # BE: be:0 grows, and a is dropped although it is online.
    assert harness.step() == {"be:0": 1}
    assert [request.request_id for request in harness.core.scheduler.queues.waiting_online] == ["a"]


def test_paused_offline_work_gives_its_memory_to_online_work(tmp_path: Path) -> None:
    harness = round_robin(num_blocks=4)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)] * 2, max_tokens=3))
    harness.step()
    harness.core.handle(SetOffline(True))
    harness.core.handle(online("a", prompt(5), max_tokens=2, arrival_s=0.01))
    assert [harness.step(), harness.step(), harness.step()] == [{"a": 5}, {"a": 1}, {}]
    assert harness.core.kv.occupancy().offline == 2  # be:0 was left alone
    harness.core.handle(SetOffline(False))
    assert harness.step() == {"be:0": 1}


def test_round_robin_differs_from_fcfs(tmp_path: Path) -> None:
    steps = {}
    for policy in ("round-robin", "fcfs"):
        harness = Harness(policy=policy)
        harness.core.handle(batch(tmp_path, policy, [prompt(8)], max_tokens=2))
        harness.core.handle(online("a", [70] * 5, max_tokens=2, arrival_s=0.0))
        steps[policy] = harness.run()
    assert steps["round-robin"] == [{"a": 5}, {"round-robin:0": 8}, {"a": 1}, {"round-robin:0": 1}]
    assert steps["fcfs"] == [{"a": 5, "fcfs:0": 8}, {"a": 1, "fcfs:0": 1}]
