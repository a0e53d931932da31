"""What waits for a mask does not keep others waiting: put off, expected, and not held against anybody."""

import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.scheduler.base import LEAST_MASK_WAIT_S, MASK_SHARE
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimHandle
from tests.engine.harness import Harness, flex, online

STEP_S = 0.01


class Observed(ConstantCostModel):
    def __init__(self) -> None:
        super().__init__(STEP_S)
        self.seconds: list[float] = []

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self.seconds.append(seconds)


class Late:
    """A harness whose executor has no masks for some requests, and waits for them."""

    def __init__(self, **scheduler: object) -> None:
        self.model = Observed()
        self.harness = Harness(cost_model=self.model, **scheduler)
        self.late_s: dict[str, float] = {}
        self.wait_s = 0.0
        self.plans: list[StepPlan] = []
        submit = self.harness.executor.submit

        def submit_late(plan: StepPlan) -> SimHandle:
            handle = submit(plan)
            self.plans.append(plan)
            handle.result.late = {name: self.late_s[name] for name in plan.request_ids if name in self.late_s}
            handle.result.mask_s = self.wait_s
            return SimHandle(handle.clock, handle.end_s + self.wait_s, handle.result)

        self.harness.executor.submit = submit_late  # type: ignore[method-assign]


@pytest.mark.parametrize("message", [online, flex])
def test_a_request_without_a_mask_stays_away_and_the_others_go_on(message: object) -> None:
    late = Late()
    late.late_s = {"bound": 2.5 * STEP_S}
    for name in ("bound", "free"):
        late.harness.core.handle(message(name, [1, 2, 3], max_tokens=8))  # type: ignore[operator]
    steps = [late.harness.step() for _ in range(7)]
    # Its mask is there in the middle of the fourth: it takes part in the next.
    assert [step.get("bound") for step in steps] == [3, None, None, None, 1, None, None]
    assert all("free" in step for step in steps)
    assert late.harness.tokens["bound"] == []
    late.late_s = {}
    late.harness.run()
    assert [len(late.harness.tokens[name]) for name in ("bound", "free")] == [8, 8]


def test_a_stream_that_was_put_off_is_due_as_much_later() -> None:
    late = Late()
    late.harness.core.handle(online("bound", [1, 2, 3], max_tokens=8, tpot_slo_s=0.05))
    late.harness.step()
    (request,) = late.harness.core.scheduler.queues.running_online.values()
    due_s = request.next_deadline_s
    late.late_s = {"bound": 0.3}
    late.harness.step()
    assert request.next_deadline_s == pytest.approx(due_s + 0.3)
    table = late.harness.core.scheduler.queues.table
    assert table.next_deadline_s(table.live.nonzero()[0]).tolist() == [request.next_deadline_s]


def test_a_stream_whose_masks_take_longer_than_its_target_is_never_late() -> None:
    late = Late()
    late.harness.core.handle(online("bound", [1, 2, 3], max_tokens=8, tpot_slo_s=0.05))
    late.harness.step()
    (request,) = late.harness.core.scheduler.queues.running_online.values()
    late.harness.clock.sleep_until(2.0)  # the device waited for its mask
    late.late_s = {"bound": 0.3}
    late.harness.step()
    assert request.next_deadline_s == pytest.approx(late.harness.clock.now() + 0.3)


def test_what_steps_wait_for_masks_is_expected_and_forgotten() -> None:
    late = Late()
    late.wait_s = 0.004
    late.harness.core.handle(online("bound", [1, 2, 3], max_tokens=200))
    for _ in range(60):
        late.harness.step()
    assert late.plans[0].predicted_s == STEP_S
    assert late.plans[-1].predicted_s == pytest.approx(STEP_S + 0.004, rel=1e-3)
    assert late.model.seconds == pytest.approx([STEP_S] * 60)  # the device's part alone is learnt from
    late.wait_s = 0.0
    for _ in range(60):
        late.harness.step()
    assert late.plans[-1].predicted_s == STEP_S
    assert late.harness.core.scheduler.mask_wait_s == 0.0 < LEAST_MASK_WAIT_S


def test_the_wait_is_part_of_what_a_step_may_take() -> None:
    """Offline prompts get as much less of a step."""

    class PerToken(ConstantCostModel):
        def predict(self, shape: BatchShape) -> Prediction:
            return Prediction(1e-4 * shape.num_tokens, 0.0)

    chunks = []
    for wait_s in (0.0, 0.01):
        harness = Harness(512, cost_model=PerToken(0.0), ttft_slo_s=0.1, tpot_slo_s=0.05, max_num_batched_tokens=2048)
        harness.core.scheduler.mask_wait_s = wait_s
        harness.core.handle(flex("offline", list(range(1500)), max_tokens=2))
        chunks.append(harness.step()["offline"])
    assert chunks[0] - chunks[1] == pytest.approx(0.01 / 1e-4, abs=2)


def test_a_step_is_told_how_long_it_may_wait() -> None:
    late = Late(tpot_slo_s=0.04)
    late.harness.core.handle(online("bound", [1, 2, 3], max_tokens=1))
    late.harness.step()
    assert late.plans[0].mask_limit_s == MASK_SHARE * 0.04
