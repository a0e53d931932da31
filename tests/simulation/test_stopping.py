"""Steps of offline work alone that are left between layers; every step takes 0.1 s, a layer 0.01."""

from dataclasses import replace

import pytest

from neaptide.engine.observer import EngineObserver
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.simulation.simulator import Run, simulate
from neaptide.simulation.stopping import Stops
from tests.simulation.scenes import constant, mixed, offline, online

STOPS = Stops(num_layers=10, handover_s=0.005)


class Times(EngineObserver):
    """What each step took, and when it was committed."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []

    def executed(self, step: Step, result: StepResult) -> None:
        self.steps.append((len(step.plan), round(step.timer.execute_s, 6), round(step.timer.executed_at_s, 6)))


def test_a_chat_waits_for_the_layer_that_runs_and_the_rest_of_the_step_comes_behind_its_first_token() -> None:
    """It comes in the sixth layer, which ends at 0.06; its prompt is computed from 0.065 to 0.165. The four layers that
    are left take until 0.21, the chat's second token until 0.31, and only then is there a step for both."""
    times = Times()
    run = simulate(constant(online((0.055, 8, 3)), [offline((0, 8, 3))], refill=False, stops=STOPS), observers=[times])
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.165 - 0.055)
    assert times.steps == [(1, 0.1, 0.165), (1, 0.11, 0.21), (1, 0.1, 0.31), (2, 0.1, 0.41)]
    assert run.num_left == 1


def test_a_step_that_is_given_up_is_computed_again() -> None:
    """As above until 0.165, and then the row begins anew beside the chat's second token. The step that is given up ends
    with the sixth layer and 5 ms."""
    times = Times()
    scenario = constant(online((0.055, 8, 3)), [offline((0, 8, 3))], refill=False, ttft_slo_s=0.005)
    run = simulate(replace(scenario, stops=replace(STOPS, goes_on=False)), observers=[times])
    assert times.steps == [(1, 0.065, 0.065), (2, 0.1, 0.165), (2, 0.1, 0.265), (2, 0.1, 0.365)]
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.165 - 0.055)
    assert (run.num_left, run.result.wasted_tokens) == (1, 0)


def test_who_can_wait_for_the_end_of_a_step_does() -> None:
    """A target of 95 ms leaves 45 to an arrival, for egress takes 5: who comes in the fifth layer of ten does not
    wait, who comes in the sixth does."""
    stops = replace(STOPS, goes_on=False)
    for arrival_s, is_given_up in ((0.045, True), (0.055, False)):
        scenario = constant(online((arrival_s, 8, 1)), [offline((0, 8, 2))], refill=False, ttft_slo_s=0.095)
        assert simulate(replace(scenario, stops=stops)).num_left == is_given_up


def test_whole_steps_keep_it_waiting_until_they_end() -> None:
    run = simulate(constant(online((0.055, 8, 3)), [offline((0, 8, 3))], refill=False))
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.2 - 0.055)


TIGHT: dict[str, object] = {"ttft_slo_s": 0.115, "tpot_slo_s": 0.105, "window_s": (0.0, 0.5), "refill": False}
"""Targets that spare no layer beside a stream, and no step of 0.1 s for the next arrival."""


def test_what_is_left_waits_while_streams_can_spare_nothing() -> None:
    """The four layers wait until the chat has ended."""
    times = Times()
    stops = replace(STOPS, idle_factor=4.0)
    simulate(constant(online((0.055, 8, 3)), [offline((0, 8, 3))], stops=stops, **TIGHT), observers=[times])
    assert times.steps[:4] == [(1, 0.1, 0.165), (1, 0.1, 0.265), (1, 0.1, 0.365), (1, 0.11, 0.41)]


@pytest.mark.parametrize(("factor", "shortest_s", "longest_s"), [(1.0, 0.004, 0.006), (4.0, 0.010, 0.021)])
def test_steps_without_online_work_may_be_longer(factor: float, shortest_s: float, longest_s: float) -> None:
    """A TTFT target of 15 ms leaves 5 ms to a step, for egress takes 5; it is made of chunks of 0.1 ms a token."""
    times = Times()
    chat, rows = online((0.5, 8, 3)), [offline(*[(0, 40, 2)] * 60)]
    scenario = mixed(num_online=1, online=chat, offline=rows, ttft_slo_s=0.015, tpot_slo_s=0.004)
    simulate(replace(scenario, stops=Stops(20, 0.0, factor)), observers=[times])
    assert shortest_s < max(seconds for _, seconds, end_s in times.steps if end_s < 0.5) < longest_s


def test_a_piece_is_left_in_turn() -> None:
    """The first chat has one token, so the rest goes on alone from 0.17; the second comes in the layer that ends at
    0.19, which leaves two of the four."""
    times = Times()
    scenario = constant(
        online((0.055, 8, 1), (0.185, 8, 1)), [offline((0, 8, 1))], refill=False, stops=STOPS, window_s=(0.0, 0.4)
    )
    run = simulate(scenario, observers=[times])
    assert times.steps == [(1, 0.1, 0.165), (1, 0.1, 0.295), (1, 0.12, 0.32)]
    assert run.result.online.ttft_s["p99"] == pytest.approx(0.11, abs=1e-3)


def test_a_step_with_a_stream_in_it_is_not_left() -> None:
    scenario = constant(online((0.0, 8, 5), (0.25, 8, 1)), [offline((0, 8, 20))], refill=False, stops=STOPS)
    assert simulate(scenario).num_left == 0


def outcome_of(run: Run) -> tuple[object, ...]:
    result = run.result
    return result.steps, result.online, result.offline, result.preemptions


def test_with_one_layer_nothing_changes() -> None:
    assert outcome_of(simulate(replace(mixed(), stops=Stops(1, 0.005)))) == outcome_of(simulate(mixed()))


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_beside_preemptions_and_shared_prefixes_everything_ends(seed: int, goes_on: bool) -> None:
    scenario = mixed(seed) if goes_on else mixed(seed, ttft_slo_s=0.006, tpot_slo_s=0.001)  # nobody can wait
    run = simulate(replace(scenario, stops=Stops(20, 0.0001, 4.0, goes_on)))
    assert run.num_left > 0
    assert run.result.preemptions.count_by_class["offline"] > 0
    assert (run.num_unfinished, run.num_failed) == (0, 0)
