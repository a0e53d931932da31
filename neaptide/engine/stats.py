"""Plain counters of one step; no Prometheus here."""

from neaptide.engine.batch import StepPlan, StepResult
from neaptide.engine.clock import Clock
from neaptide.engine.messages import StepStats
from neaptide.engine.scheduler.base import Scheduler


class StepTimer:
    """When the phases of a step ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start_s = clock.now()
        self.schedule_s = self.execute_s = self.commit_s = 0.0
        self.scheduled_at_s = self.executed_at_s = self._mark_s = self.start_s

    def scheduled(self) -> None:
        self.schedule_s = self._lap_s()
        self.scheduled_at_s = self._mark_s

    def executed(self) -> None:
        self.execute_s = self._lap_s()
        self.executed_at_s = self._mark_s

    def committed(self) -> None:
        self.commit_s = self._lap_s()

    @property
    def end_s(self) -> float:
        return self._mark_s

    def _lap_s(self) -> float:
        now_s = self._clock.now()
        lap_s, self._mark_s = now_s - self._mark_s, now_s
        return lap_s


def step_stats(plan: StepPlan, result: StepResult, timer: StepTimer, scheduler: Scheduler) -> StepStats:
    """Counters of the step that ``plan`` described; to be called after its commit."""
    step = scheduler.last
    assert step is not None
    online_tokens = online_decodes = 0
    for (request, num_tokens), part in zip(step.scheduled, plan.scheduled, strict=True):
        if request.is_online:
            online_tokens += num_tokens
            online_decodes += num_tokens == 1 and part.num_computed_tokens > 0
    offline_decodes = plan.shape.decode_requests - online_decodes
    queues, pool = scheduler.queues, scheduler.queues.kv.pool
    preempted = scheduler.take_preemptions()
    return StepStats(
        step=plan.step,
        now_s=timer.end_s,
        duration_s=timer.execute_s,
        predicted_s=plan.predicted_s,
        margin_s=plan.margin_s,
        budget_s=plan.budget_s,
        schedule_s=timer.schedule_s,
        prepare_s=result.prepare_s,
        model_s=result.model_s,
        sample_s=result.sample_s,
        commit_s=timer.commit_s,
        online_prefill_tokens=online_tokens - online_decodes,
        online_decode_tokens=online_decodes,
        offline_prefill_tokens=plan.shape.num_tokens - online_tokens - offline_decodes,
        offline_decode_tokens=offline_decodes,
        running_online=len(queues.running_online),
        running_offline=len(queues.running_offline),
        waiting_online=len(queues.waiting_online),
        waiting_offline=len(queues.pool),
        blocks_free=pool.num_free,
        blocks_cached=pool.num_cached,
        blocks_online=pool.num_online,
        blocks_offline=pool.num_offline,
        cached_tokens=step.cached_tokens,
        admitted_prompt_tokens=step.admitted_prompt_tokens,
        online_cached_tokens=step.online_cached_tokens,
        online_admitted_prompt_tokens=step.online_admitted_prompt_tokens,
        preempted_online=preempted.online,
        preempted_offline=preempted.offline,
        recomputed_tokens=preempted.recomputed_tokens,
    )
