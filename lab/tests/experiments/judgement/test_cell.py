"""The simulation that a cell stands for."""

import msgspec
import numpy as np
import pytest

from lab.tests.experiments.judgement.runs_by_hand import cell
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide_lab.experiments.judgement.cell import (
    AGENT_TURNS,
    STALL_FACTOR,
    Cell,
    Part,
    WrongModel,
    online_of,
    scenario_of,
)


def test_a_cell_is_plain_data() -> None:
    one = cell(online=(Part("azure_conv_2023", (0.0, 5.0), 2.0), Part("made-code", (0.0, 5.0), rate_rps=3.0)))
    assert msgspec.json.decode(msgspec.json.encode(one), type=Cell) == one


def test_a_policy_may_have_limits_and_the_plan_of_a_server() -> None:
    scenario, fleet = scenario_of(cell(offline="fixed-32-4"), "neaptide@512+plan")
    assert (scenario.policy, scenario.max_num_batched_tokens, scenario.planner_is_told) == ("neaptide", 512, False)
    assert fleet is None


def test_several_replicas_are_a_fleet() -> None:
    _, fleet = scenario_of(cell(replicas=5), "neaptide")
    assert fleet is not None
    assert fleet.replicas == 5


def test_requests_come_after_the_warm_up_and_sorted() -> None:
    parts = Part("fixed-64-4", (0.0, 5.0), rate_rps=3.0), Part("made-chats", (0.0, 5.0), rate_rps=3.0)
    arrivals_s = [request.arrival_s for request in online_of(cell(online=parts, warm_up_s=7.0))]
    assert arrivals_s == sorted(arrivals_s)
    assert 7.0 <= arrivals_s[0] <= arrivals_s[-1] <= 12.0


def test_copies_of_a_window_follow_each_other_and_share_nothing() -> None:
    once, thrice = (
        online_of(cell(online=(Part("mooncake_synthetic", (100.0, 105.0), 0.5, copies=copies),))) for copies in (1, 3)
    )
    assert len(thrice) == 3 * len(once)
    assert thrice[: len(once)] == once
    assert thrice[len(once)].arrival_s == pytest.approx(once[0].arrival_s + 10.0)
    first, second = ({request.segments[0] for request in thrice[k * len(once) :][: len(once)]} for k in (0, 1))
    assert first.isdisjoint(second)


def test_every_call_of_an_agent_repeats_what_was_said_before() -> None:
    requests = online_of(cell(online=(Part("made-agents", (0.0, 30.0), rate_rps=4.0),)))
    sessions: dict[tuple[int, int], list[int]] = {}
    for request in sorted(requests, key=lambda request: len(request.segments)):
        sessions.setdefault(request.segments[0], []).append(len(request.segments))
    assert sessions
    assert all(turns == list(range(turns[0], turns[-1] + 1)) for turns in sessions.values())
    assert {turn for turns in sessions.values() for turn in turns} == set(range(1, AGENT_TURNS + 1))


def test_a_wrong_model_has_all_steps_longer_and_some_much_longer() -> None:
    shape = BatchShape()
    shape.add(100, 0)
    model = RooflineModel.generic()
    wrong = WrongModel(model, 1.3, 50, np.random.default_rng(0))
    ratios = [wrong.predict(shape).seconds / model.predict(shape).seconds for _ in range(2000)]
    assert {round(ratio, 6) for ratio in ratios} == {1.3, round(1.3 * STALL_FACTOR, 6)}
    assert sum(ratio > 2 for ratio in ratios) in range(20, 61)


def test_the_truth_of_a_cell_is_its_profile_unless_it_says_otherwise() -> None:
    assert scenario_of(cell(), "neaptide")[0].truth is None
    assert isinstance(scenario_of(cell(truth=0.7), "neaptide")[0].truth, WrongModel)
