"""Random arrivals, aborts and preemptions on a pool that is far too small; integrity after every step."""

import random
from pathlib import Path

import pytest

from neaptide.engine.messages import AbortRequest, AddRequest, CancelBatch, PlanReady, SetOffline
from neaptide.engine.params import INTERNAL_ERROR, SamplingParams, Tier
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from tests.engine.harness import Harness, batch
from tests.engine.offline.planning.orders import plan, two_ends


def random_request(rng: random.Random, request_id: str, now_s: float) -> AddRequest:
    # Few distinct prefixes, so that blocks are shared, and prompts up to half of the pool.
    prefix = [rng.randrange(3)] * rng.choice([0, 4, 9, 16])
    prompt = prefix + [rng.randrange(6, 50) for _ in range(rng.randrange(1, 24))]
    params = SamplingParams(max_tokens=rng.choice([0, 1, 2, 5, 17, 30]))
    tier = rng.choice(list(Tier)[:3])
    return AddRequest(request_id, prompt, params, tier, now_s, rng.choice([0.01, 0.2, 1.0]), rng.choice([0.005, 0.05]))


def random_plan(rng: random.Random, jobs: list[str]) -> PlanReady:
    """Over some rows of some jobs, that may have ended or never have been; fewer than have two in a window."""
    rows = list(dict.fromkeys((rng.choice(jobs), rng.randrange(32)) for _ in range(40)))[:31]
    turns = rng.sample(range(len(rows)), len(rows))
    ends = two_ends([rng.randrange(30) for _ in rows], [rng.random() for _ in rows], 0.5, turns)
    return plan(*rows, ends=rng.choice([None, ends]))


def blast(seed: int, num_steps: int, tmp_path: Path, policy: str = "neaptide", plans: bool = False) -> Harness:
    """Returns the engine after everything has ended."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=24,
        cost_model=OnlineCostModel(RooflineModel.generic()),
        headroom_ratio=0.1,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        policy=policy,
    )
    accepted: set[str] = set()
    jobs: list[str] = []
    cancelled: set[str] = set()
    for index in range(num_steps):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 3]) if len(accepted) - len(harness.ends) < 40 else 0):
            request = random_request(rng, f"r{len(accepted)}", harness.clock.now())
            harness.core.handle(request)
            accepted.add(request.request_id)
        if index % 300 == 0:
            job = f"job{index}"
            shared = [rng.randrange(6, 8)] * rng.choice([16, 32]) if plans else []
            prompts = [shared + [rng.randrange(6, 9) for _ in range(rng.randrange(0, 40))] for _ in range(30)]
            harness.core.handle(batch(tmp_path, job, prompts, max_tokens=8))
            accepted |= {f"{job}:{row}" for row in range(30)}
            jobs.append(job)
        if rng.random() < 0.1 and accepted:
            harness.core.handle(AbortRequest([f"r{rng.randrange(len(accepted))}"]))
        if rng.random() < 0.003:
            job = rng.choice(jobs)
            cancelled.add(job)
            harness.core.handle(CancelBatch(job))
        if rng.random() < 0.02:
            harness.core.handle(SetOffline(rng.random() < 0.5))
        if plans and jobs and rng.random() < 0.05:
            harness.core.handle(random_plan(rng, jobs))
        harness.step()
        harness.clock.sleep_until(harness.clock.now() + rng.choice([0.0, 0.001]))
    harness.core.handle(SetOffline(False))
    harness.run()
    harness.core.handle(random_request(rng, "last", harness.clock.now()))  # its plan says which ended
    harness.run()
    started = {request_id for event, request_id in harness.log if event == "start"}
    # A cancelled job's rows that never started are forgotten without a word; everything else ends.
    forgotten = accepted - set(harness.ends)
    assert all(row.partition(":")[0] in cancelled and row not in started for row in forgotten)
    assert set(harness.ends) - {"last"} <= accepted
    assert harness.executor.known_requests <= {"last"}
    assert all(len(outputs) == 1 for outputs in harness.ends.values())
    assert not any(output.error == INTERNAL_ERROR for outputs in harness.ends.values() for output in outputs)
    pool = harness.core.kv.occupancy()
    assert pool.online + pool.offline == 0
    assert pool.free + pool.cached == harness.core.kv.num_blocks
    return harness


def num_preemptions(harness: Harness) -> int:
    return sum(output.num_preemptions for outputs in harness.ends.values() for output in outputs)


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(k, marks=pytest.mark.full) for k in (2, 3)]])
def test_every_accepted_request_ends_exactly_once(seed: int, tmp_path: Path) -> None:
    assert num_preemptions(blast(seed, 500, tmp_path)) > 0


@pytest.mark.parametrize("seed", [0, *[pytest.param(k, marks=pytest.mark.full) for k in (1, 2, 3)]])
def test_every_accepted_request_ends_exactly_once_while_plans_come_and_go(seed: int, tmp_path: Path) -> None:
    assert num_preemptions(blast(seed, 500, tmp_path, plans=True)) > 0


@pytest.mark.full
def test_every_accepted_request_ends_exactly_once_over_20000_steps(tmp_path: Path) -> None:
    assert num_preemptions(blast(99, 20_000, tmp_path)) > 0
