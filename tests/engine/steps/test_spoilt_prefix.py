"""A request whose logits are not finite, perhaps for what it found in the prefix cache, is computed once more."""

import pytest

from neaptide.engine.params import NUMERICAL_ERROR, Tier
from neaptide.engine.scheduler.policies import POLICIES
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, online

CACHED = sorted(name for name, policy in POLICIES.items() if policy.uses_prefix_cache)
PREFIX = [7] * 8
BAD = [*PREFIX, *range(100, 130)]
"""Two steps of ``STEP_TOKENS``: the first publishes what it has spoilt, the second tells."""
STEP_TOKENS = 24


def started(policy: str = "neaptide", depth: int = 1, **fields: object) -> tuple[Harness, FakeDevice]:
    """The first step of the bad request has been planned."""
    harness, device = on_device(policy=policy, overlap_depth=depth, max_num_batched_tokens=STEP_TOKENS, **fields)
    device.not_a_number["bad"] = 0
    harness.core.handle(online("bad", BAD))
    harness.step()
    return harness, device


def assert_well(harness: Harness, name: str, prompt: list[int], num_preemptions: int) -> None:
    (end,) = harness.ends[name]
    assert (end.error, end.num_preemptions) == (None, num_preemptions)
    assert harness.tokens[name] == text_of(prompt, 4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", CACHED)
def test_readers_begin_again_by_themselves(policy: str, depth: int) -> None:
    harness, device = started(policy, depth)
    readers = {"default": [*PREFIX, 5], "flex": [*PREFIX, 6, 6]}
    for name, prompt in readers.items():
        harness.core.handle(online(name, prompt, tier=Tier(name), arrival_s=0.001))
    harness.run(max_steps=100)
    assert harness.ends["bad"][0].error == NUMERICAL_ERROR
    for name, prompt in readers.items():
        (end,) = harness.ends[name]
        assert (end.error, harness.tokens[name]) == (None, text_of(prompt, 4))
        assert end.num_cached_tokens == 0 or not end.num_preemptions
    assert device.wrong_inputs == device.wrong_reads == []


def test_what_was_spoilt_is_zeroed_and_found_no_more() -> None:
    harness, device = started(depth=0)
    harness.core.handle(online("reader", [*PREFIX, 5], arrival_s=0.001))
    harness.run(max_steps=100)
    assert_well(harness, "reader", [*PREFIX, 5], 1)
    assert harness.ends["reader"][0].num_cached_tokens == 0
    harness.core.handle(online("later", [*PREFIX, 6], arrival_s=harness.clock.now(), ttft_slo_s=9.0))
    harness.run(max_steps=100)
    assert_well(harness, "later", [*PREFIX, 6], 0)
    assert harness.ends["later"][0].num_cached_tokens == 0
    assert device.wrong_reads == []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("after", [0, 2])
def test_one_that_is_to_blame_itself_fails_the_second_time(after: int, depth: int) -> None:
    """The tokens that it had put out stay, and whoever computed its prefix is well."""
    harness, device = on_device(overlap_depth=depth)
    harness.core.handle(online("good", [*PREFIX, 5]))
    harness.run()
    prompt = [*PREFIX, 6]
    device.not_a_number["bad"] = len(prompt) + after
    harness.core.handle(online("bad", prompt, max_tokens=9, arrival_s=harness.clock.now(), ttft_slo_s=9.0))
    harness.run(max_steps=100)
    (end,) = harness.ends["bad"]
    assert (end.error, end.num_preemptions) == (NUMERICAL_ERROR, 1)
    assert harness.tokens["bad"] == text_of(prompt, after)
    harness.core.handle(online("later", [*PREFIX, 5], arrival_s=harness.clock.now(), ttft_slo_s=9.0))
    harness.run(max_steps=100)
    assert_well(harness, "later", [*PREFIX, 5], 0)
    assert device.wrong_inputs == device.wrong_reads == []
