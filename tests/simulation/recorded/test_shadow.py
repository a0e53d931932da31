"""The shadow is honest: under the policy that really ran it says what really was."""

from functools import cache

import pytest

from neaptide.simulation.recorded.recording import Recording
from neaptide.simulation.recorded.shadow import Comparison, compare
from tests.simulation.recorded.engines import recorded

WARM_S, WINDOW_S = 20.0, 40.0
WITHIN = 0.1


@cache
def run_of(policy: str) -> tuple[Recording, float]:
    """Its recording, and the offline tokens/s of the window as the run itself has them."""
    recording, run = recorded(policy, 75.0)
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


def test_what_really_was_is_what_the_run_measured() -> None:
    recording, tokens_per_s = run_of("priority")
    window_s = (recording.now_s - WINDOW_S, recording.now_s)
    assert recording.offline_tokens_per_s(window_s) == pytest.approx(tokens_per_s, rel=0.02)


def test_beside_a_run_of_ours_the_shadow_of_another_policy_is_that_policy() -> None:
    """What was recorded under one policy says what another does of the same load."""
    beside, alone = compared("neaptide", "priority"), compared("priority", "priority")
    shadow, real = beside.shadows["priority"], alone.real
    assert shadow.met / beside.requests == pytest.approx(real.met / alone.requests, abs=WITHIN)
    assert shadow.offline_tokens_per_s == pytest.approx(real.offline_tokens_per_s, rel=WITHIN)
