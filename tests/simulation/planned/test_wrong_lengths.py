"""A plan by wrong lengths: what it costs when answers are three times as long as expected, or a third."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.estimator.recipes import roofline_recipe
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation import replica
from neaptide.simulation.pools.inline_planner import InlinePlanner
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import BASE, constant, profile

MOST_LOST = 0.05
"""Of the time that true lengths give."""
GROUPS = 6
"""With long answers, each with a prefix of its own, so that one may be judged right and another wrong."""


def scene(policy: str, scale: int) -> Scenario:
    """Prompts that want compute, and answers that want memory, in memory for a few of either."""
    rng = Random(0)
    dense = [((BASE + 1000 + k, rng.randrange(80, 120)),) for k in range(12 * scale)]
    long = [((BASE + k % GROUPS, 8), (BASE + 5000 + k, 4)) for k in range(10 * scale)]
    rows = [TraceRequest(0.0, segments, 2) for segments in dense]
    rows += [TraceRequest(0.0, segments, rng.randrange(60, 100)) for segments in long]
    rng.shuffle(rows)
    shape = profile(num_blocks=256)
    return replace(
        constant((), [OfflineSet("scene", rows, synthetic=True)]),
        profile=shape,
        policy=policy,
        plan=DUAL_SCAN if policy == "neaptide" else None,
        truth=None,
        cost_model=roofline_recipe(shape, 0.2),
        overlap_kappa=0.2,
        refill=False,
        max_num_batched_tokens=128,
        window_s=(0.0, 1e9),
        with_bounds=False,
    )


def makespan_s(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, factor: Callable[[int], float]) -> float:
    """With answers of the rows that are sampled taken to be so many times as long as they are."""

    class Misled(InlinePlanner):
        def __init__(self, *arguments: object) -> None:
            *others, output_tokens = arguments
            assert callable(output_tokens)

            def told(request_id: str) -> int:
                return max(round(output_tokens(request_id) * factor(int(request_id.partition(":")[2]))), 1)

            super().__init__(*others, told)  # type: ignore[arg-type]

    monkeypatch.setattr(replica, "InlinePlanner", Misled)
    found = simulate(scenario).result.offline.makespan_s
    assert found is not None
    return found


FACTORS = {
    "three times": lambda _: 3.0,
    "a third": lambda _: 1 / 3,
    "either": lambda number: 3.0 if number % 2 else 1 / 3,
}


@pytest.mark.parametrize("policy", ["neaptide"])
@pytest.mark.parametrize("scale", [4, pytest.param(40, marks=pytest.mark.full)])
def test_lengths_that_are_wrong_by_three_times_cost_little(
    policy: str, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = scene(policy, scale)
    right_s = makespan_s(monkeypatch, scenario, lambda _: 1.0)
    for name, factor in FACTORS.items():
        wrong_s = makespan_s(monkeypatch, scenario, factor)
        assert wrong_s <= (1.0 + MOST_LOST) * right_s, f"{name}: {wrong_s:.2f} s in place of {right_s:.2f}"
