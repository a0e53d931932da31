"""One step's offline fill against the exact solution of Echo's equation (3) over that step."""

import random

import pytest

from tests.engine.scheduler.step_optimum import (
    COST_MODEL,
    Candidate,
    Instance,
    decode_worth_s,
    measure,
    random_instance,
    worth_s,
)


def best(instance: Instance) -> dict[str, int]:
    choice = max(instance.choices(), key=worth_s)
    return {candidate.request_id: num_tokens for candidate, num_tokens in choice.items()}


def test_the_solver_leaves_out_a_decode_that_costs_more_than_it_brings() -> None:
    """Where the time is short, a decode on a long context displaces more of a prompt than it is worth."""
    instance = Instance([Candidate("decode", 1, 8000), Candidate("pool", 500)], num_empty_blocks=100)
    instance.limit_s = COST_MODEL.predict(instance.budget().shape.plus(400, 0)).seconds
    assert best(instance) == {"pool": 400}
    instance.limit_s *= 2
    assert best(instance) == {"decode": 1, "pool": 500}


def test_the_solver_starts_no_prompt_that_has_no_room() -> None:
    instance = Instance([Candidate("large", 200), Candidate("small", 100)], num_empty_blocks=12)
    instance.limit_s = 1.0
    assert best(instance) == {"small": 100}


def test_the_solver_cuts_a_prompt_at_the_steps_tokens() -> None:
    instance = Instance([Candidate("one", 1500), Candidate("other", 1600)], num_empty_blocks=1000)
    instance.limit_s = 10.0
    assert sum(best(instance).values()) == 2048


def test_a_decode_is_worth_its_part_of_a_full_step() -> None:
    step = COST_MODEL.predict(Instance([], 0).budget().shape.plus_decodes(256, 256 * 1001, 1001))
    assert decode_worth_s(1000) == pytest.approx(step.seconds / 256)


def test_the_policy_keeps_its_limits_and_is_never_better_than_the_best() -> None:
    rng = random.Random(1)
    for _ in range(30):
        instance = random_instance(rng)
        packed = instance.packed()
        assert packed is not None
        budget = instance.budget()
        for candidate, num_tokens in packed.items():
            assert budget.largest_chunk(num_tokens, candidate.context_tokens, instance.limit_s) == num_tokens
            budget.add(num_tokens, candidate.context_tokens)
        assert worth_s(packed) <= max(map(worth_s, instance.choices()), default=0.0) * (1 + 1e-9)


def test_the_gap_over_500_cases_is_as_documented() -> None:
    gap = measure(500)
    assert (gap.compared, gap.idle, gap.preempted) == (479, 21, 0)
    assert gap.mean_work == pytest.approx(0.9890, abs=5e-5)
    assert gap.mean_tokens == pytest.approx(0.9643, abs=5e-5)
    assert gap.most_work <= 1.0 + 1e-9
