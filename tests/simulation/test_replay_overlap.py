"""Replays of an engine that plans with a step in flight: what its log says of plans, and what faults do to them."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.config import CacheConfig, EngineConfig
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, Tier
from neaptide.engine.record.step_log import PlanLine, StepLine, create_log, read_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.simulation.replay import Replay, ReplayError, replay
from neaptide.simulation.simulator import simulate
from tests.engine.device import FakeDevice, on_device
from tests.engine.harness import Harness, online
from tests.simulation.scenes import STEP_S, constant, mixed
from tests.simulation.scenes import online as arrivals

SHARING = sorted(name for name, policy in POLICIES.items() if policy.publishes_when_planned)


def recorded_device(log: Path, **fields: object) -> tuple[Harness, FakeDevice, StepRecorder]:
    harness, device = on_device(**fields)
    scheduler = harness.core.scheduler
    config = EngineConfig(cache=CacheConfig(block_size=scheduler.kv.block_size), scheduler=scheduler.config)
    recorder = StepRecorder(create_log(log), config, scheduler.kv.num_blocks, {})
    harness.core.subscribe(recorder)
    return harness, device, recorder


def replay_device(log: Path, harness: Harness) -> Replay:
    num_blocks = harness.core.kv.num_blocks
    return replay(log, cost_model=harness.cost_model, headroom=FixedHeadroom(num_blocks, 0.0))


def test_a_log_says_where_each_step_was_planned(tmp_path: Path) -> None:
    simulate(constant(arrivals((0.0, 8, 2), (1.0, 8, 2)), overlap_depth=1), step_log=tmp_path / "log")
    lines = [line for line in read_log(tmp_path / "log") if isinstance(line, (PlanLine, StepLine))]
    alone = [line.t for line in lines if isinstance(line, PlanLine)]
    assert alone == [[0.0, 0.0], [1.0, 1.0]]
    behind = [line.next for line in lines if isinstance(line, StepLine)]
    # The third step was planned before it was known that the second brings the end; behind it was nothing to plan.
    assert behind[:3] == [[STEP_S, STEP_S], [2 * STEP_S, 2 * STEP_S], [pytest.approx(3 * STEP_S)]]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["raises", "not_a_number"])
@pytest.mark.parametrize("policy", SHARING)
def test_faults_replay(policy: str, kind: str, depth: int, tmp_path: Path) -> None:
    """A step that raises undoes the one behind it; a request that fails alone does not."""
    harness, device, recorder = recorded_device(
        tmp_path / "log", policy=policy, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=48, overlap_depth=depth
    )
    rng = random.Random(6)
    device.raises_in_wait = True
    for index in range(60):
        name = f"r{index}"
        prompt = [100 + index // 4] * rng.choice([4, 9, 16]) + [rng.randrange(6, 50)] * rng.randrange(1, 12)
        if rng.random() < 0.2:
            getattr(device, kind)[name] = rng.randrange(len(prompt) + 4)
        tier = Tier.FLEX if rng.random() < 0.5 else Tier.DEFAULT
        harness.core.handle(online(name, prompt, tier=tier, arrival_s=harness.clock.now(), ttft_slo_s=9.0))
        if rng.random() < 0.1:
            harness.core.handle(AbortRequest([f"r{rng.randrange(index + 1)}"]))
        if rng.random() < 0.5:
            harness.step()
    harness.run(max_steps=400)
    recorder.close()
    error = INTERNAL_ERROR if kind == "raises" else NUMERICAL_ERROR
    failures = [ends[0].error for ends in harness.ends.values() if ends[0].error]
    assert failures
    assert set(failures) == {error}
    result = replay_device(tmp_path / "log", harness)
    assert result.difference is None
    assert result.steps >= 30
    assert recorder.num_open == 0


def altered(log: Path, alter: Callable[[StepLine], None]) -> Replay:
    """The replay of a run with a step of its log altered: one that preempts, with another planned behind it."""
    simulate(mixed(overlap_depth=1, num_online=12), step_log=log)
    lines = list(read_log(log))
    alter(next(line for line in lines if isinstance(line, StepLine) and line.preempt and line.next[1:]))
    log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return replay(log)


def preempt_none(line: StepLine) -> None:
    line.preempt = []


def plan_nothing_behind(line: StepLine) -> None:
    del line.next[1:]


def hold_one_block_more(line: StepLine) -> None:
    line.kv[1] += 1


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (preempt_none, "the log says no request"),
        (plan_nothing_behind, "on whether a step is planned"),
        (hold_one_block_more, "KV blocks are"),
    ],
)
def test_the_first_difference_is_named(alter: Callable[[StepLine], None], said: str, tmp_path: Path) -> None:
    assert said in (altered(tmp_path / "log", alter).difference or "")


def test_a_log_without_the_times_of_plans_is_refused(tmp_path: Path) -> None:
    simulate(mixed(overlap_depth=1, num_online=4), step_log=tmp_path / "log")
    lines = [line for line in read_log(tmp_path / "log") if not isinstance(line, PlanLine)]
    for line in lines:
        if isinstance(line, StepLine):
            line.next = []
    (tmp_path / "old").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    with pytest.raises(ReplayError, match="when the next step was planned"):
        replay(tmp_path / "old")
