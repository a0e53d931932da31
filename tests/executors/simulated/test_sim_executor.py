from neaptide.engine.clock import VirtualClock
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimExecutor


def plan(step: int, position: int, *, new: bool) -> StepPlan:
    part = ScheduledRequest("a", [7], 4 + position, [0, 1], True, position)
    news = [NewRequest("a", [7, 8, 9, 7, 7], SamplingParams())] if new else []
    return StepPlan.of_parts(step, [part], news)


def test_a_step_ends_when_the_cost_model_says_and_tokens_repeat() -> None:
    clock = VirtualClock(10.0)
    tokens = []
    for _ in range(2):
        executor = SimExecutor(8, ConstantCostModel(0.5), clock, vocab_size=100)
        tokens.append([executor.submit(plan(i, i, new=i == 0)).wait().token_ids.item() for i in range(4)])
    assert clock.now() == 14.0
    assert tokens[0] == tokens[1]
    assert all(6 <= token < 100 for token in tokens[0])


def test_finished_requests_are_forgotten() -> None:
    executor = SimExecutor(8, ConstantCostModel(0.5), VirtualClock(), vocab_size=100)
    executor.submit(plan(0, 0, new=True)).wait()
    executor.submit(StepPlan.of_parts(1, [], finished_ids=["a"])).wait()
    assert executor.known_requests == frozenset()
