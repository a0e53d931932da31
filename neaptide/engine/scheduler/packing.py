"""Packing one step: online first by deadline, then offline with what time and memory leave.

Sources of the order: BROS Algorithm 1 (slack-ordered packing), Echo section 4.1 (fill with offline work).
"""

from bisect import bisect_left
from collections.abc import Iterator

from neaptide.engine.batch import StepPlan
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager, PrefixHit
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.controller import OverrunController
from neaptide.engine.scheduler.offline_fill import OfflineFill
from neaptide.engine.scheduler.queues import deadline_order
from neaptide.engine.scheduler.slack import SlackTracker
from neaptide.engine.scheduler.step import StepBuilder

LOOK_AHEAD = 64
"""Waiting online requests that one step looks at: planning stays short however long the queue is."""


class NeaptideScheduler(Scheduler):
    """Our policy."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.controller = OverrunController()
        self.slack = SlackTracker(config, cost_model)
        self._fill = OfflineFill(config, headroom)

    def observe_arrival(self, request: Request) -> None:
        super().observe_arrival(request)
        self.slack.observe_arrival(request)

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        if plan.budget_s and self.last is not None and self.last.has_offline:
            self.controller.observe(seconds, plan.budget_s)

    def _pack(self, step: StepBuilder) -> float:
        now_s = step.now_s
        bounds = self.slack.bounds(now_s, self.queues.running_online.values())
        self._pack_online_decodes(step)
        self._pack_online_prefills(step, bounds.itl_s)
        step.at = None
        prefill_slack_s = self.slack.prefill_slack_s(now_s, self._unfinished_prompts(step))
        limit_s = min(bounds.itl_s, bounds.slack_s, bounds.idle_s, prefill_slack_s) * self.controller.factor
        if not self.offline_paused:
            self._fill.fill(step, limit_s)
        return limit_s

    def _pack_online_decodes(self, step: StepBuilder) -> None:
        for request in sorted(self.queues.running_online.values(), key=deadline_order):
            step.at = request
            is_decode = request.request_id in self.queues.running_online and request.num_uncomputed_tokens == 1
            if is_decode and step.budget.tokens_left > 0 and self._room_to_grow(step, request, 1):
                step.add(request, 1)
        step.at = None

    def _pack_online_prefills(self, step: StepBuilder, limit_s: float) -> None:
        """Prompts that can still make their deadline, then the relegated ones with at least a tenth of the tokens.

        Serving the latest first is how earliest-deadline-first collapses under overload.
        """
        feasible, relegated = self._waiting_prompts(step.now_s)
        reserved = step.budget.tokens_left // 10 if relegated else 0
        self._pack_prompts(step, feasible, limit_s, reserved)
        self._pack_prompts(step, relegated, limit_s, 0)

    def _pack_prompts(self, step: StepBuilder, prompts: list[Request], limit_s: float, reserved: int) -> None:
        """Chunks as large as the limit and the tokens allow, leaving ``reserved`` tokens of the step.

        The first one always gets a block's worth: streams that fill the whole bound must not starve it. Once one finds
        no seat or no memory no other is admitted, but those that run go on: they hold what it waits for.
        """
        floor, can_admit = step.queues.kv.block_size, True
        for request in prompts:
            is_running = request.request_id in self.queues.running_online
            if not is_running and not can_admit:
                continue
            step.at = request
            tokens_left = step.budget.tokens_left - reserved
            hit = PrefixHit([], 0) if is_running else self.queues.kv.match_prefix(request)
            context = request.num_computed_tokens if is_running else hit.num_tokens
            left = request.num_tokens - context
            most = min(left, tokens_left)
            chunk = max(step.budget.largest_chunk(most, context, limit_s), min(most, floor))
            if chunk <= 0:
                return
            if is_running:
                takes_part = self._room_to_grow(step, request, chunk)
                if takes_part:
                    step.add(request, chunk)
            else:
                takes_part = can_admit = self._admit_online(step, request, hit, chunk)
            if takes_part:
                floor = 0

    def _waiting_prompts(self, now_s: float) -> tuple[list[Request], list[Request]]:
        """Online requests with prompt left: feasible ones by deadline, relegated ones oldest first, ``priority``
        last. A bounded look: what stands further back than ``LOOK_AHEAD`` is not for this step."""
        waiting = self.queues.waiting_online
        first = bisect_left(waiting, now_s, key=lambda r: r.next_deadline_s)
        running = [r for r in self.queues.running_online.values() if r.num_uncomputed_tokens > 1]
        feasible: list[Request] = []
        relegated = waiting[:first][:LOOK_AHEAD]
        for request in sorted(running + waiting[first : first + LOOK_AHEAD], key=deadline_order):
            can_make_it = request.num_output_tokens > 0 or self.slack.is_feasible(request, now_s)
            (feasible if can_make_it else relegated).append(request)
        return feasible, sorted(relegated, key=lambda r: (r.tier is Tier.PRIORITY, r.arrival_s))

    def _room_to_grow(self, step: StepBuilder, request: Request, num_tokens: int) -> bool:
        needed = self.queues.kv.blocks_needed(request, num_tokens)
        if not needed or needed <= self.queues.kv.pool.num_available:
            return True

        def victims() -> Iterator[Request]:
            yield from self.preemptor.offline_victims(step.index)
            yield from self.preemptor.online_victims(request, step.index)

        return self.preemptor.make_room(needed, victims())

    def _admit_online(self, step: StepBuilder, request: Request, hit: PrefixHit, chunk: int) -> bool:
        cost = self.queues.kv.admission_cost(hit, request.num_tokens - hit.num_tokens)
        seats = max(self.queues.num_running - self.config.max_num_seqs + 1, 0)
        victims = self.preemptor.offline_victims(step.index)
        if not self.preemptor.make_room(cost, victims, keep=set(hit.block_ids), seats=seats):
            return False
        step.admit(request, hit, chunk)
        return True

    def _unfinished_prompts(self, step: StepBuilder) -> Iterator[Request]:
        taken = {r.request_id: n for r, n in step.scheduled}
        prompts = [
            r for r in self.queues.running_online.values() if r.num_uncomputed_tokens > taken.get(r.request_id, 1)
        ]
        waiting = self.queues.waiting_online
        first = bisect_left(waiting, step.now_s, key=lambda r: r.next_deadline_s)
        yield from sorted(prompts + waiting[first : first + LOOK_AHEAD], key=deadline_order)
