"""BROS's scheduling on blocks with two tenants: what it preempts, what comes back; every text stays its own."""

from pathlib import Path

import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.scheduler.policies import POLICIES, find_policy
from neaptide.engine.steps.step import Step
from neaptide_lab.policies import RIVALS
from neaptide_lab.two_tenants.cache import TwoTenantCache
from tests.engine.baselines.costs import PerTokenCost
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, batch, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.scheduler.test_drafts import watched

PROMPT = list(range(6, 30))


def cache(num_host_blocks: int) -> CacheConfig:
    return CacheConfig(block_size=4, num_host_blocks=num_host_blocks, slot_copies=True)


def bros(num_host_blocks: int = 16, **fields: object) -> tuple[Harness, FakeDevice]:
    values = {"policy": "bros", "cost_model": PerTokenCost(), "overlap_depth": 0, "cache": cache(num_host_blocks)}
    return on_device(**values | fields)


def add_online(harness: Harness, num_tokens: int, max_tokens: int, slo_s: float) -> None:
    """One that cannot wait a step."""
    now_s = harness.clock.now()
    harness.core.handle(
        online("a", PROMPT[:num_tokens], max_tokens, arrival_s=now_s, ttft_slo_s=slo_s, tpot_slo_s=slo_s)
    )


def test_only_what_is_overwritten_goes_and_it_comes_back_before_its_request_runs(tmp_path: Path) -> None:
    harness, device = bros(num_blocks=4)
    steps: list[Step | None] = []
    watched(harness, lambda _: None, lambda _, step: steps.append(step))
    harness.core.handle(batch(tmp_path, "be", [PROMPT[:6]] * 2, max_tokens=3))
    assert harness.step() == {"be:0": 6, "be:1": 6}
    add_online(harness, 2, max_tokens=2, slo_s=0.03)
    # a lacks a block and none is free: it begins in the last block of be:1, the youngest, which sits out. Both fit.
    assert harness.step() == {"a": 2, "be:0": 1}
    assert device.num_slots_saved == 0
    # a's third token takes the slot of be:1's newest one.
    assert harness.step() == {"a": 1, "be:0": 1}
    assert device.num_slots_saved == 1
    # a has ended: the slot comes back to its place.
    assert harness.step() == {"be:1": 1}
    assert (device.num_slots_restored, device.num_slots_moved) == (1, 0)
    harness.run()
    assert harness.tokens["be:1"] == text_of(PROMPT[:6], 3)
    copied = [0 if step is None else step.plan.shape.copied_aside_blocks for step in steps]
    assert copied == [0, 0, 1, 1, 0]
    assert harness.ends["be:1"][0].num_preemptions == 0


def test_a_request_that_makes_way_for_an_older_one_keeps_its_tokens_in_host_memory(tmp_path: Path) -> None:
    harness, device = bros(num_blocks=6)
    harness.core.handle(batch(tmp_path, "be", [PROMPT[:8]] * 2, max_tokens=4))
    assert harness.step() == {"be:0": 8, "be:1": 8}
    add_online(harness, 10, max_tokens=2, slo_s=0.05)
    # a takes three blocks, be:0 grows into a third one: be:1 leaves both of its own.
    assert harness.step() == {"a": 10, "be:0": 1}
    assert device.num_slots_saved == 8
    assert harness.step() == {"a": 1, "be:0": 1}
    # a has ended: be:1 comes back whole and computes nothing again.
    assert harness.step() == {"be:0": 1, "be:1": 1}
    assert device.num_slots_restored == 8
    harness.run()
    assert harness.tokens["be:1"] == text_of(PROMPT[:8], 4)


def test_new_requests_wait_while_one_cannot_come_back(tmp_path: Path) -> None:
    harness, _ = bros(num_blocks=6)
    harness.core.handle(batch(tmp_path, "be", [PROMPT[:8], PROMPT[:8], PROMPT[:2]], max_tokens=4))
    harness.step()
    harness.run(max_steps=30)
    starts = [name for event, name in harness.log if event == "start"]
    assert starts == ["be:0", "be:1", "be:2"]
    assert all(end.num_preemptions == 0 for (end,) in harness.ends.values())


def test_without_room_in_host_memory_requests_are_computed_again(tmp_path: Path) -> None:
    harness, device = bros(num_blocks=6, num_host_blocks=1)
    harness.core.handle(batch(tmp_path, "be", [PROMPT[:8]] * 2, max_tokens=4))
    harness.step()
    add_online(harness, 10, max_tokens=2, slo_s=0.05)
    assert harness.step() == {"a": 10, "be:0": 1}
    assert harness.ends == {}
    harness.run()
    assert harness.ends["be:1"][0].num_preemptions == 1
    assert device.wrong_reads == []


@pytest.mark.parametrize(
    ("num_host_blocks", "can", "policy"), [(0, True, "bros"), (8, False, "bros"), (8, True, "fcfs")]
)
def test_blocks_have_one_tenant_unless_policy_executor_and_memory_allow_two(
    num_host_blocks: int, can: bool, policy: str
) -> None:
    config = CacheConfig(block_size=4, num_host_blocks=num_host_blocks, slot_copies=can)
    assert type(Harness(policy=policy, cache=config).core.kv) is KVCacheManager
    assert isinstance(Harness(policy="bros", cache=cache(8)).core.kv, TwoTenantCache)
    assert [name for name in (*POLICIES, *RIVALS) if find_policy(name).own_cache is not None] == ["bros"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [3, 64])
def test_random_histories_read_nothing_but_their_own_text(depth: int, num_host_blocks: int, tmp_path: Path) -> None:
    harness, device = on_device(policy="bros", cache=cache(num_host_blocks), **SMALL_POOL | {"overlap_depth": depth})
    history = History(5, tmp_path)
    history.play(harness, 120)
    assert device.wrong_reads == device.wrong_inputs == []
    assert device.num_slots_restored > 5
    for request_id, tokens in harness.tokens.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))


@pytest.mark.parametrize(
    ("seed", "depth", "is_deaf", "in_wait"),
    [(25, 0, True, False), (0, 1, False, False), (4, 1, True, False), (11, 1, False, True)],
)
def test_steps_that_raise_leave_no_wrong_copies(
    seed: int, depth: int, is_deaf: bool, in_wait: bool, tmp_path: Path
) -> None:
    """Every other request raises at some time."""
    harness, device = on_device(policy="bros", cache=cache(24), **SMALL_POOL | {"overlap_depth": depth})
    history = History(seed, tmp_path)
    device.is_deaf, device.raises_in_wait = is_deaf, in_wait
    for number in range(0, 120, 2):
        device.raises[f"r{number}"] = 1 + number % 20
    history.play(harness, 120)
    assert device.num_slots_restored > 5
    for request_id, tokens in harness.tokens.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))
