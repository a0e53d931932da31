"""Requests that can no longer be in time: they wait behind the others, but the engine never stands still."""

import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.interfaces import Prediction
from neaptide.engine.params import FinishReason
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, online


class FiveMsAndOnePerToken:
    """Implements ``CostModel``."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.005 + 0.001 * shape.num_tokens, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


@pytest.mark.parametrize(
    ("num_blocks", "slots", "old_tokens", "late_slo_s"),
    [(400, 1, 60, 0.13), (40, 8, 150, 0.15)],
    ids=["one slot", "memory for one"],
)
def test_a_half_computed_prompt_goes_on_behind_an_older_one_that_waits_for_its_place(
    num_blocks: int, slots: int, old_tokens: int, late_slo_s: float
) -> None:
    # ``late`` starts while it can be in time; ``old`` never could. Then ``late`` is late as well, and ``old``, which
    # came first, stands before it and waits for what ``late`` holds.
    harness = Harness(num_blocks, FiveMsAndOnePerToken(), max_num_seqs=slots, max_num_batched_tokens=16)
    harness.core.handle(online("old", [7] * old_tokens, ttft_slo_s=0.01, tpot_slo_s=0.5))
    harness.core.handle(online("late", [8] * 120, arrival_s=0.0001, ttft_slo_s=late_slo_s, tpot_slo_s=0.5))
    steps = harness.run(max_steps=200)
    assert all(steps)
    assert harness.reason("old") is FinishReason.LENGTH
    assert harness.reason("late") is FinishReason.LENGTH


def test_a_half_computed_prompt_goes_on_behind_several_that_wait_for_memory() -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=16)
    harness.core.handle(online("running", [7] * 40, ttft_slo_s=9.0))
    assert harness.step() == {"running": 16}
    for name in ("first", "second"):  # each needs 9 of the 8 blocks that are left
        harness.core.handle(online(name, [8] * 36, ttft_slo_s=1.0))
    assert harness.step() == {"running": 16}


@pytest.mark.parametrize(
    ("first_slo_s", "step"), [(0.08, {"a": 1, "b": 32, "c": 32}), (0.06, {"a": 1, "b": 32, "c": 22})]
)
def test_a_short_prompt_shares_the_step_of_another_unless_that_would_be_late(
    first_slo_s: float, step: dict[str, int]
) -> None:
    """The stream's pace has no room for either. A step of both takes 70 ms, two of one each 76."""
    harness = Harness(cost_model=FiveMsAndOnePerToken(), cache=CacheConfig(block_size=32), delivery_latency_s=0.0)
    harness.core.handle(online("a", [7], max_tokens=50, tpot_slo_s=0.02, arrival_s=0.0))
    harness.step()
    now_s = harness.clock.now()
    harness.core.handle(online("b", [8] * 32, ttft_slo_s=first_slo_s, tpot_slo_s=0.02, arrival_s=now_s))
    harness.core.handle(online("c", [9] * 32, ttft_slo_s=0.2, tpot_slo_s=0.02, arrival_s=now_s))
    assert harness.step() == step
