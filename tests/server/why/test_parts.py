"""Parts of a wait from constructed steps: exact numbers, and the cause in the first sentence."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.server.why.parts import Cause, StepsAround, TokenWait, parts_of
from neaptide.server.why.sentences import in_brief, largest, sentence
from tests.server.why.timeline import ADMISSIONS, OTHER, OWN, READMITTED, THIRD, Timeline


def milliseconds(wait: TokenWait, around: StepsAround) -> dict[Cause, float]:
    """The parts that are not 0, in ms."""
    found = {cause: round(1e3 * seconds, 3) for cause, seconds in parts_of(wait, around).seconds.items()}
    return {cause: ms for cause, ms in found.items() if ms}


def told(wait: TokenWait, around: StepsAround) -> str:
    return sentence(wait, parts_of(wait, around))


def test_two_prompts_before_it_and_its_own() -> None:
    time = Timeline()
    time.taken_s = {OTHER: 0.0, THIRD: 0.0}
    time.step(70, prompts={OTHER: 100})
    time.step(70, prompts={THIRD: 100})
    time.step(90, prompts={OWN: 100})
    wait = time.first_token(0, 50)
    assert milliseconds(wait, time.around()) == {Cause.PROMPTS: 140, Cause.OWN: 90}
    assert told(wait, time.around()) == (
        "late by 180 ms; 0 ms of it by batch work: 140 ms waiting for two prompts before it, 40 ms its own prompt "
        "(its first token took 230 ms for a target of 50 ms)"
    )
    assert in_brief(wait, parts_of(wait, time.around())) == (
        "late by 180 ms; 0 ms of it by batch work, 140 ms waiting for two prompts before it"
    )


def test_batch_work_in_its_steps_and_in_the_one_that_ran_when_it_came() -> None:
    time = Timeline()
    time.step(100, batch_ms=100)
    time.step(60, prompts={OWN: 100}, batch_ms=20)
    wait = time.first_token(30, 50)
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 90, Cause.OWN: 40}
    assert told(wait, time.around()).startswith("late by 80 ms; 80 ms of it by batch work (")


def test_batch_work_that_delayed_the_prompts_before_it_is_batch_work() -> None:
    """Without batch work, the other prompt would have been done before this request came."""
    time = Timeline()
    time.taken_s = {OTHER: 0.0}
    time.step(100, prompts={OTHER: 50}, batch_ms=50)
    time.step(50, prompts={OTHER: 50}, contexts={OTHER: 50})
    time.step(40, prompts={OWN: 100})
    wait = time.first_token(100, 30)
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 50, Cause.OWN: 40}


def test_without_batch_work_prompts_that_shared_a_step_are_no_batch_work() -> None:
    time = Timeline()
    time.taken_s = {OTHER: 0.0, THIRD: 0.12}
    time.step(100, prompts={OTHER: 100})
    time.idle(30)
    time.step(120, prompts={OWN: 100, THIRD: 100})
    wait = time.first_token(100, 30)
    assert milliseconds(wait, time.around()) == {Cause.PROMPTS: 60, Cause.BETWEEN: 30, Cause.OWN: 60}


def test_prompts_that_came_while_batch_work_ran_would_not_have_shared_a_step() -> None:
    time = Timeline()
    time.taken_s = {OTHER: 0.02, THIRD: 0.09}
    time.step(100, batch_ms=100)
    time.step(120, prompts={OTHER: 100, OWN: 100, THIRD: 100})
    wait = time.first_token(50, 30)
    # The other prompt from 20 to 60 ms, then its own; the third comes too late for that step.
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 120, Cause.PROMPTS: 10, Cause.OWN: 40}


def test_prompts_that_came_while_a_chat_had_the_device_do_share_a_step() -> None:
    time = Timeline()
    time.taken_s = {OTHER: 0.0, THIRD: 0.09}
    time.step(100, prompts={OTHER: 100})
    time.step(80, prompts={OWN: 100, THIRD: 100})
    wait = time.first_token(50, 30)
    assert milliseconds(wait, time.around()) == {Cause.PROMPTS: 90, Cause.OWN: 40}


def test_without_batch_work_streams_would_have_had_short_steps_when_it_came() -> None:
    time = Timeline()
    time.step(100, streams=(OTHER,), batch_ms=90)
    time.step(50, prompts={OWN: 100}, streams=(OTHER,), streams_ms=10)
    wait = time.first_token(25, 30)
    # Steps of 10 ms from 0 on: the rest of the third, then one with its prompt.
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 70, Cause.STREAMS: 15, Cause.OWN: 40}


def test_what_came_too_late_for_a_step_runs_beside_the_rest_of_its_prompt() -> None:
    time = Timeline()
    time.taken_s = {THIRD: 0.05}
    time.step(100, batch_ms=100)
    time.step(80, prompts={OWN: 100, THIRD: 100})
    time.step(40, prompts={OWN: 100}, contexts={OWN: 100})
    wait = time.first_token(40, 30)
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 60, Cause.PROMPTS: 40, Cause.OWN: 80}


def test_streams_that_decode() -> None:
    time = Timeline()
    for _ in range(4):
        time.step(50, prompts={OWN: 25}, streams=(OTHER, THIRD), streams_ms=40)
    wait = time.first_token(0, 60)
    assert milliseconds(wait, time.around()) == {Cause.STREAMS: 160, Cause.OWN: 40}
    assert "140 ms the tokens of two running streams" in told(wait, time.around())


def test_memory_that_other_chats_hold() -> None:
    time = Timeline()
    time.step(200, streams=(OTHER,), available_blocks=3, waiting_online=1, online_blocks=997)
    time.step(50, prompts={OWN: 100}, admits=ADMISSIONS[OWN])
    wait = time.first_token(0, 100)
    assert milliseconds(wait, time.around()) == {Cause.MEMORY: 200, Cause.OWN: 50}
    assert "150 ms waiting for KV memory that other chats held" in told(wait, time.around())


def test_memory_that_batch_work_holds_is_batch_work() -> None:
    time = Timeline()
    time.step(200, streams=(OTHER,), available_blocks=3, waiting_online=1, offline_blocks=900)
    time.step(50, prompts={OWN: 100}, admits=ADMISSIONS[OWN])
    wait = time.first_token(0, 100)
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 200, Cause.OWN: 50}


def test_slots_that_other_requests_have() -> None:
    time = Timeline()
    time.step(200, streams=(OTHER, THIRD), waiting_online=1, free_slots=0)
    time.step(50, prompts={OWN: 100}, admits=ADMISSIONS[OWN])
    wait = time.first_token(0, 100)
    assert milliseconds(wait, time.around()) == {Cause.SLOTS: 200, Cause.OWN: 50}


def test_a_preemption_and_what_it_dropped() -> None:
    time = Timeline()
    time.step(40, prompts={OWN: 60}, admits=ADMISSIONS[OWN])
    time.step(100, streams=(OTHER,), preempted=[OWN], waiting_online=1)
    time.step(50, prompts={OWN: 100}, admits=READMITTED)
    wait = time.first_token(0, 60)
    assert milliseconds(wait, time.around()) == {Cause.OWN: 60, Cause.AGAIN: 130}
    assert "130 ms preempted, and computing again what that dropped" in told(wait, time.around())


def test_an_engine_that_was_gone() -> None:
    time = Timeline(now_ms=2000)
    time.step(50, prompts={OWN: 100})
    wait = time.first_token(0, 100, sent_ms=10, engine_gone=((0.5, 2.0),))
    assert milliseconds(wait, time.around()) == {Cause.BEFORE: 10, Cause.ENGINE_GONE: 1990, Cause.OWN: 50}
    assert largest(parts_of(wait, time.around()).lateness(wait.late_s)) is Cause.ENGINE_GONE


def test_tokenization_and_a_slow_way_back() -> None:
    time = Timeline(now_ms=300)
    time.step(50, prompts={OWN: 100})
    wait = time.first_token(0, 100, sent_ms=300, way_back_ms=120)
    assert milliseconds(wait, time.around()) == {Cause.BEFORE: 300, Cause.OWN: 50, Cause.AFTER: 120}
    late = parts_of(wait, time.around()).lateness(wait.late_s)
    assert largest(late) is Cause.BEFORE
    assert round(1e3 * sum(late.values())) == 370


def test_masks_of_grammars_and_a_step_beyond_its_prediction() -> None:
    time = Timeline()
    time.step(300, prompts={OWN: 100}, mask_s=0.2, predicted_ms=60)
    wait = time.first_token(0, 50)
    assert milliseconds(wait, time.around()) == {Cause.MASKS: 200, Cause.SLOW: 40, Cause.OWN: 60}


def test_the_engine_between_its_steps() -> None:
    time = Timeline()
    time.step(20, streams=(OTHER,))
    time.idle(400)
    time.step(50, prompts={OWN: 100}, streams=(OTHER,), streams_ms=10)
    wait = time.first_token(20, 100)
    assert milliseconds(wait, time.around()) == {Cause.BETWEEN: 400, Cause.STREAMS: 10, Cause.OWN: 40}


def test_a_gap_by_a_prompt_in_its_step() -> None:
    time = Timeline()
    time.step(10, streams=(OWN, OTHER))
    time.step(100, prompts={THIRD: 500}, streams=(OWN, OTHER), streams_ms=10, batch_ms=20)
    wait = time.gap(10, 30)
    assert milliseconds(wait, time.around()) == {Cause.BATCH: 20, Cause.STREAMS: 10, Cause.PROMPTS: 70}
    assert told(wait, time.around()) == (
        "late by 70 ms; 20 ms of it by batch work: 50 ms waiting for one prompt before it "
        "(its longest gap between tokens took 100 ms for a target of 30 ms)"
    )


def test_a_gap_by_a_preemption() -> None:
    time = Timeline()
    time.step(10, streams=(OWN, OTHER))
    time.step(100, streams=(OTHER,), preempted=[OWN], waiting_online=1)
    time.step(40, prompts={OWN: 110}, admits=READMITTED)
    assert milliseconds(time.gap(10, 30), time.around()) == {Cause.AGAIN: 140}


def test_what_the_record_does_not_hold_is_other() -> None:
    time = Timeline(now_ms=500)
    time.step(50, prompts={OWN: 100})
    wait = time.first_token(0, 100)
    assert milliseconds(wait, time.around(since_ms=500)) == {Cause.OTHER: 500, Cause.OWN: 50}
    nothing = Timeline(now_ms=550)
    assert milliseconds(nothing.first_token(0, 100), nothing.around()) == {Cause.OTHER: 550}


def test_a_request_in_time_is_told_so() -> None:
    time = Timeline()
    time.step(50, prompts={OWN: 100})
    assert told(time.first_token(0, 1000), time.around()) == "on time: its first token took 50 ms for a target of 1 s"


def _batch_before(time: Timeline) -> None:
    time.step(300, batch_ms=300)


def _prompt_before(time: Timeline) -> None:
    time.taken_s = {OTHER: 0.0}
    time.step(300, prompts={OTHER: 100})


def _streams(time: Timeline) -> None:
    time.step(300, streams=(OTHER, THIRD))


def _memory(time: Timeline) -> None:
    time.step(300, streams=(OTHER,), available_blocks=3, waiting_online=1)


def _slots(time: Timeline) -> None:
    time.step(300, streams=(OTHER,), free_slots=0, waiting_online=1)


def _masks(time: Timeline) -> None:
    time.step(300, streams=(OTHER,), mask_s=0.28)


def _slow(time: Timeline) -> None:
    time.step(300, streams=(OTHER,), predicted_ms=20)


def _stalled(time: Timeline) -> None:
    time.step(10, streams=(OTHER,))
    time.idle(290)


def _preempted(time: Timeline) -> None:
    time.step(20, prompts={OWN: 50}, admits=ADMISSIONS[OWN])
    time.step(280, streams=(OTHER,), preempted=[OWN], waiting_online=1)


def _nothing(time: Timeline) -> None:
    time.idle(300)


NONE_OF_IT = "0 ms of it by batch work: "
CAUSES: list[tuple[Callable[[Timeline], None], dict[str, Any], str]] = [
    (_batch_before, {}, "250 ms of it by batch work ("),
    (_prompt_before, {}, NONE_OF_IT + "250 ms waiting for one prompt before it ("),
    (_streams, {}, NONE_OF_IT + "250 ms the tokens of two running streams ("),
    (_memory, {}, NONE_OF_IT + "250 ms waiting for KV memory that other chats held ("),
    (_slots, {}, NONE_OF_IT + "250 ms waiting for a slot, all of which other requests had ("),
    (_masks, {}, NONE_OF_IT + "250 ms waiting for masks of grammars ("),
    (_slow, {}, NONE_OF_IT + "250 ms steps that took longer than predicted ("),
    (_stalled, {}, NONE_OF_IT + "250 ms the engine between its steps ("),
    (_preempted, {}, NONE_OF_IT + "250 ms preempted, and computing again what that dropped ("),
    (_nothing, {"engine_gone": ((0.05, 0.3),)}, NONE_OF_IT + "250 ms without an engine, which had ended ("),
    (_nothing, {"sent_ms": 300}, NONE_OF_IT + "250 ms before the engine (reading, tokenization, checks) ("),
    (_nothing, {"way_back_ms": 600}, NONE_OF_IT + "600 ms from the engine to the client's connection, "),
]


@pytest.mark.parametrize(("happens", "values", "words"), CAUSES, ids=range(len(CAUSES)))
def test_the_sentence_names_the_cause_first(
    happens: Callable[[Timeline], None], values: dict[str, Any], words: str
) -> None:
    """300 ms are lost to one cause before a prompt of 50 ms, for a target of 100 ms."""
    time = Timeline()
    happens(time)
    time.step(50, prompts={OWN: 100}, admits=READMITTED)
    wait = time.first_token(0, 100, **values)
    said = told(wait, time.around())
    assert said.partition("; ")[2].startswith(words), said
    assert sum(parts_of(wait, time.around()).lateness(wait.late_s).values()) == pytest.approx(wait.late_s)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "ms": st.floats(1, 200),
            "idle_ms": st.floats(0, 50),
            "batch": st.floats(0, 1),
            "streams": st.booleans(),
            "other": st.booleans(),
            "predicted": st.floats(0.3, 2),
            "free_slots": st.integers(0, 1),
            "available_blocks": st.sampled_from([0, 1000]),
            "offline_blocks": st.sampled_from([0, 1000]),
            "is_preempted": st.booleans(),
        }
    ),
    max_size=8,
)


@given(STEPS, st.floats(0, 1), st.floats(0, 100), st.floats(0, 100), st.floats(1, 500))
def test_parts_are_not_negative_and_add_up(
    steps: list[dict[str, float]], came: float, before_ms: float, back_ms: float, target_ms: float
) -> None:
    time = Timeline()
    time.taken_s = {OTHER: 0.0}
    for one in steps:
        time.idle(one["idle_ms"])
        streams = (THIRD,) if one["streams"] else ()
        prompts = {OTHER: 10} if one["other"] else {}
        batch_ms = one["ms"] if not streams and not prompts else one["ms"] * one["batch"]
        time.step(
            one["ms"],
            prompts=prompts,
            streams=streams,
            batch_ms=batch_ms,
            streams_ms=(one["ms"] - batch_ms) / 2,
            predicted_ms=one["ms"] * one["predicted"],
            waiting_online=1,
            free_slots=one["free_slots"],
            available_blocks=one["available_blocks"],
            offline_blocks=one["offline_blocks"],
            preempted=[OWN] if one["is_preempted"] else [],
        )
    arrival_ms = came * time.now_ms
    sent_ms = min(arrival_ms + before_ms, time.now_ms)
    time.step(30, prompts={OWN: 100}, admits=ADMISSIONS[OWN])
    wait = time.first_token(arrival_ms, target_ms, sent_ms=sent_ms, way_back_ms=back_ms)
    parts = parts_of(wait, time.around())
    assert all(seconds >= 0 for seconds in parts.seconds.values())
    assert parts.total_s == pytest.approx(wait.end_s - wait.start_s)
    late = parts.lateness(wait.late_s)
    assert all(seconds >= 0 for seconds in late.values())
    assert sum(late.values()) == pytest.approx(wait.late_s)
    assert late[Cause.OTHER] == pytest.approx(0, abs=1e-9)
