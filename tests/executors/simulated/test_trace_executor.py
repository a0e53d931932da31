import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.trace_executor import END_TOKEN_ID, TraceExecutor


def executor(step_noise: float = 0.0, seed: int = 0) -> tuple[TraceExecutor, VirtualClock]:
    clock = VirtualClock()
    lengths = {"online": 2, "row": 3, "other": 3}
    made = TraceExecutor(
        8, ConstantCostModel(0.5), clock, lengths.__getitem__, lambda name: name == "online", step_noise, seed
    )
    return made, clock


def part(request_id: str, start: int, count: int, position: int | None) -> ScheduledRequest:
    """Computes ``count`` tokens on ``start``; samples the output token at ``position``."""
    return ScheduledRequest(request_id, [7] * count, start, [0], position is not None, position or 0)


def plan(*parts: ScheduledRequest, new: tuple[str, ...] = (), prompt_tokens: int = 10) -> StepPlan:
    news = [NewRequest(name, [7] * prompt_tokens, SamplingParams()) for name in new]
    return StepPlan.of_parts(1, parts, news)


def test_the_last_token_of_an_answer_is_the_end_token() -> None:
    engine, clock = executor()
    first = engine.submit(plan(part("online", 0, 10, 0), new=("online",))).wait()
    second = engine.submit(plan(part("online", 10, 1, 1))).wait()
    assert first.token_ids.tolist() != [END_TOKEN_ID]
    assert second.token_ids.tolist() == [END_TOKEN_ID]
    assert clock.now() == 1.0


def test_answers_of_two_requests_have_no_token_in_common() -> None:
    engine, _ = executor()
    result = engine.submit(plan(part("row", 0, 10, 0), part("other", 0, 10, 0), new=("row", "other"))).wait()
    row, other = result.token_ids.tolist()
    assert row != other


def test_prompt_tokens_count_once_cached_ones_included() -> None:
    engine, _ = executor()
    engine.submit(plan(part("row", 4, 3, None), new=("row",)))
    assert engine.tallies[1].offline_prompt_tokens == 7
    engine.submit(plan(part("row", 7, 3, 0)))
    assert (engine.tallies[1].offline_prompt_tokens, engine.tallies[1].offline_output_tokens) == (3, 1)
    engine.submit(plan(part("row", 10, 1, 1)))
    assert (engine.tallies[1].offline_prompt_tokens, engine.tallies[1].offline_output_tokens) == (0, 1)
    assert engine.tallies[1].again_tokens == 0


def test_after_a_preemption_only_new_tokens_count_and_the_others_are_waste() -> None:
    """11 tokens were computed; 4 are still cached, 8 are computed: 7 of them again."""
    engine, _ = executor()
    engine.submit(plan(part("row", 0, 10, 0), new=("row",)))
    engine.submit(plan(part("row", 10, 1, 1)))
    engine.submit(plan(part("row", 4, 8, 2)))
    assert engine.tallies[1].again_tokens == 7
    assert engine.tallies[1].offline_prefill_tokens == 7
    assert engine.tallies[1].offline_prompt_tokens == 0
    assert engine.tallies[1].offline_output_tokens == 1


def test_computed_prompt_tokens_count_even_one_by_one() -> None:
    engine, _ = executor()
    engine.submit(plan(part("row", 8, 1, None), new=("row",)))
    assert engine.tallies[1].offline_prefill_tokens == 1
    engine.submit(plan(part("row", 9, 1, 0)))
    assert engine.tallies[1].offline_prefill_tokens == 1
    engine.submit(plan(part("row", 10, 1, 1)))
    assert engine.tallies[1].offline_prefill_tokens == 0


def test_online_tokens_are_not_offline_tokens() -> None:
    engine, _ = executor()
    engine.submit(plan(part("online", 0, 10, 0), new=("online",)))
    assert (engine.tallies[1].offline_prompt_tokens, engine.tallies[1].offline_output_tokens) == (0, 0)
    assert engine.tallies[1].offline_prefill_tokens == 0


def test_noise_is_drawn_from_the_seed() -> None:
    times = []
    for seed in (1, 1, 2):
        engine, clock = executor(step_noise=0.1, seed=seed)
        engine.submit(plan(part("row", 0, 10, 0), new=("row",))).wait()
        times.append(clock.now())
    assert times[0] == times[1] != times[2]
    assert 0.3 < times[0] < 0.8


def test_noise_makes_steps_neither_longer_nor_shorter_on_average() -> None:
    engine, clock = executor(step_noise=0.5, seed=3)
    engine.submit(plan(part("row", 0, 10, 0), new=("row",))).wait()
    for position in range(1, 4000):
        engine.submit(plan(part("row", 9 + position, 1, position))).wait()
    assert clock.now() / 4000 == pytest.approx(0.5, rel=0.02)


def test_factors_that_are_given_take_the_place_of_noise() -> None:
    clock = VirtualClock()
    engine = TraceExecutor(
        8, ConstantCostModel(0.5), clock, {"row": 3}.__getitem__, lambda _: False, 0.3, step_factors=iter([1.0, 3.0])
    )
    engine.submit(plan(part("row", 0, 10, 0), new=("row",))).wait()
    assert clock.now() == 0.5
    engine.submit(plan(part("row", 10, 1, 1))).wait()
    assert clock.now() == 2.0
