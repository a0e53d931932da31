"""Our policy without one of its parts does what the part was there to prevent."""

from pathlib import Path

import pytest

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.messages import AbortRequest
from neaptide.engine.scheduler.parts import PARTS
from neaptide.engine.scheduler.policies import policy_of
from tests.engine.harness import Harness, batch, flex, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, PerToken


def harness_of(*left_out: str, **fields: object) -> Harness:
    return Harness(cost_model=PerToken(), delivery_latency_s=0.0, left_out=left_out, **fields)  # type: ignore[arg-type]


def with_stream(*left_out: str, num_output: int, **fields: object) -> Harness:
    """A stream that has put out so many tokens, and whose next one is due in 96 tokens' time."""
    harness = harness_of(*left_out, ttft_slo_s=50.0, **fields)
    harness.core.handle(online("a", [7], max_tokens=30, tpot_slo_s=64 * TOKEN_S, ttft_slo_s=50.0))
    for _ in range(num_output):
        harness.step()
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s = harness.clock.now() + (1.5 - num_output) * 64 * TOKEN_S
    return harness


@pytest.mark.parametrize(("left_out", "tokens"), [((), 32), (("idle-bound",), 100)])
def test_idle_bound(left_out: tuple[str, ...], tokens: int) -> None:
    harness = harness_of(*left_out)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": tokens}


@pytest.mark.parametrize(("left_out", "tokens"), [((), 64), (("worth-bound",), 144)])
def test_worth_bound(left_out: tuple[str, ...], tokens: int) -> None:
    harness = harness_of(*left_out, ttft_slo_s=320 * TOKEN_S)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=160 * TOKEN_S, ttft_slo_s=50.0))
    harness.step()
    harness.core.handle(flex("f", [8] * 200, max_tokens=1))
    assert harness.step() == {"a": 1, "f": tokens - 1}


@pytest.mark.parametrize(("left_out", "tokens"), [((), 32), (("cushion",), 96)])
def test_cushion(left_out: tuple[str, ...], tokens: int) -> None:
    harness = with_stream(*left_out, num_output=10)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"a": 1, "f": tokens - 1}


@pytest.mark.parametrize(("left_out", "tokens"), [((), 57), (("stream-slack",), 96)])
def test_stream_slack(left_out: tuple[str, ...], tokens: int) -> None:
    harness = with_stream(*left_out, num_output=10, num_blocks=2000)
    stream = harness.core.scheduler.queues.running_online["a"]
    stream.first_token_s -= 200 * TOKEN_S  # it is late
    for number in range(20):  # so many that none may stall the streams
        now_s = harness.clock.now()
        harness.core.handle(online(f"p{number}", [9] * 400, ttft_slo_s=500.0, tpot_slo_s=1.0, arrival_s=now_s))
    assert sum(harness.step().values()) == tokens


@pytest.mark.parametrize(("left_out", "first"), [((), "new"), (("relegation",), "late")])
def test_relegation(left_out: tuple[str, ...], first: str) -> None:
    harness = harness_of(*left_out, max_num_batched_tokens=16)
    harness.core.handle(online("late", [7] * 100, ttft_slo_s=0.01))
    harness.core.handle(online("new", [8] * 16, ttft_slo_s=5.0))
    assert max(harness.step().items(), key=lambda part: part[1])[0] == first


@pytest.mark.parametrize(("left_out", "bound"), [((), True), (("prefill-slack",), False)])
def test_prefill_slack(left_out: tuple[str, ...], bound: bool) -> None:
    harness = harness_of("idle-bound", "worth-bound", *left_out, max_num_seqs=1)
    harness.core.handle(online("runs", [7], max_tokens=9, ttft_slo_s=50.0, tpot_slo_s=50.0))
    harness.step()
    harness.core.handle(online("waits", [8] * 16, ttft_slo_s=20 * TOKEN_S))
    harness.step()
    last = harness.watch.last
    assert last is not None
    assert (last.draft.limit_s < 20 * TOKEN_S) == bound


@pytest.mark.parametrize(("left_out", "shrinks"), [((), True), (("controller",), False)])
def test_controller(left_out: tuple[str, ...], shrinks: bool) -> None:
    harness = harness_of(*left_out)
    harness.core.handle(flex("f", [8] * 10, max_tokens=50))
    for _ in range(40):
        harness.step()
        step = harness.watch.last
        assert step is not None
        harness.core.scheduler.observe_step(step, 10.0)
    assert (harness.core.scheduler.controller.factor < 1.0) == shrinks  # type: ignore[attr-defined]


@pytest.mark.parametrize(("left_out", "blocks"), [((), 20), (("headroom",), 38)])
def test_headroom(left_out: tuple[str, ...], blocks: int, tmp_path: Path) -> None:
    harness = harness_of(*left_out, num_blocks=40, headroom_ratio=0.5, ttft_slo_s=50.0)
    harness.core.handle(batch(tmp_path, "job", [[k + 10] * 8 for k in range(30)], max_tokens=1))
    harness.step()
    started = sum(event == "start" for event, _ in harness.log)
    assert 2 * started == blocks + (0 if blocks == 20 else 2)


@pytest.mark.parametrize(("left_out", "decodes"), [((), 31), (("sit-out",), 40)])
def test_sit_out(left_out: tuple[str, ...], decodes: int, tmp_path: Path) -> None:
    harness = harness_of(*left_out, num_blocks=400, ttft_slo_s=50.0)
    harness.core.handle(batch(tmp_path, "job", [[k + 10] * 4 for k in range(40)], max_tokens=40))
    assert len(harness.step()) == 40
    harness.core.handle(online("chat", [7], ttft_slo_s=1.0))  # the next like it must find a step of 31 tokens at most
    harness.core.handle(AbortRequest(["chat"]))
    assert len(harness.step()) == decodes


@pytest.mark.parametrize(("left_out", "passes"), [((), True), (("giants",), False)])
def test_giants(left_out: tuple[str, ...], passes: bool, tmp_path: Path) -> None:
    harness = Harness(num_blocks=40, offline_max_kv_ratio=0.9, left_out=left_out)
    harness.core.handle(online("chat", [7] * 80, max_tokens=8, tpot_slo_s=10.0))
    for _ in range(3):
        harness.step()
    harness.core.handle(batch(tmp_path, "job", [[10] * 120, [11] * 8], max_tokens=1))
    assert ("job:1" in harness.step()) == passes


@pytest.mark.parametrize(
    ("part", "flag"),
    [
        ("prefix-order", "follows_prefixes"),
        ("reuse-eviction", "evicts_by_reuse"),
        ("same-step-sharing", "publishes_when_planned"),
        ("shares", "has_shares"),
        ("urgency", "puts_urgent_jobs_first"),
    ],
)
def test_properties_of_every_policy(part: str, flag: str) -> None:
    whole, reduced = policy_of(SchedulerConfig()), policy_of(SchedulerConfig(left_out=(part,)))
    assert (getattr(whole, flag), getattr(reduced, flag)) == (True, False)


@pytest.mark.parametrize("part", PARTS)
def test_random_histories_come_to_their_end(part: str, tmp_path: Path) -> None:
    harness = Harness(left_out=(part,), **SMALL_POOL)  # type: ignore[arg-type]
    History(4, tmp_path).play(harness, 40)
    assert harness.ends
    assert not harness.core.has_work


def test_an_unknown_part_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"^there is no part 'slack' to leave out; there are: prefix-order, .*giants$"):
        policy_of(SchedulerConfig(left_out=("slack",)))


def test_other_policies_have_no_parts() -> None:
    with pytest.raises(ValueError, match="no parts can be left out, only of neaptide"):
        policy_of(SchedulerConfig(policy="fcfs", left_out=("shares",)))
