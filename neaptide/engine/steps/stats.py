"""Counters of one step, without Prometheus."""

import numpy as np
from msgspec import structs

from neaptide.engine.messages import Occupancy, StepStats
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step


def occupancy(scheduler: Scheduler, now_s: float) -> Occupancy:
    """Running and waiting requests, and held blocks, at ``now_s``."""
    queues, blocks = scheduler.queues, scheduler.kv.occupancy()
    return Occupancy(
        running_online=len(queues.running_online),
        running_offline=len(queues.running_offline),
        waiting_online=len(queues.waiting_online),
        waiting_offline=len(queues.pool),
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_online=blocks.online,
        blocks_offline=blocks.offline,
        blocks_reserved=scheduler.headroom.headroom_blocks(now_s),
    )


def step_stats(step: Step, result: StepResult, scheduler: Scheduler) -> StepStats:
    """Counters of a step that was committed or aborted."""
    plan, timer = step.plan, step.timer
    counts = _counts(step)
    if result.is_aborted:
        counts = dict.fromkeys(counts, 0)
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
        saved_blocks=len(plan.saves),
        loaded_blocks=len(plan.loads),
        memory_ran_out=result.memory_ran_out,
        mask_s=result.mask_s,
        late_masks=len(result.late),
        grammar_bytes=result.grammar_bytes,
        is_aborted=result.is_aborted,
        **structs.asdict(occupancy(scheduler, timer.end_s)),
        **counts,
    )


def _counts(step: Step) -> dict[str, int]:
    """Tokens computed, requests admitted and preempted."""
    plan = step.plan
    online_tokens, online_decodes = 0, 0
    if np.count_nonzero(step.is_online):
        num_tokens, context = plan.num_tokens[step.is_online], plan.num_computed[step.is_online]
        online_tokens = int(num_tokens.sum())
        online_decodes = int(np.count_nonzero((num_tokens == 1) & (context > 0)))
    offline_decodes = plan.shape.decode_requests - online_decodes
    # Read at the commit, not at the admission: a hit on blocks of a failed request has been undone since.
    started_online = [request for request in step.started if request.is_online]
    return {
        "online_prefill_tokens": online_tokens - online_decodes,
        "online_decode_tokens": online_decodes,
        "offline_prefill_tokens": plan.shape.num_tokens - online_tokens - offline_decodes,
        "offline_decode_tokens": offline_decodes,
        "cached_tokens": sum(request.num_cached_tokens for request in step.started),
        "admitted_prompt_tokens": sum(request.num_prompt_tokens for request in step.started),
        "online_cached_tokens": sum(request.num_cached_tokens for request in started_online),
        "online_admitted_prompt_tokens": sum(request.num_prompt_tokens for request in started_online),
        "preempted_online": step.preempted.online,
        "preempted_offline": step.preempted.offline,
        "recomputed_tokens": step.recomputed_tokens,
        "dropped_tokens": step.preempted.dropped_tokens,
    }
