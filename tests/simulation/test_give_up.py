"""Steps of offline work alone that are given up between layers; every step takes 0.1 s, a layer 0.01."""

from dataclasses import replace

import pytest

from neaptide.engine.observer import EngineObserver
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.simulation.scenario import GiveUp
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import constant, mixed, offline, online

GIVE_UP = GiveUp(Layers(10, 0.005))


class Times(EngineObserver):
    """What each step took, and when it was committed."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []

    def executed(self, step: Step, result: StepResult) -> None:
        self.steps.append((len(step.plan), round(step.timer.execute_s, 6), round(step.timer.executed_at_s, 6)))


def test_a_step_that_is_given_up_is_computed_again() -> None:
    """The chat comes in the sixth layer. The step ends with that layer and 5 ms, and the row begins anew beside the
    chat's prompt."""
    times = Times()
    scenario = constant(online((0.055, 8, 3)), [offline((0, 8, 3))], refill=False, ttft_slo_s=0.005)
    run = simulate(replace(scenario, give_up=GIVE_UP), observers=[times])
    assert times.steps == [(1, 0.065, 0.065), (2, 0.1, 0.165), (2, 0.1, 0.265), (2, 0.1, 0.365)]
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.165 - 0.055)
    assert (run.num_aborted, run.result.wasted_tokens) == (1, 0)


def test_who_can_wait_for_the_end_of_a_step_does() -> None:
    """A target of 95 ms leaves 45 to an arrival, for egress takes 5: who comes in the fifth layer of ten does not
    wait, who comes in the sixth does."""
    for arrival_s, is_aborted in ((0.045, True), (0.055, False)):
        scenario = constant(online((arrival_s, 8, 1)), [offline((0, 8, 2))], refill=False, ttft_slo_s=0.095)
        assert simulate(replace(scenario, give_up=GIVE_UP)).num_aborted == is_aborted


def test_whole_steps_keep_it_waiting_until_they_end() -> None:
    run = simulate(constant(online((0.055, 8, 3)), [offline((0, 8, 3))], refill=False))
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.2 - 0.055)


def test_steps_without_online_work_may_be_longer_where_they_can_be_given_up() -> None:
    """A TTFT target of 15 ms leaves 5 ms to a step, for egress takes 5; it is made of chunks of 0.1 ms a token."""
    longest_s = {}
    for give_up in (None, GiveUp(Layers(20, 0.0))):
        times = Times()
        chat, rows = online((0.5, 8, 3)), [offline(*[(0, 40, 2)] * 60)]
        scenario = mixed(num_online=1, online=chat, offline=rows, ttft_slo_s=0.015, tpot_slo_s=0.004)
        simulate(replace(scenario, give_up=give_up), observers=[times])
        longest_s[give_up is None] = max(seconds for _, seconds, end_s in times.steps if end_s < 0.5)
    assert longest_s[False] > 1.5 * longest_s[True]


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_beside_preemptions_and_shared_prefixes_everything_ends(seed: int) -> None:
    scenario = mixed(seed, ttft_slo_s=0.006, tpot_slo_s=0.001)  # no request can wait
    run = simulate(replace(scenario, give_up=GiveUp(Layers(20, 0.0001))))
    assert run.num_aborted > 0
    assert run.result.preemptions.count_by_class["offline"] > 0
    assert (run.num_unfinished, run.num_failed) == (0, 0)
