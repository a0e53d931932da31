"""BROS's greedy packing against the exact solution of its equations (1)-(8)."""

import math
import random

import pytest

from lab.tests.policies.bros_ilp import Candidate, Instance, measure, num_best_effort, random_instance


def test_the_solver_leaves_out_an_rt_request_that_can_wait_and_a_be_prompt_that_costs_more_than_it_brings() -> None:
    instance = Instance(
        [
            Candidate("urgent", True, 1, 159, elapsed_s=0.15),
            Candidate("patient", True, 100, 0, elapsed_s=0.1),
            Candidate("resident", False, 1, 799, elapsed_s=0.0),
            Candidate("prompt", False, 512, 0, elapsed_s=0.0),
        ],
        batch_size=4,
        num_empty_blocks=1000,
        mean_step_s=0.04,
    )
    best = max(instance.feasible_batches(), key=instance.throughput)
    # urgent has 50 ms left and cannot wait 40 more; patient has 300. prompt would cost 51 ms.
    assert [c.request_id for c in best] == ["urgent", "resident"]
    # 15 ms + 2 decodes of 0.1 ms + 0.3 us for each of the 160 + 800 tokens read.
    assert instance.seconds(best) == pytest.approx(0.015 + 0.0002 + 0.000288)
    # The policy takes in what fits into the 50 ms: patient as well, 10 ms for its prompt.
    assert [c.request_id for c in instance.packed() or []] == ["urgent", "patient", "resident"]


def test_the_solver_knows_blocks_and_batch_size() -> None:
    residents = [Candidate(f"be{i}", False, 1, 800, elapsed_s=0.0) for i in range(4)]
    few_blocks = Instance(residents, batch_size=4, num_empty_blocks=2, mean_step_s=0.04)
    small_batch = Instance(residents, batch_size=3, num_empty_blocks=4, mean_step_s=0.04)
    assert max(map(num_best_effort, few_blocks.feasible_batches())) == 2
    assert max(map(num_best_effort, small_batch.feasible_batches())) == 3


@pytest.mark.parametrize("seed", range(5))
def test_what_the_policy_packs_is_within_every_bound_and_never_better_than_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        instance = random_instance(rng)
        packed = instance.packed()
        if packed is None:
            continue
        slacks = [c.remaining_s for c in instance.candidates if c.is_online and instance.seconds([c]) <= c.remaining_s]
        assert len(packed) <= instance.batch_size
        assert sum(c.num_blocks for c in packed) <= instance.num_empty_blocks
        assert instance.seconds(packed) <= min(slacks, default=math.inf) or len(packed) == 1
        if instance.is_feasible(packed):
            assert instance.throughput(packed) <= max(map(instance.throughput, instance.feasible_batches()))


@pytest.mark.full
def test_the_gap_is_as_documented() -> None:
    gap = measure(2_000)
    counts = (gap.infeasible, gap.dropped, gap.violated, gap.compared, gap.optimal, gap.as_many, gap.none)
    assert counts == (55, 224, 2, 1489, 314, 1276, 178)
    assert gap.mean_ratio == pytest.approx(0.6473, abs=5e-5)
    assert gap.max_ratio == 1.0
