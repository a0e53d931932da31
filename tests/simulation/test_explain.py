"""What a step says of itself, and what bounded the steps of a run."""

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


def test_time_is_told_where_rows_do_not_fit_into_it() -> None:
    """A step takes 4 ms and 0.2 ms more with every decode; twenty rows do not fit into a pace of 6 ms."""
    rows = offline(*((0, 8, 60),) * 20)
    lax = {"profile": ROOMY, "truth": None, "cost_model": None, "ttft_slo_s": 10.0, "tpot_slo_s": 0.006}
    assert "time" in ended_by(constant(online((0.0, 8, 150), (0.4, 8, 2)), [rows], **lax))


def test_with_room_for_all_nothing_more_waits() -> None:
    scenario = constant(online((0.0, 8, 40), (2.0, 8, 2)), [offline(*((0, 8, 60),) * 3)], refill=False)
    assert ended_by(scenario) == {"nothing more waits"}


def explained(step: int, scenario: Scenario) -> list[str]:
    explainer = Explainer(step)
    simulate(scenario, observers=[explainer])
    assert explainer.text is not None
    return explainer.text.splitlines()


def test_a_step_says_which_lengths_were_compared_for_offline_work_and_which_was_chosen() -> None:
    rows = [offline(*((0, 8, 60),) * 3)]
    lines = explained(3, constant(online((0.0, 8, 40), (2.0, 8, 2)), rows, refill=False))
    assert lines[1] == "  step lengths compared for offline work:"
    candidates = [line for line in lines if " requests late" in line]
    assert len(candidates) > 1
    assert all(" ms: " in line and "s of offline work a second" in line for line in candidates)
    assert [line.endswith("<- chosen: most for its time, or nearly") for line in candidates].count(True) == 1
    assert lines[2 + len(candidates)] == "  offline work ended by: nothing more waits"


def test_a_step_says_which_lengths_were_compared_for_prompts() -> None:
    lines = explained(1, constant(online((0.0, 8, 4)), [], refill=False))
    assert lines[1] == "  step lengths compared for online prompts:"
    assert lines[2].endswith("<- chosen: fewest late, then longest")


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
