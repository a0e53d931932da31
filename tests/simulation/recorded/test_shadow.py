"""The shadow is honest: under the policy that really ran it says what really was."""

import math
from functools import cache
from random import Random

import msgspec
import pytest

from neaptide.engine.record.traffic import ERROR_UNIT, ServedRequest
from neaptide.simulation.recorded.recording import StepErrors, TrafficRecording, is_online
from neaptide.simulation.recorded.shadow import Comparison, compare
from tests.simulation.recorded.engines import Stalling, recorded

WARM_S, WINDOW_S = 10.0, 30.0
RUN_S = 45.0
WITHIN = 0.1


@cache
def run_of(policy: str) -> tuple[TrafficRecording, float]:
    """Its recording, and the offline tokens/s of the window as the run itself has them."""
    recording, run = recorded(policy, RUN_S)
    steps = run.measures.steps((recording.now_s - WINDOW_S, recording.now_s))
    return recording, float(steps["prompt_tokens"].sum() + steps["output_tokens"].sum()) / WINDOW_S


@cache
def compared(policy: str, *policies: str) -> Comparison:
    found = compare(run_of(policy)[0], policies, WARM_S, WINDOW_S)
    assert found is not None
    return found


@pytest.mark.parametrize("policy", ["priority", pytest.param("fcfs", marks=pytest.mark.full)])
def test_the_shadow_of_a_policy_says_what_a_run_under_it_was(policy: str) -> None:
    found = compared(policy, policy)
    shadow, real = found.shadows[policy], found.real
    assert found.requests > 50
    assert 0.5 < real.met / found.requests < 1.0 or policy == "fcfs"
    assert shadow.met / found.requests == pytest.approx(real.met / found.requests, abs=WITHIN)
    assert shadow.offline_tokens_per_s == pytest.approx(real.offline_tokens_per_s, rel=WITHIN)


def test_steps_that_stall_stall_in_a_shadow() -> None:
    """Few of them, so that a normal distribution of as much noise knows none: it said 98% where 61% were in time."""
    found = compare(recorded("priority", RUN_S, truth=Stalling(1.1))[0], ["priority"], WARM_S, WINDOW_S)
    assert found is not None
    shadow, real = found.shadows["priority"], found.real
    assert 0.5 < real.met / found.requests < 0.7
    assert shadow.met / found.requests == pytest.approx(real.met / found.requests, abs=WITHIN)
    assert shadow.offline_tokens_per_s == pytest.approx(real.offline_tokens_per_s, rel=WITHIN)


def test_errors_are_drawn_as_often_as_they_were_and_have_their_mean() -> None:
    """A tenth of the steps took e times as long as others; together all took twice what was predicted."""
    errors, random = StepErrors({0: 90, round(1 / ERROR_UNIT): 10}, 2.0), Random(0)
    draws = [errors.draw(random) for _ in range(300)]
    for turn in range(3):
        drawn = draws[100 * turn : 100 * turn + 100]
        assert sum(drawn) / 100 == pytest.approx(2.0)
        assert sum(draw > 2 * min(drawn) for draw in drawn) == 10
    assert draws[:100] != draws[100:200]
    assert errors.noise == pytest.approx(0.1 * math.sqrt(math.pi / 2))


def test_without_a_known_step_predictions_stand() -> None:
    assert StepErrors({}).draw(Random(0)) == 1.0
    assert StepErrors({}).noise == 0.0


def test_what_really_was_is_what_the_run_measured() -> None:
    recording, tokens_per_s = run_of("priority")
    window_s = (recording.now_s - WINDOW_S, recording.now_s)
    assert recording.offline_tokens_per_s(window_s) == pytest.approx(tokens_per_s, rel=0.02)


def test_a_request_under_way_is_judged_by_its_first_token_on_both_sides() -> None:
    """Once that is due, also if it came too late. Here nothing ends that came in the window, and no pace suffices."""
    window_s = 6.0
    recording = endless(run_of("priority")[0], window_s)
    found = compare(recording, ["priority"], 2.0, window_s)
    assert found is not None
    now_s = recording.now_s
    due = [one for one in recording.present.requests if now_s - window_s <= one.arrival_s < now_s - one.ttft_slo_s]
    due = [one for one in due if is_online(one)]
    in_time = [one for one in due if 0.0 < one.first_token_s <= one.arrival_s + one.ttft_slo_s]
    assert (found.requests, found.real.met) == (len(due), len(in_time))
    assert 0 < len(in_time) < len(due)
    assert found.shadows["priority"].met > len(due) / 2


def endless(recording: TrafficRecording, seconds: float) -> TrafficRecording:
    """With no end of the online requests that came in the last ``seconds``, and a pace that none can keep."""

    def is_last(one: ServedRequest) -> bool:
        return is_online(one) and one.arrival_s >= recording.now_s - seconds

    last = [one for one in recording.served(-math.inf) if is_last(one)]
    replace = msgspec.structs.replace
    *pieces, end = (
        replace(piece, ended=[one for one in piece.ended if not is_last(one)]) for piece in recording.pieces
    )
    others = [one for one in recording.present.requests if not is_last(one)]
    under_way = [replace(one, reason=None, tpot_slo_s=1e-9) for one in last]
    return TrafficRecording([*pieces, replace(end, present=replace(recording.present, requests=others + under_way))])


def test_beside_a_run_of_ours_the_shadow_of_another_policy_is_that_policy() -> None:
    """What was recorded under one policy says what another does of the same load."""
    beside, alone = compared("neaptide", "priority"), compared("priority", "priority")
    shadow, real = beside.shadows["priority"], alone.real
    assert shadow.met / beside.requests == pytest.approx(real.met / alone.requests, abs=WITHIN)
    assert shadow.offline_tokens_per_s == pytest.approx(real.offline_tokens_per_s, rel=WITHIN)
