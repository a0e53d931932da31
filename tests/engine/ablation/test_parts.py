"""Our policy without one of its parts does what the part was there to prevent."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.scheduler.parts import PARTS
from neaptide.engine.scheduler.policies import policy_of
from tests.engine.harness import Harness, batch, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.scheduler.judging import judged, request_of
from tests.engine.scheduler.test_margins_and_bounds import TOKEN_S, PerToken


def harness_of(*left_out: str, **fields: object) -> Harness:
    return Harness(cost_model=PerToken(), delivery_latency_s=0.0, left_out=left_out, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("left_out", "num_late"), [((), 2.0), (("arrivals",), 0.0)])
def test_arrivals(left_out: tuple[str, ...], num_late: float) -> None:
    """Two requests a second arrive, and each can wait for half a second: those after it are late."""
    harness = harness_of(ttft_slo_s=50.0)
    harness.core.scheduler.observe_arrival(request_of("a", 16, ttft_slo_s=64 * TOKEN_S))
    assert judged(harness, left_out).late_arrivals(np.array([1.5])) == [num_late]


@pytest.mark.parametrize(("left_out", "is_late"), [((), True), (("slack-reserve",), False)])
def test_slack_reserve(left_out: tuple[str, ...], is_late: bool) -> None:
    """A stream is in time, and hardly if a prompt like the last comes."""
    harness = harness_of(ttft_slo_s=50.0, max_num_batched_tokens=4096)
    harness.core.handle(online("a", [7], max_tokens=9, tpot_slo_s=1.0, ttft_slo_s=50.0))
    harness.step()
    harness.core.scheduler.observe_arrival(request_of("long", 3200))
    slack_s = np.array([[0.5]])
    late = judged(harness, left_out).late_streams(slack_s, slack_s, 1.0, np.zeros((1, 1)))
    assert (late[0] > 0.0) == is_late


@pytest.mark.parametrize(("left_out", "first"), [((), "short"), (("longest-late",), "long")])
def test_longest_late(left_out: tuple[str, ...], first: str) -> None:
    harness = harness_of(*left_out, max_num_batched_tokens=16)
    harness.core.handle(online("long", [7] * 60, ttft_slo_s=64 * TOKEN_S))
    harness.core.handle(online("short", [8] * 16, ttft_slo_s=66 * TOKEN_S))
    assert max(harness.step().items(), key=lambda part: part[1])[0] == first


@pytest.mark.parametrize(("left_out", "all_run"), [((), False), (("sit-out",), True)])
def test_sit_out(left_out: tuple[str, ...], all_run: bool, tmp_path: Path) -> None:
    """Beside a stream there is time for some of the rows."""
    harness = harness_of(*left_out, num_blocks=400, ttft_slo_s=50.0)
    harness.core.handle(batch(tmp_path, "job", [[k + 10] * 4 for k in range(40)], max_tokens=40))
    assert len(harness.step()) == 40
    harness.core.handle(online("chat", [7], max_tokens=20, ttft_slo_s=50.0, tpot_slo_s=20 * TOKEN_S))
    harness.step()
    assert (len(harness.step()) == 41) == all_run


@pytest.mark.parametrize(("left_out", "blocks"), [((), 20), (("headroom",), 38)])
def test_headroom(left_out: tuple[str, ...], blocks: int, tmp_path: Path) -> None:
    harness = harness_of(*left_out, num_blocks=40, headroom_ratio=0.5, ttft_slo_s=50.0)
    harness.core.handle(batch(tmp_path, "job", [[k + 10] * 8 for k in range(30)], max_tokens=1))
    harness.step()
    started = sum(event == "start" for event, _ in harness.log)
    assert 2 * started == blocks + (0 if blocks == 20 else 2)


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
