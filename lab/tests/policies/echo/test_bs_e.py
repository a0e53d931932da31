"""Echo's BS+E by hand. Times in comments are milliseconds; a step takes T = 10 + its tokens."""

from pathlib import Path

from neaptide.engine.messages import SetOffline
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.harness import Harness, batch, online


def bs_e(**fields: object) -> Harness:
    return Harness(**({"policy": "bs+e", "cost_model": PerTokenCost()} | fields))  # type: ignore[arg-type]


def prompt(num_tokens: int, first: int = 6) -> list[int]:
    return list(range(first, first + num_tokens))


def add_online(harness: Harness, request_id: str, num_tokens: int, max_tokens: int, ttft: float, tpot: float) -> None:
    """A request that arrives now, with a prompt of its own."""
    tokens = prompt(num_tokens, first=100 + 50 * len(harness.ends) + sum(map(ord, request_id)))
    message = online(request_id, tokens, max_tokens, arrival_s=harness.clock.now(), ttft_slo_s=ttft, tpot_slo_s=tpot)
    harness.core.handle(message)


def test_offline_work_fills_what_the_deadlines_leave(tmp_path: Path) -> None:
    harness = bs_e(max_num_batched_tokens=64)
    harness.core.handle(batch(tmp_path, "be", [prompt(60), prompt(30, 200)], max_tokens=3))
    add_online(harness, "a", 20, 4, ttft=0.0505, tpot=0.04)
    # t=0. a's prompt: T 30. D_1 = 50.5 leaves 20 tokens for be:0.
    assert harness.step() == {"a": 20, "be:0": 20}
    # t=50. D_2 = 50.5 + 40, slack 40.5: a and 29 tokens.
    assert harness.step() == {"a": 1, "be:0": 29}
    # t=90. D_3 = 130.5: the last 11 tokens of be:0, and 18 of be:1.
    assert harness.step() == {"a": 1, "be:0": 11, "be:1": 18}
    add_online(harness, "b", 40, 2, ttft=0.3, tpot=0.04)
    # t=130. D_4 = 170.5 leaves 29 tokens beside a's: b is online and goes before be:0 and be:1.
    assert harness.step() == {"a": 1, "b": 29}
    # t=170. a has ended. b's 11 tokens; D_1 = 430 leaves 260, 64 tokens are the step's limit.
    assert harness.step() == {"b": 11, "be:0": 1, "be:1": 12}


def test_no_offline_work_while_an_online_request_waits(tmp_path: Path) -> None:
    harness = bs_e(max_num_batched_tokens=16)
    harness.core.handle(batch(tmp_path, "be", [prompt(4)], max_tokens=5))
    assert harness.step() == {"be:0": 4}
    add_online(harness, "a", 16, 1, ttft=1.0, tpot=1.0)
    add_online(harness, "b", 8, 1, ttft=1.0, tpot=1.0)
    # a takes all tokens, b waits. Then b is in, and be:0, which kept its KV, goes on.
    assert harness.step() == {"a": 16}
    assert harness.step() == {"b": 8, "be:0": 1}


def test_a_late_stream_keeps_offline_work_out_but_not_the_prompts_of_others(tmp_path: Path) -> None:
    harness = bs_e()
    harness.core.handle(batch(tmp_path, "be", [prompt(4)], max_tokens=5))
    assert harness.step() == {"be:0": 4}
    add_online(harness, "late", 20, 9, ttft=0.01, tpot=0.02)
    # t=14. D_1 = 24 cannot be met, T is 30.
    assert harness.step() == {"late": 20}
    # t=44. D_2 = 44 is late as well: decoding alone takes 11. The new prompt runs, be:0 does not.
    add_online(harness, "new", 8, 1, ttft=1.0, tpot=1.0)
    assert harness.step() == {"late": 1, "new": 8}
    # t=63, 74, 85. Deadlines go on from the arrival: D_3 = 64, D_4 = 84, and D_5 = 104 leaves 19: T is 12 with be:0.
    steps = [harness.step() for _ in range(3)]
    assert steps == [{"late": 1}, {"late": 1}, {"late": 1, "be:0": 1}]


def test_online_requests_drop_the_youngest_offline_ones(tmp_path: Path) -> None:
    harness = bs_e(num_blocks=4)
    harness.core.handle(batch(tmp_path, "be", [prompt(7), prompt(7, 50)], max_tokens=8))
    assert harness.step() == {"be:0": 7, "be:1": 7}
    add_online(harness, "a", 8, 3, ttft=1.0, tpot=1.0)
    assert harness.step() == {"a": 8, "be:0": 1}
    # a grows into a third block: be:0 is dropped as well, and in such a step no request leaves the pool.
    assert harness.step() == {"a": 1}
    assert harness.core.scheduler.queues.running_offline == {}


def test_offline_requests_never_drop_online_ones(tmp_path: Path) -> None:
    harness = bs_e(num_blocks=4)
    add_online(harness, "a", 7, 6, ttft=1.0, tpot=1.0)
    harness.core.handle(batch(tmp_path, "be", [prompt(8)], max_tokens=4))
    # be:0 lacks a third block for its second token and sits out; a needs one for its third and takes be:0's.
    steps = [harness.step() for _ in range(3)]
    assert steps == [{"a": 7, "be:0": 8}, {"a": 1}, {"a": 1}]
    assert harness.core.scheduler.queues.running_offline == {}


def test_paused_offline_work_takes_no_part(tmp_path: Path) -> None:
    harness = bs_e()
    harness.core.handle(batch(tmp_path, "be", [prompt(4)], max_tokens=4))
    harness.step()
    harness.core.handle(SetOffline(True))
    add_online(harness, "a", 4, 1, ttft=1.0, tpot=0.1)
    assert [harness.step(), harness.step()] == [{"a": 4}, {}]


def test_bs_e_differs_from_priority_and_fcfs_by_what_the_estimator_allows(tmp_path: Path) -> None:
    steps = {}
    for policy in ("bs+e", "priority", "fcfs"):
        harness = Harness(policy=policy, cost_model=PerTokenCost(), max_num_batched_tokens=64)
        harness.core.handle(batch(tmp_path, policy, [prompt(60)], max_tokens=2))
        harness.clock.sleep_until(0.001)
        add_online(harness, "a", 20, 2, ttft=0.04, tpot=0.02)
        steps[policy] = harness.step()
    assert steps == {
        "bs+e": {"a": 20, "bs+e:0": 10},
        "priority": {"a": 20, "priority:0": 44},
        "fcfs": {"fcfs:0": 60, "a": 4},
    }


def test_every_token_is_in_time_by_the_deadlines_from_arrival_though_not_by_tpot_from_the_first_token(
    tmp_path: Path,
) -> None:
    harness = bs_e(num_blocks=2000)
    add_online(harness, "a", 20, 12, ttft=0.5005, tpot=0.02)
    assert harness.step() == {"a": 20}
    token_times = [harness.clock.now()]
    harness.core.handle(batch(tmp_path, "be", [prompt(300, 10 + row) for row in range(20)], max_tokens=9))
    while "a" not in harness.ends:
        step = harness.step()
        assert "a" in step
        assert len(step) > 1
        token_times.append(harness.clock.now())
    assert all(time_s <= 0.5005 + k * 0.02 for k, time_s in enumerate(token_times))
    # The first token came at 30, 470 early; offline work had it all.
    assert (token_times[-1] - token_times[0]) / 11 > 3 * 0.02
