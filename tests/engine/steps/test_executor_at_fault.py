"""What is to blame for a step that raises: its requests, or the executor. At both overlap depths."""

from typing import Any

import pytest

from neaptide.engine.params import INTERNAL_ERROR, FinishReason
from neaptide.engine.steps.isolation import MAX_FAILED_STEPS, PROBE
from neaptide.engine.steps.plan import StepPlan
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, online

DEPTHS = [0, 1]


class Gone:
    """A handle that raises."""

    def wait(self) -> Any:
        raise RuntimeError("the device is gone")


class BrokenExecutor:
    """Raises for every request but those that it can run, in ``submit`` or in ``wait``."""

    def __init__(self, device: FakeDevice, raises_in_wait: bool, can_run: set[str]) -> None:
        self._device = device
        self._raises_in_wait = raises_in_wait
        self._can_run = can_run
        self.num_blocks = device.num_blocks
        self.num_raised = 0

    def submit(self, plan: StepPlan) -> Any:
        if self._can_run.issuperset(plan.request_ids):
            return self._device.submit(plan)
        self.num_raised += 1
        if self._raises_in_wait:
            return Gone()
        raise RuntimeError("the device is gone")

    def close(self) -> None:
        return


def on_broken(depth: int, raises_in_wait: bool, *can_run: str) -> tuple[Harness, BrokenExecutor]:
    harness, device = on_device(overlap_depth=depth)
    broken = BrokenExecutor(device, raises_in_wait, set(can_run))
    harness.core._executor._executor = broken
    return harness, broken


@pytest.mark.parametrize("raises_in_wait", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_poisoned", [2, 5])
def test_requests_that_make_up_a_step_and_all_raise_fail_alone(
    num_poisoned: int, depth: int, raises_in_wait: bool
) -> None:
    harness, device = on_device(overlap_depth=depth)
    device.raises_in_wait = raises_in_wait
    names = [f"poison-{i}" for i in range(num_poisoned)]
    device.raises = dict.fromkeys(names, 0)
    for name in names:
        harness.core.handle(online(name, [7, 8, 9]))
    harness.step()
    harness.core.handle(online("sound", [9] * 6))
    harness.run(max_steps=40)
    assert [harness.ends[name][0].error for name in names] == [INTERNAL_ERROR] * num_poisoned
    assert harness.tokens["sound"] == text_of([9] * 6, 4)
    harness.core.handle(online("last", [999]))  # its plan says which requests ended
    harness.run(max_steps=40)
    assert device.texts.keys() == {"last"}


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_probe_writes_to_no_other_requests_blocks(depth: int) -> None:
    harness, device = on_device(overlap_depth=depth)
    prompts = {"a": [7] * 9, "poison": [7] * 8 + [6] * 5, "b": [7] * 8 + [5] * 3}
    device.raises["poison"] = len(prompts["poison"]) + 1
    for name, prompt in prompts.items():
        harness.core.handle(online(name, prompt, max_tokens=8))
        harness.step()
    harness.run(max_steps=60)
    assert harness.ends["poison"][0].error == INTERNAL_ERROR
    assert harness.tokens["a"] == text_of(prompts["a"], 8)
    assert harness.tokens["b"] == text_of(prompts["b"], 8)
    assert device.wrong_reads == []


@pytest.mark.parametrize("raises_in_wait", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_requests", [1, 2, 16])
def test_a_broken_executor_ends_the_engine_with_the_first_step_that_raises(
    num_requests: int, depth: int, raises_in_wait: bool
) -> None:
    harness, broken = on_broken(depth, raises_in_wait)
    for index in range(num_requests):
        harness.core.handle(online(f"r{index}", [7, 8, 9]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.run(max_steps=depth + 1)
    # The step, its first half, and so on down to one request, and the probe: nothing is run for each request.
    assert broken.num_raised <= num_requests.bit_length() + 1 + depth
    assert harness.ends == {}


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_executor_that_breaks_with_one_request_fails_no_other(depth: int) -> None:
    """An illegal access on a GPU: after it, nothing runs in this process."""
    harness, broken = on_broken(depth, False, "a", "b", PROBE.request_id)
    submit = broken.submit

    def breaking(plan: StepPlan) -> Any:
        if "poison" in plan.request_ids:
            broken._can_run = set()
        return submit(plan)

    broken.submit = breaking  # type: ignore[method-assign]
    for name in ("a", "poison", "b"):
        harness.core.handle(online(name, [7, 8, 9]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.run(max_steps=4)
    assert harness.ends == {}


@pytest.mark.parametrize("raises_in_wait", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_executor_that_runs_nothing_but_the_probe_ends_the_engine_soon(depth: int, raises_in_wait: bool) -> None:
    harness, _ = on_broken(depth, raises_in_wait, PROBE.request_id)
    for index in range(MAX_FAILED_STEPS - 1):
        for name in (f"a{index}", f"b{index}"):
            harness.core.handle(online(name, [7, 8, 9]))
        for _ in range(1 + depth):
            harness.step()
        assert harness.reason(f"a{index}") is harness.reason(f"b{index}") is FinishReason.ERROR
    harness.core.handle(online("last", [7, 8, 9]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.run(max_steps=1 + depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_succeeds_in_between_speaks_for_the_executor(depth: int) -> None:
    harness, _ = on_broken(depth, False, PROBE.request_id, "sound")
    failing = [f"r{index}" for index in range(2 * (MAX_FAILED_STEPS - 1))]
    for name in [*failing[: MAX_FAILED_STEPS - 1], "sound", *failing[MAX_FAILED_STEPS - 1 :]]:
        harness.core.handle(online(name, [7, 8, 9]))
        harness.run(max_steps=8)
    assert [name for name in harness.ends if harness.reason(name) is FinishReason.ERROR] == failing
