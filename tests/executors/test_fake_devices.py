"""Fake devices run one step after the other, however early the next one is submitted."""

from collections.abc import Callable

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.interfaces import Executor
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimExecutor
from neaptide.executors.simulated.trace_executor import TraceExecutor
from tests.executors.driver import Driver, random_prompt

STEP_S = 0.01


def sim(clock: VirtualClock) -> Executor:
    return SimExecutor(64, ConstantCostModel(STEP_S), clock, vocab_size=100)


def trace(clock: VirtualClock) -> Executor:
    return TraceExecutor(64, ConstantCostModel(STEP_S), clock, lambda _: 100, lambda _: True)


DEVICES: dict[str, Callable[[VirtualClock], Executor]] = {"sim": sim, "trace": trace}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1])
def test_host_work_hides_behind_a_step_at_depth_one(device: str, depth: int) -> None:
    """Ten steps of 10 ms and 2 ms of host work before each: 120 ms one after the other, 102 ms one step ahead."""
    clock = VirtualClock()
    driver = Driver(DEVICES[device](clock), depth=depth)
    driver.add("r", random_prompt(5, 1))
    for count in [5] + [1] * 9:
        clock.sleep_until(clock.now() + 0.002)
        driver.submit({"r": count})
        if len(driver.in_flight) > depth:
            driver.wait()
    while driver.in_flight:
        driver.wait()
    assert clock.now() == pytest.approx(0.120 if depth == 0 else 0.102)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_do_not_depend_on_the_depth(device: str) -> None:
    outputs = []
    for depth in (0, 1):
        driver = Driver(DEVICES[device](VirtualClock()), depth=depth, seed=depth)
        for index in range(3):
            driver.add(f"r{index}", random_prompt(10 + index, index))
        driver.run(8, chunk=4)
        outputs.append({name: track.output for name, track in driver.tracks.items()})
    assert outputs[0] == outputs[1]
