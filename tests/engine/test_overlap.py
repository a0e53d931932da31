"""A step in flight while the next is planned: the same text, each token once, in the time that arithmetic says."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason, SamplingParams
from neaptide.engine.process.loop import run_engine
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimHandle
from tests.engine.device import on_device, text_of
from tests.engine.harness import Harness, flex, online
from tests.engine.histories import SMALL_POOL, History

Answer = tuple[list[int], FinishReason | None, int | None, str | None]


def answers(harness: Harness) -> dict[str, Answer]:
    """Tokens, reason, stop token and error of every request; each has one terminal output."""
    assert all(len(outputs) == 1 for outputs in harness.ends.values())
    return {
        request_id: (harness.tokens[request_id], output.finish_reason, output.stop_token_id, output.error)
        for request_id, (output,) in harness.ends.items()
    }


# ---- the same text ----


@pytest.mark.parametrize("policy", ["neaptide", "fcfs", "priority"])
def test_every_answer_is_that_of_an_engine_without_overlap(policy: str, tmp_path: Path) -> None:
    runs = []
    for depth in (0, 1):
        directory = tmp_path / str(depth)
        directory.mkdir()
        harness, history = Harness(policy=policy, overlap_depth=depth, **SMALL_POOL), History(1, directory)
        history.play(harness, 80)
        runs.append(answers(harness))
    alone, overlapping = runs
    whole = {request_id for request_id in history.prompts if not history.is_cut_short(request_id)}
    reasons = {overlapping[request_id][1] for request_id in whole}
    assert len(whole) > 40
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert {request_id: overlapping[request_id] for request_id in whole} == {r: alone[r] for r in whole}
    for request_id in overlapping.keys() - whole:
        text = text_of(history.prompts[request_id], 30)
        tokens = overlapping[request_id][0]
        assert tokens == text[: len(tokens)]


@pytest.mark.parametrize("policy", POLICIES)
def test_random_histories_with_a_step_in_flight(policy: str, tmp_path: Path) -> None:
    """Integrity after every step; each request ends once; no step reads what another request has in the cache, or
    another input token than was sampled."""
    harness, device = on_device(policy=policy, **SMALL_POOL)
    history = History(2, tmp_path)
    history.play(harness, 80)
    answered = answers(harness)
    assert all(history.is_cut_short(request_id) for request_id in history.prompts.keys() - answered.keys())
    assert not any(error for _, _, _, error in answered.values())
    for request_id, (tokens, *_) in answered.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))
    assert device.wrong_inputs == device.wrong_reads == []
    assert device.num_placeholders > 50
    occupancy = harness.core.kv.occupancy()
    assert occupancy.free + occupancy.cached == harness.core.kv.num_blocks
    harness.core.handle(online("last", [7]))  # its plan tells the executor which requests have ended
    harness.run()
    assert device.texts.keys() == {"last"}


def test_an_end_known_at_commit_only_costs_one_dropped_token() -> None:
    prompt = [7] * 6
    text = text_of(prompt, 9)
    harness, _ = on_device()
    harness.core.handle(online("a", prompt, params=SamplingParams(max_tokens=9, stop_token_ids=(text[3],))))
    steps = harness.run()
    assert harness.tokens["a"] == text[:3]
    assert (harness.reason("a"), harness.ends["a"][0].stop_token_id) == (FinishReason.STOP, text[3])
    assert steps == [{"a": 6}, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}, {}]  # the fifth computes behind the stop token


def test_an_end_by_length_costs_none() -> None:
    harness, _ = on_device()
    harness.core.handle(online("a", [7] * 6, max_tokens=3))
    assert harness.run() == [{"a": 6}, {"a": 1}, {"a": 1}, {}]
    assert harness.tokens["a"] == text_of([7] * 6, 3)


def test_an_abort_drops_the_token_in_flight() -> None:
    harness, _ = on_device()
    harness.core.handle(online("a", [7] * 6, max_tokens=9))
    harness.step()
    harness.step()
    harness.step()
    assert harness.tokens["a"] == text_of([7] * 6, 2)
    harness.core.handle(AbortRequest(["a"]))
    harness.run()
    assert harness.reason("a") is FinishReason.ABORT
    assert harness.tokens["a"] == text_of([7] * 6, 2)


def test_a_request_that_takes_part_in_the_step_in_flight_is_preempted_after_its_commit() -> None:
    """Else its new token would be lost, and two that push each other out in turn would never come to an end."""
    harness, device = on_device(policy="priority", num_blocks=6)
    harness.core.handle(flex("old", [7] * 8, max_tokens=16))
    assert harness.step() == {"old": 8}
    assert harness.step() == {"old": 1}
    harness.core.handle(online("new", [8] * 11, max_tokens=5))
    assert harness.step() == {"old": 1, "new": 11}
    assert harness.step() == {"old": 1, "new": 1}
    assert harness.step() == {}  # new needs a block of old, which is in flight
    assert len(harness.core.scheduler.queues.running_offline) == 1
    assert harness.step() == {"new": 1}
    assert len(harness.core.scheduler.queues.running_offline) == 0
    harness.run()
    assert harness.ends["old"][0].num_preemptions == 1
    assert harness.tokens["old"] == text_of([7] * 8, 16)
    assert harness.tokens["new"] == text_of([8] * 11, 5)
    assert device.wrong_reads == []


# ---- what the executor sees ----


def test_a_placeholder_stands_for_exactly_the_token_in_flight() -> None:
    harness, device = on_device()
    seen: list[list[int]] = []
    submit = device.submit

    def spy(plan: Any) -> Any:
        seen.append(plan.scheduled[0].token_ids)
        return submit(plan)

    device.submit = spy  # type: ignore[method-assign]
    harness.core.handle(online("a", [7, 8, 9], max_tokens=4))
    harness.run()
    assert seen == [[7, 8, 9], [-1], [-1], [-1]]
    assert device.wrong_inputs == []
    assert harness.tokens["a"] == text_of([7, 8, 9], 4)


def test_a_token_that_is_known_at_submit_is_no_placeholder() -> None:
    harness, device = on_device(max_num_seqs=2, max_num_batched_tokens=4)
    seen: list[list[list[int]]] = []
    submit = device.submit

    def spy(plan: Any) -> Any:
        seen.append([part.token_ids for part in plan.scheduled])
        return submit(plan)

    device.submit = spy  # type: ignore[method-assign]
    harness.core.handle(online("a", [7, 8, 9], max_tokens=3))
    harness.step()
    harness.step()  # commits the prompt and starts the first decode
    harness.core._in_flight, running = None, harness.core._in_flight
    assert running is not None
    harness.core._finish(running)
    harness.run()
    first, second, _ = text_of([7, 8, 9], 3)
    assert seen == [[[7, 8, 9]], [[-1]], [[second]]]
    assert first != second


def test_blocks_freed_under_a_running_step_are_written_by_later_steps_only() -> None:
    prompt = [7] * 6
    text = text_of(prompt, 9)
    harness, device = on_device(num_blocks=3)
    harness.core.handle(online("a", prompt, params=SamplingParams(max_tokens=6, stop_token_ids=(text[2],))))
    harness.core.handle(online("b", [8] * 9, max_tokens=3, arrival_s=0.1))
    tables: list[dict[str, list[int]]] = []
    submit = device.submit

    def spy(plan: Any) -> Any:
        tables.append({part.request_id: part.block_ids for part in plan.scheduled})
        return submit(plan)

    device.submit = spy  # type: ignore[method-assign]
    harness.run()
    dropped = next(index for index, step in enumerate(tables) if "b" in step) - 1
    assert tables[dropped].keys() == {"a"}  # ended at the commit before, and computed one token more
    assert set(tables[dropped]["a"]) & set(tables[dropped + 1]["b"])
    assert harness.tokens == {"a": text[:2], "b": text_of([8] * 9, 3)}
    assert device.wrong_reads == []


# ---- time ----

DEVICE_S, PLANNING_S = 0.010, 0.002


class HostWork(EngineObserver):
    """Planning takes time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def planning(self, now_s: float) -> None:
        self._clock.sleep_until(self._clock.now() + PLANNING_S)


def timed(depth: int, believed_s: float = DEVICE_S, margin_s: float = 0.0) -> Harness:
    """An engine whose device takes 10 ms for a step, and whose host takes 2 ms to plan one."""
    harness = Harness(cost_model=ConstantCostModel(believed_s, margin_s), overlap_depth=depth)
    harness.executor._cost_model = ConstantCostModel(DEVICE_S)
    harness.core.subscribe(HostWork(harness.clock))
    return harness


def serve(harness: Harness, *arriving: AddRequest) -> dict[str, list[float]]:
    """The loop of the engine process on the virtual clock; returns when each request's outputs came."""
    core, clock, times_s = harness.core, harness.clock, defaultdict[str, list[float]](list)
    waiting = deque(arriving)
    while core.has_work or waiting:
        while waiting and waiting[0].arrival_s <= clock.now():
            core.handle(waiting.popleft())
        arrives_s = waiting[0].arrival_s if waiting else math.inf
        if not core.has_work or core.plan_at_s > clock.now():
            clock.sleep_until(min(core.plan_at_s if core.has_work else math.inf, arrives_s))
            continue
        for output in core.step().outputs:
            times_s[output.request_id].append(clock.now())
    return times_s


@pytest.mark.parametrize(("depth", "step_s", "first_s"), [(0, 0.012, 0.012), (1, 0.010, 0.012)])
def test_100_decodes_take_as_long_as_arithmetic_says(depth: int, step_s: float, first_s: float) -> None:
    harness = timed(depth)
    (times_s,) = serve(harness, online("a", [7] * 8, max_tokens=101)).values()
    assert times_s == pytest.approx([first_s + i * step_s for i in range(101)])  # the first plan is overlapped by none


def test_the_device_does_not_wait_for_a_plan_if_a_step_ends_sooner_than_predicted_within_the_margin() -> None:
    harness = timed(1, believed_s=0.014, margin_s=0.004)
    (times_s,) = serve(harness, online("a", [7] * 8, max_tokens=11)).values()
    assert times_s == pytest.approx([0.012 + i * 0.010 for i in range(11)])


class PlannedFor(EngineObserver):
    """For which moments steps are planned."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def planning(self, now_s: float) -> None:
        self.times_s.append(now_s)


def test_a_step_is_planned_for_the_end_that_is_expected_of_the_one_in_flight() -> None:
    harness, observer = timed(1, believed_s=0.014, margin_s=0.004), PlannedFor()
    harness.core.subscribe(observer)
    serve(harness, online("a", [7] * 8, max_tokens=3))
    # Planned in 2 ms; then every step is believed to take 14 ms and takes 10.
    assert observer.times_s[:3] == pytest.approx([0.0, 0.016, 0.026])


@pytest.mark.parametrize("believed_s", [0.009, 0.010])
def test_an_arrival_during_a_step_waits_for_one_step_not_two(believed_s: float) -> None:
    harness = timed(1, believed_s)
    stream = online("stream", [7] * 8, max_tokens=101)
    chat = online("chat", [8] * 8, max_tokens=1, arrival_s=0.523)  # the running step takes from 522 to 532 ms
    assert serve(harness, stream, chat)["chat"] == pytest.approx([0.542])


def test_an_arrival_after_the_next_step_was_planned_waits_for_that_as_well() -> None:
    harness = timed(1)
    stream = online("stream", [7] * 8, max_tokens=101)
    chat = online("chat", [8] * 8, max_tokens=1, arrival_s=0.531)
    assert serve(harness, stream, chat)["chat"] == pytest.approx([0.552])


class LearningCostModel(ConstantCostModel):
    """Believes that the next step takes what the last one took."""

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self._prediction = Prediction(seconds, 0.0)


@pytest.mark.parametrize(("launch_s", "step_s"), [(0.006, DEVICE_S), (0.013, 0.015)])
def test_what_submitting_takes_is_not_taken_for_the_time_of_a_step(launch_s: float, step_s: float) -> None:
    """Or the host would wait for its own delay, longer from step to step. A faster device waits for its host."""
    harness = Harness(cost_model=LearningCostModel(0.030), overlap_depth=1)
    harness.executor._cost_model = ConstantCostModel(DEVICE_S)
    harness.core.subscribe(HostWork(harness.clock))
    submit = harness.executor.submit

    def launch(plan: StepPlan) -> SimHandle:
        handle = submit(plan)  # the device begins with what has been launched first
        harness.clock.sleep_until(harness.clock.now() + launch_s)
        return handle

    harness.executor.submit = launch  # type: ignore[method-assign]
    (times_s,) = serve(harness, online("a", [7] * 8, max_tokens=101)).values()
    between_s = [later - sooner for sooner, later in pairwise(times_s[50:100])]  # behind the last nothing is launched
    assert between_s == pytest.approx([step_s] * 49)


class Drain:
    """Source and sink of the engine's loop: no message until the engine is idle, then the end."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.sent_s: list[float] = []

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        clock = self._harness.clock
        clock.sleep_until(clock.now() + timeout_s)
        return [] if self._harness.core.has_work else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs) and message.outputs:
            self.sent_s.append(self._harness.clock.now())


def test_the_loop_of_the_engine_process_does_not_wait_behind_the_first_step() -> None:
    harness = Harness(cost_model=ConstantCostModel(0.002), overlap_depth=1)
    harness.core.handle(online("a", [7] * 8, max_tokens=4))
    drain = Drain(harness)
    ready = EngineReady("", "", "", 0, 0, 0, 0, [])
    run_engine(harness.core, ready, drain, drain, harness.clock)
    assert drain.sent_s == pytest.approx([0.002, 0.004, 0.006, 0.008])


def test_a_step_counts_from_the_end_of_the_one_before_it() -> None:
    harness = timed(1)
    harness.core.handle(online("a", [7] * 8, max_tokens=4))
    durations_s = []
    while harness.core.has_work:
        durations_s += [stats.duration_s for stats in harness.core.step().stats]
    assert durations_s == pytest.approx([DEVICE_S] * 4)
