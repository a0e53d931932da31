"""Plans a step for vLLM with Neaptide's judgement: the policy of docs/scheduling.md on vLLM's requests."""

import math
from collections.abc import Callable, Container, Sequence

from msgspec import structs

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.judgement import Judgement, PendingPrompt
from neaptide.engine.scheduler.prompts import PACE, Company, LateCredit, PromptChunks, Unfinished, unfinished_s
from neaptide.engine.scheduler.traffic import RecentTraffic
from neaptide_vllm.scheduling.online import Online
from neaptide_vllm.scheduling.step import Step

LOOK_AHEAD = 64
"""Waiting online prompts that one step looks at, late ones and others each."""
LOOK_UPS = 8
"""Waiting prompts that are looked up in the prefix cache in one step."""


class Planner:
    """Decides what each request may compute. Reads no clock.

    Args:
        cached_tokens: tokens of a waiting prompt that the prefix cache has.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel, cached_tokens: Callable[[Online], int]) -> None:
        self._cost_model, self._cached_tokens = cost_model, cached_tokens
        self.config = config
        self.traffic = RecentTraffic(config, cost_model)
        self._late_credit = LateCredit()
        self._last_granted: dict[str, int] = {}
        """Number of the step that scheduled a running offline request last."""
        self._index = 0

    def set_targets(self, ttft_slo_s: float, tpot_slo_s: float) -> None:
        """Replaces the default targets."""
        self.config = structs.replace(self.config, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        self.traffic.config = self.config

    def plan(self, step: Step, waiting: Sequence[Online], has_offline: bool) -> list[Online]:
        """Fills the step. Returns the waiting online requests that are granted tokens, in order of admission."""
        self._index += 1
        self.traffic.begin()
        judgement = Judgement(step, self.config, self._cost_model, self.traffic)
        step.add_online_decodes()
        step.mark("streams")
        chunks = PromptChunks(step.budget, step.block_size, step.now_s, self.config.delivery_latency_s)
        in_time, named = self._plan_prompts(step, waiting, judgement, chunks)
        step.mark("prompts")
        if has_offline:
            self._plan_offline(step, judgement, in_time, chunks)
        return named

    def _plan_prompts(
        self, step: Step, waiting: Sequence[Online], judgement: Judgement, chunks: PromptChunks
    ) -> tuple[list[PendingPrompt[Online]], list[Online]]:
        """Grants online prompts their chunks. Returns those that can be in time, and waiting ones with a grant."""
        if not waiting and not step.online_prompts:
            return [], []
        now_s = step.now_s
        late, in_time = _by_lateness(waiting, now_s)
        self._look_up(step, in_time + late[:1])
        running = {online.request.request_id for online in step.online_prompts}
        company = judgement.company()
        for online in step.online_prompts:
            if not online.num_output_tokens:
                company.join(online.request.num_tokens, online.tpot_slo_s)
            is_late = online.next_deadline_s < now_s and not online.num_output_tokens
            (late if is_late else in_time).append(online)
        in_time.sort(key=lambda online: online.next_deadline_s)
        first_late = min(late, key=_oldest, default=None)
        pending = {online: _pending(online, online.request.request_id in running) for online in in_time + late}
        choice = judgement.choose(
            step, [pending[online] for online in in_time], pending[first_late] if first_late else None
        )
        late = sorted(late + choice.late, key=_oldest)
        limit_s, late_s = choice.limit_s, 0.0
        order: list[Online] = []

        def grant(prompts: Sequence[Online], limit_s: float, needs_room: bool = True) -> None:
            due = [pending[online] for online in prompts if online not in order]
            order.extend(_grant(step, due, limit_s, chunks, running, company, needs_room))

        if late and self._late_credit:
            before_s = step.budget.prediction.seconds
            grant(late[:1], limit_s, needs_room=False)
            late_s = step.budget.prediction.seconds - before_s
        grant(choice.in_time, limit_s)
        late_limit_s = min(limit_s, PACE * judgement.tpot_slo_s) if judgement.has_streams else limit_s
        grant(late, late_limit_s)
        self._late_credit.observe(bool(late), step.budget.prediction.seconds, late_s)
        for online in pending:
            step.grants.setdefault(online.request.request_id, 0)
        return [pending[online] for online in choice.in_time], [
            online for online in order if online.request.request_id not in running
        ]

    def _look_up(self, step: Step, waiting: Sequence[Online]) -> None:
        """Looks up what the cache has of the first waiting prompts, again after half of a TTFT target."""
        due = [online for online in waiting if step.now_s >= online.looked_up_s + 0.5 * online.ttft_slo_s]
        for online in due[:LOOK_UPS]:
            online.cached_tokens, online.looked_up_s = self._cached_tokens(online), step.now_s

    def _plan_offline(
        self, step: Step, judgement: Judgement, in_time: Sequence[PendingPrompt[Online]], chunks: PromptChunks
    ) -> None:
        """Grants running offline requests what online work leaves, and sets the limit for those to be admitted."""
        if step.budget.tokens_left <= 0:
            return
        left: list[Unfinished] = []
        for online, num_tokens, context_tokens in in_time:
            granted = step.grants[online.request.request_id]
            if num_tokens > granted:
                left.append(Unfinished(num_tokens - granted, context_tokens + granted, online.next_deadline_s))
        due_s, ahead_s = unfinished_s(left, self._cost_model, step.now_s, self.config.delivery_latency_s)
        length_s = judgement.offline_length_s(step, chunks.first_tokens_s + due_s, ahead_s)
        step.offline_limit_s = limit_s = step.budget.with_margin_s(length_s)
        step.budget.expected_limit_s = length_s
        all_fit = step.add_offline_decodes(limit_s, self._last_granted)
        if all_fit:
            for request in sorted(step.offline_prompts, key=lambda each: self._last_granted.get(each.request_id, -1)):
                computed = request.num_computed_tokens
                chunk = step.offline_chunk(request.num_tokens - computed, computed)
                if not chunk:
                    all_fit = False
                    break
                step.add(request, chunk, computed)
        if not all_fit:
            step.offline_limit_s = -math.inf
        self._last_granted.update(dict.fromkeys(step.granted_offline(), self._index))

    def forget(self, request_id: str) -> None:
        """An offline request ended."""
        self._last_granted.pop(request_id, None)


def _grant(
    step: Step,
    prompts: Sequence[PendingPrompt[Online]],
    limit_s: float,
    chunks: PromptChunks,
    running: Container[str],
    company: Company,
    needs_room: bool,
) -> list[Online]:
    """Grants prompts their chunks in order until one gets none. Returns those that got one.

    A waiting one without room in the company is passed by.
    """
    granted: list[Online] = []
    for online, left_tokens, context_tokens in prompts:
        request = online.request
        is_waiting = request.request_id not in running
        if is_waiting and needs_room and not company.has_room(request.num_tokens):
            continue
        chunk = chunks.size(left_tokens, context_tokens, limit_s)
        if not chunk:
            break
        step.add(request, chunk, context_tokens)
        granted.append(online)
        if is_waiting:
            company.join(request.num_tokens, online.tpot_slo_s)
        if chunk == left_tokens:
            chunks.ended(online.next_deadline_s)
    return granted


def _pending(online: Online, is_running: bool) -> PendingPrompt[Online]:
    request = online.request
    context = request.num_computed_tokens if is_running else online.cached_tokens
    return PendingPrompt(online, max(request.num_tokens - context, 1), context)


def _by_lateness(waiting: Sequence[Online], now_s: float) -> tuple[list[Online], list[Online]]:
    """The first that are late, and the first of the others. Preempted streams are never left out."""
    late: list[Online] = []
    in_time: list[Online] = []
    for online in waiting:
        found = late if online.next_deadline_s < now_s else in_time
        if len(found) < LOOK_AHEAD or online.num_output_tokens:
            found.append(online)
        elif found is in_time:  # they stand in order of deadlines: all that follow are in time too
            break
    return late, in_time


def _oldest(online: Online) -> tuple[bool, float]:
    """Sort key of late requests: those preempted amid their answers first, then the oldest."""
    return (not online.num_output_tokens, online.arrival_s)
