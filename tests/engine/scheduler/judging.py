"""The judgement of an engine's state, on a draft that schedules nothing yet."""

from collections.abc import Collection, Sequence

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.judgement import Judgement
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.scheduler.traffic import RecentTraffic
from tests.engine.harness import Harness


def empty_draft(harness: Harness) -> Draft:
    scheduler = harness.core.scheduler
    budget = StepBudget(scheduler.cost_model, scheduler.max_step_tokens)
    return Draft(scheduler.index, harness.clock.now(), scheduler.queues, budget)


def judged(harness: Harness, left_out: Collection[str] = ()) -> Judgement:
    scheduler = harness.core.scheduler
    assert isinstance(scheduler, NeaptideScheduler)
    scheduler.traffic.begin()
    return Judgement(empty_draft(harness), scheduler.config, scheduler.cost_model, scheduler.traffic, left_out)


def request_of(name: str, num_tokens: int, num_output: int = 0, ttft_slo_s: float = 1.0, at_s: float = 0.0) -> Request:
    """A request that has put out so many tokens."""
    params = SamplingParams(max_tokens=10_000)
    request = Request(name, [7] * num_tokens, params, Tier.DEFAULT, at_s, ttft_slo_s, 1.0)
    request._output_token_ids = [8] * num_output
    return request


def traffic_of(model: CostModel, answers: Sequence[int] = (), **fields: object) -> RecentTraffic:
    """RecentTraffic in which answers of so many tokens have ended."""
    traffic = RecentTraffic(SchedulerConfig(**fields), model)  # type: ignore[arg-type]
    for index, num_output in enumerate(answers):
        traffic.observe_end(request_of(str(index), 1, num_output))
    return traffic
