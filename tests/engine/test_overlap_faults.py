"""Faults with a step in flight: one request fails, the others' text stays what it is."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.messages import AbortRequest
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, FinishReason, Tier
from neaptide.engine.process.crash_marker_observer import CrashMarkerObserver
from neaptide.engine.process.request_log import RequestLog
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.steps.isolation import PROBE
from neaptide.engine.steps.plan import StepPlan
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, online
from tests.engine.policies import PUBLISHES_LATE

SHARING = sorted(name for name, policy in POLICIES.items() if policy.publishes_when_planned)
POISON = "r3"
PROMPTS = {f"r{i}": [10 + i] * (5 + 3 * i) for i in range(8)}
CHAIN = {"a": [7] * 8, "b": [7] * 8 + [9] * 4, "c": [7] * 8 + [9] * 4 + [5]}
"""Each is a prefix of the next, in whole blocks."""


def add(harness: Harness, prompts: dict[str, list[int]], max_tokens: int = 6) -> None:
    for index, (name, prompt) in enumerate(prompts.items()):
        tier = Tier.FLEX if index % 3 == 1 else Tier.DEFAULT
        harness.core.handle(online(name, prompt, max_tokens, tier=tier, arrival_s=0.001 * index))


def assert_others_are_well(
    harness: Harness, prompts: dict[str, list[int]], failed: dict[str, str], max_tokens: int = 6
) -> None:
    for name, prompt in prompts.items():
        (end,) = harness.ends[name]
        assert end.error == failed.get(name)
        if name not in failed:
            assert harness.tokens[name] == text_of(prompt, max_tokens)
    occupancy = harness.core.kv.occupancy()
    assert occupancy.free + occupancy.cached == harness.core.kv.num_blocks


def forgets(harness: Harness, device: FakeDevice) -> bool:
    """Whether the executor has heard of every end."""
    harness.core.handle(online("last", [999]))  # its plan says which requests ended
    harness.run(max_steps=400)
    return device.texts.keys() == {"last"}


WAYS = {"submit": (False, False), "submit, deaf": (False, True), "wait": (True, False)}
"""raises_in_wait, is_deaf"""


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["neaptide", "fcfs", PUBLISHES_LATE])
def test_only_the_request_fails_that_a_step_raises_with(policy: str, way: str, after: int) -> None:
    harness, device = on_device(policy=policy)
    device.raises_in_wait, device.is_deaf = WAYS[way]
    device.raises[POISON] = len(PROMPTS[POISON]) + after
    add(harness, PROMPTS)
    harness.run(max_steps=400)
    assert_others_are_well(harness, PROMPTS, {POISON: INTERNAL_ERROR})
    assert harness.tokens[POISON] == text_of(PROMPTS[POISON], after)
    assert device.wrong_inputs == []
    assert forgets(harness, device)


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_start_in_the_step_behind_a_failed_one_are_told_of_again(way: str) -> None:
    harness, device = on_device()
    device.raises_in_wait, device.is_deaf = WAYS[way]
    device.raises["a"] = 0
    harness.core.handle(online("a", [7] * 8))
    harness.step()
    late = {"late": [8] * 8, "later": [9] * 8}
    add(harness, late)
    harness.run(max_steps=400)
    assert_others_are_well(harness, late, {})
    assert forgets(harness, device)


def behind_a_failed_step(*observers: EngineObserver) -> Harness:
    """Two requests start in a step whose forerunner raises."""
    harness, device = on_device(policy="fcfs")
    for observer in observers:
        harness.core.subscribe(observer)
    device.raises["a"] = 0
    harness.core.handle(online("a", [7] * 8))
    harness.step()
    add(harness, {"late": [8] * 8, "later": [9] * 8}, max_tokens=1)
    return harness


def test_the_request_log_has_one_start_of_each(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), 1 << 20, num_old=0)
    behind_a_failed_step(log).run()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [(line["event"], line["id"]) for line in lines]
    assert events == [
        ("start", "a"),
        ("start", "late"),
        ("start", "later"),
        ("end", "a"),
        ("end", "late"),
        ("end", "later"),
    ]


def test_the_witness_forgets_a_step_that_was_undone() -> None:
    noted: list[list[str]] = []
    observer = CrashMarkerObserver(lambda ids, predicted_s: noted.append(list(ids)))  # type: ignore[arg-type]
    behind_a_failed_step(observer).run()
    behind = ["late", "later"]
    assert noted == [["a"], ["a", *behind], ["a"], [], behind, []]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("policy", SHARING)
def test_an_error_of_one_request_leaves_the_step_behind_it(policy: str, after: int) -> None:
    harness, device = on_device(policy=policy)
    device.not_a_number[POISON] = len(PROMPTS[POISON]) + after
    add(harness, PROMPTS)
    steps = harness.run(max_steps=400)
    committed, _ = on_device(policy=policy)
    add(committed, PROMPTS)
    assert len(steps) == len(committed.run())  # no step was done twice
    assert_others_are_well(harness, PROMPTS, {POISON: NUMERICAL_ERROR})
    assert harness.tokens[POISON] == text_of(PROMPTS[POISON], after)
    assert forgets(harness, device)


# ---- readers of what a failed request should have written ----


def staggered(harness: Harness, *groups: list[str]) -> None:
    """Hands in each group with a step of its own, so that they start in steps that follow each other."""
    names = list(CHAIN)
    for group in groups:
        for name in group:
            harness.core.handle(online(name, CHAIN[name], arrival_s=0.001 * names.index(name)))
        harness.step()


@pytest.mark.parametrize("groups", [[["a", "b", "c"]], [["a"], ["b", "c"]], [["a", "b"], ["c"]]])
@pytest.mark.parametrize("kind", [*WAYS, "not a number"])
@pytest.mark.parametrize("policy", SHARING)
def test_readers_of_a_failed_request_compute_again(policy: str, kind: str, groups: list[list[str]]) -> None:
    harness, device = on_device(policy=policy)
    if kind in WAYS:
        device.raises_in_wait, device.is_deaf = WAYS[kind]
        device.raises["a"] = 0
    else:
        device.not_a_number["a"] = 0
    staggered(harness, *groups)
    harness.run(max_steps=400)
    assert_others_are_well(harness, CHAIN, {"a": NUMERICAL_ERROR if kind == "not a number" else INTERNAL_ERROR}, 4)
    assert forgets(harness, device)


@pytest.mark.parametrize("policy", SHARING)
def test_readers_inside_a_step_that_was_undone_compute_again(policy: str) -> None:
    """What they read there was to be written in that very step."""
    harness, device = on_device(policy=policy)
    device.raises["poison"] = 0
    harness.core.handle(online("poison", [6] * 8))
    harness.step()
    prompts = {"writer": [7] * 8, "reader": [7] * 8 + [9]}
    for index, (name, prompt) in enumerate(prompts.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    harness.run(max_steps=400)
    assert_others_are_well(harness, prompts, {}, max_tokens=4)


@pytest.mark.parametrize("aborted", [["a"], ["a", "poison"]])
@pytest.mark.parametrize("kind", ["wait", "not a number"])
@pytest.mark.parametrize("policy", SHARING)
def test_readers_of_a_request_that_was_aborted_in_a_step_that_fails_compute_again(
    policy: str, kind: str, aborted: list[str]
) -> None:
    harness, device = on_device(policy=policy)
    prompts = CHAIN | {"poison": [6] * 8}
    device.raises_in_wait = True
    if kind == "wait":
        device.raises["poison"] = 0
    else:
        device.not_a_number["a"] = 0
    harness.core.handle(online("a", prompts["a"]))
    harness.core.handle(online("poison", prompts["poison"], arrival_s=0.001))
    assert harness.step() == {"a": 8, "poison": 8}
    harness.core.handle(AbortRequest(aborted))
    harness.core.handle(online("b", prompts["b"], arrival_s=0.002))
    harness.core.handle(online("c", prompts["c"], arrival_s=0.003))
    harness.run(max_steps=400)
    for name in ("b", "c"):
        assert harness.ends[name][0].error is None
        assert harness.tokens[name] == text_of(prompts[name], 4)
    assert harness.reason("a") is FinishReason.ABORT


@pytest.mark.parametrize("policy", SHARING)
def test_faults_at_random_spoil_no_other_text(policy: str) -> None:
    """Four neighbours share a prefix, the pool is small, a fifth of the requests fail at some token, and some are
    aborted."""
    rng = random.Random(6)
    harness, device = on_device(policy=policy, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=48)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for index in range(60):
        name = f"r{index}"
        prompts[name] = [100 + index // 4] * rng.choice([4, 9, 16]) + [rng.randrange(6, 50)] * rng.randrange(1, 12)
        if rng.random() < 0.2:
            faults = rng.choice([device.raises, device.not_a_number])
            faults[name] = rng.randrange(len(prompts[name]) + 4)
        tier = Tier.FLEX if rng.random() < 0.5 else Tier.DEFAULT
        harness.core.handle(online(name, prompts[name], tier=tier, arrival_s=harness.clock.now(), ttft_slo_s=9.0))
        if rng.random() < 0.1:
            aborted.add(f"r{rng.randrange(index + 1)}")
            harness.core.handle(AbortRequest(sorted(aborted)[-1:]))
        device.raises_in_wait, device.is_deaf = rng.choice(list(WAYS.values()))
        if rng.random() < 0.5:
            harness.step()
    harness.run(max_steps=400)
    for name, prompt in prompts.items():
        (end,) = harness.ends[name]
        if name in device.raises or name in device.not_a_number:
            error = INTERNAL_ERROR if name in device.raises else NUMERICAL_ERROR
            assert end.error == error or end.finish_reason is FinishReason.ABORT
        else:
            assert end.error is None
        text = text_of(prompt, 4)
        assert harness.tokens[name] == text[: len(harness.tokens[name])]
        assert harness.tokens[name] == text or end.error or name in aborted
    assert device.wrong_inputs == []
    assert forgets(harness, device)


# ---- what a step that is undone had done ----


def told_with_requests(device: FakeDevice, said: Callable[[StepPlan], list[str]]) -> list[list[str]]:
    """What each plan says that the device is given from now on; not those of the probe."""
    told: list[list[str]] = []
    submit = device.submit

    def spy(plan: StepPlan) -> Any:
        if PROBE.request_id not in plan.request_ids + plan.finished_ids:
            told.append(list(said(plan)))
        return submit(plan)

    device.submit = spy  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("policy", SHARING)
def test_what_a_reader_has_to_compute_again_was_not_cached(policy: str) -> None:
    harness, device = on_device(policy=policy)
    device.not_a_number["a"] = 0
    staggered(harness, ["a", "b"])
    harness.run(max_steps=400)
    assert harness.ends["b"][0].num_cached_tokens == 0


def test_admissions_of_a_step_that_is_undone_count_where_they_really_run() -> None:
    harness, device = on_device(policy="fcfs")
    prompts = {"cached": [7] * 8, "poison": [8] * 9, "reader": [7] * 8 + [9] * 3}
    harness.core.handle(online("cached", prompts["cached"]))
    harness.run()
    device.raises["poison"] = 0
    harness.core.handle(online("poison", prompts["poison"]))
    stats = harness.core.step().stats
    harness.core.handle(online("reader", prompts["reader"], tier=Tier.FLEX))
    while harness.core.has_work:
        stats += harness.core.step().stats
    counts = [(step.admitted_prompt_tokens, step.cached_tokens) for step in stats]
    assert counts == [(9, 0), (11, 8), *[(0, 0)] * (len(stats) - 2)]
    assert [step.online_admitted_prompt_tokens for step in stats[:2]] == [9, 0]
    assert [step.online_cached_tokens for step in stats[:2]] == [0, 0]


@pytest.mark.parametrize("policy", SHARING)
def test_a_hit_that_was_taken_back_does_not_count_as_cached(policy: str) -> None:
    harness, device = on_device(policy=policy)
    device.not_a_number["a"] = 0
    stats = []
    for name in ("a", "b"):
        harness.core.handle(online(name, CHAIN[name]))
        stats += harness.core.step().stats
    while harness.core.has_work:
        stats += harness.core.step().stats
    assert sum(step.admitted_prompt_tokens for step in stats) == len(CHAIN["a"]) + len(CHAIN["b"])
    assert sum(step.cached_tokens for step in stats) == 0


def test_a_preemption_in_a_step_that_is_undone_is_counted_and_told_once() -> None:
    harness, device = on_device(num_blocks=8, max_num_batched_tokens=16)
    device.raises_in_wait = True
    device.raises["poison"] = 0
    told = told_with_requests(device, lambda plan: plan.preempted_ids)
    stats = []
    harness.core.handle(online("f", [8] * 16, tier=Tier.FLEX))
    stats += harness.core.step().stats
    harness.core.handle(online("poison", [9] * 16))
    stats += harness.core.step().stats
    harness.core.handle(online("a", [7] * 4))
    while harness.core.has_work:
        stats += harness.core.step().stats
    assert told[:4] == [[], [], ["f"], ["f"]]  # the third step was undone, and is planned again
    assert [step.preempted_offline for step in stats[:3]] == [0, 0, 1]
    assert sum(step.preempted_offline for step in stats) == 1


def test_an_end_that_an_undone_step_told_of_is_told_again() -> None:
    harness, device = on_device()
    device.raises_in_wait = True
    device.raises["poison"] = 0
    told = told_with_requests(device, lambda plan: plan.finished_ids)
    harness.core.handle(online("gone", [7] * 4))
    harness.step()
    harness.core.handle(online("poison", [8] * 4))
    harness.step()
    harness.core.handle(AbortRequest(["gone"]))
    harness.core.handle(online("a", [9] * 4))
    harness.run()
    # Then the step that failed is tried again without the request that is gone, and the undone one is planned anew.
    assert told[:5] == [[], [], ["gone"], [], ["gone", "poison"]]
