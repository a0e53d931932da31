"""What a step says of itself, and what bounded the steps of a run."""

from dataclasses import replace

import pytest

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.simulation.explain import Explainer, StepLimits
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import constant, mixed, offline, online, profile


def test_a_step_is_explained() -> None:
    scheduled_rows: list[str] = []
    explainer = Explainer(9)

    class Watch(EngineObserver):
        def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
            if step.plan.step == 9:
                scheduled_rows.extend(step.plan.request_ids)

    simulate(mixed(), observers=[Watch(), explainer])
    assert explainer.text is not None
    assert explainer.text.startswith("step 9 at ")
    assert scheduled_rows
    assert all(request_id in explainer.text for request_id in scheduled_rows[:5])


def test_who_sits_out_and_why_is_explained() -> None:
    """So tight a target that fewer decodes fit into the time budget than are resident."""
    explainers = [Explainer(step) for step in range(1, 150)]
    simulate(mixed(tpot_slo_s=0.004), observers=explainers)
    said = [explainer.text for explainer in explainers if explainer.text and "not scheduled" in explainer.text]
    assert any("one more token would exceed the time budget" in text for text in said)


def ended_by(scenario: Scenario) -> set[str]:
    """What ended the offline work of the steps before the last arrival."""
    limits = StepLimits((0.0, scenario.online[-1].arrival_s))
    simulate(scenario, observers=[limits])
    assert str(limits).count("%") == len(limits.seconds)
    return set(limits.seconds)


ROOMY = profile(num_blocks=400)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_num_seqs": 4}, "seats"),
        ({"max_num_batched_tokens": 9}, "step tokens"),
        ({"profile": profile(num_blocks=32)}, "KV blocks"),
    ],
)
def test_what_ended_the_offline_work_of_steps_is_told(fields: dict[str, object], limit: str) -> None:
    fields = {"profile": ROOMY} | fields
    assert limit in ended_by(constant(online((0.0, 8, 40), (2.0, 8, 2)), [offline(*((0, 8, 60),) * 12)], **fields))


@pytest.mark.parametrize(
    ("offline_at_s", "ttft_slo_s", "bound"),
    [(0.0, 10.0, "streams"), (0.2, 10.0, "gap"), (0.0, 0.01, "next arrival")],
)
def test_time_is_told_by_its_least_bound(offline_at_s: float, ttft_slo_s: float, bound: str) -> None:
    """A step takes 4 ms and 0.2 ms more with every decode; twenty rows do not fit into a pace of 6 ms. A stream alone
    for 0.2 s has banked more than a gap may take."""
    rows = offline(*((0, 8, 60),) * 20)
    rows = replace(rows, requests=[replace(request, arrival_s=offline_at_s) for request in rows.requests])
    scenario = constant(
        online((0.0, 8, 150), (0.4, 8, 2)),
        [rows],
        profile=ROOMY,
        truth=None,
        cost_model=None,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=0.006,
    )
    assert f"time ({bound})" in ended_by(scenario)


def test_with_room_for_all_nothing_more_waits() -> None:
    scenario = constant(online((0.0, 8, 40), (2.0, 8, 2)), [offline(*((0, 8, 60),) * 3)], refill=False)
    assert ended_by(scenario) == {"nothing more waits"}


def test_a_step_says_which_bound_was_the_least() -> None:
    explainer = Explainer(3)
    simulate(
        constant(online((0.0, 8, 40), (2.0, 8, 2)), [offline(*((0, 8, 60),) * 3)], refill=False), observers=[explainer]
    )
    assert explainer.text is not None
    lines = explainer.text.splitlines()
    assert lines[1].startswith("  time bounds: gap ")
    assert lines[1].endswith("; limit = smallest x 1.00")
    assert lines[2] == "  offline work ended by: nothing more waits"


def test_a_step_says_what_it_kept_from_others_for_a_giant() -> None:
    small = ((0, 8, 30),)
    rows = offline(*small * 5, (0, 200, 4), *small * 200)
    explainers = [Explainer(step) for step in range(1, 900, 20)]
    simulate(constant([], [rows], profile=profile(num_blocks=64), refill=False), observers=explainers)
    lines = [line for explainer in explainers if explainer.text for line in explainer.text.splitlines()]
    kept = [line.removeprefix("  KV blocks reserved: ") for line in lines if "KV blocks reserved" in line]
    counts = [int(words.removesuffix(" for offline-0:5")) for words in kept]
    assert len(counts) > 3
    assert counts == sorted(counts)
    assert counts[-1] <= 51, "of 4 tokens each"
