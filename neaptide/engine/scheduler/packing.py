"""Packing one step: online first by deadline, then offline with what time and memory leave.

Sources of the order: BROS Algorithm 1 (slack-ordered packing), Echo section 4.1 (fill with offline work).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import ClassVar

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.draft import NO_HIT, PrefixHit
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.controller import OverrunController
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.offline_fill import OfflineFill
from neaptide.engine.scheduler.parts import Divisible
from neaptide.engine.scheduler.queues import deadline_order
from neaptide.engine.scheduler.residual import Residual, usual_step
from neaptide.engine.scheduler.slack import SlackTracker, StepBounds
from neaptide.engine.steps.step import Step

LOOK_AHEAD = 64
"""Waiting online requests that one step looks at: planning stays short however long the queue is."""


class NeaptideScheduler(Scheduler, Divisible):
    """Our policy."""

    publishes_when_planned: ClassVar[bool] = True
    follows_prefixes: ClassVar[bool] = True
    has_shares: ClassVar[bool] = True
    server_order: ClassVar[str | None] = "ends"
    evicts_by_reuse: ClassVar[bool] = True
    gives_up_steps: ClassVar[bool] = True

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.controller = OverrunController()
        left_out = type(self).left_out
        self.slack = SlackTracker(config, cost_model, left_out)
        self._fill = OfflineFill(config, headroom, left_out)
        self._residual = Residual()
        self.queues.pool.looks_ahead = True
        self._controls, self._relegates = "controller" not in left_out, "relegation" not in left_out

    def observe_arrival(self, request: Request) -> None:
        super().observe_arrival(request)
        self.slack.observe_arrival(request)

    def forget(self, request: Request) -> None:
        if request.is_online:
            self.slack.observe_end(request)
        super().forget(request)

    def begin(self, now_s: float) -> None:
        super().begin(now_s)
        pool = self.queues.pool
        if pool.ends is not None:
            pool.begin_planned_step(self._fill.most_blocks_now(now_s, self.kv.num_blocks) * self.kv.block_size)
            left = pool.left()
            pool.target_density = self._residual.density(left.density)
            pool.usual_step = usual_step(left, pool.kv_tokens)

    def observe_step(self, step: Step, seconds: float) -> None:
        if (ends := self.queues.pool.ends) is not None:
            self._residual.observe(step, seconds, ends)
        self.slack.observe_dip(step.draft)
        if self._controls and step.plan.budget_s and step.draft.has_offline:
            self.controller.observe(seconds, step.draft.whole_limit_s)

    def _remember(self, draft: Draft) -> None:
        if draft.notes is not None:
            self._fill.remember(draft.notes, draft.now_s)

    def _pack(self, draft: Draft) -> float:
        bounds = self.slack.bounds(draft)
        self._pack_online_decodes(draft)
        first_tokens_s = self._pack_online_prefills(draft, bounds)
        draft.at = None
        prefill_slack_s = self.slack.prefill_slack_s(draft, self._unfinished_prompts(draft))
        draft.bounds_s = {
            "gap": bounds.itl_s,
            "streams": bounds.slack_s,
            "prompts": min(prefill_slack_s, first_tokens_s),
        }
        factor = self.controller.factor
        if not self.offline_paused:
            draft.budget.expected_limit_s = min(bounds.idle_s, bounds.worth_s) * factor
            self._fill.fill(draft, min(draft.bounds_s.values()) * factor)
            draft.budget.expected_limit_s = math.inf
        draft.bounds_s["next arrival"] = draft.budget.with_margin_s(bounds.idle_s)
        if bounds.worth_s < math.inf:
            draft.bounds_s["worth"] = draft.budget.with_margin_s(bounds.worth_s)
        draft.whole_limit_s = min(draft.bounds_s.values())
        return draft.whole_limit_s * factor

    def _pack_online_decodes(self, draft: Draft) -> None:
        rows, reads = draft.decoding_streams()
        draft.add_decodes(rows, lambda request: self._room_to_grow(draft, request, 1), draft.kv.available, reads)

    def _pack_online_prefills(self, draft: Draft, bounds: StepBounds) -> float:
        """Prompts that can still make their deadline, then the relegated ones with at least a tenth of the tokens.

        Serving the latest first is how earliest-deadline-first collapses under overload. Returns how long the step may
        take for the sake of the first tokens that it brings.
        """
        feasible, relegated = self._waiting_prompts(draft, bounds)
        if not feasible and not relegated:
            return math.inf
        reserved = draft.budget.tokens_left // 10 if relegated else 0
        ends_s = self._pack_prompts(draft, feasible, bounds.prompts_s, reserved)
        return self._pack_prompts(draft, relegated, min(bounds.pace_s, bounds.late_prompts_s), 0, ends_s)

    def _pack_prompts(
        self, draft: Draft, prompts: list[Request], limit_s: float, reserved: int, ends_s: float = math.inf
    ) -> float:
        """Chunks as large as the limit and the tokens allow, leaving ``reserved`` tokens of the step.

        The first one always gets a block's worth: streams that fill the whole bound must not starve it. Once one finds
        no seat or no memory no other is admitted, but those that run go on: they hold what it waits for. What comes
        behind a prompt that ends must not make its first token late, not with that block either, which may be as long
        as a prompt: returns how long the step may take for that, ``ends_s`` being for those that are in it.
        """
        floor, can_admit = draft.kv.block_size, True
        for request in prompts:
            is_running = draft.is_running(request)
            if not is_running and not can_admit:
                continue
            draft.at = request
            tokens_left = draft.budget.tokens_left - reserved
            hit = NO_HIT if is_running else draft.kv.match_prefix(request)
            context = request.num_computed_tokens if is_running else hit.num_tokens
            left = (request.num_tokens if is_running else request.num_known_tokens) - context
            most = min(left, tokens_left)
            num_swapped = len(hit.host_hashes)
            chunk = draft.budget.largest_chunk(most, context, min(limit_s, ends_s), num_swapped)
            if chunk < (least := min(most, floor)):
                is_long_late = draft.now_s > request.next_deadline_s + request.ttft_slo_s
                chunk = least if is_long_late else draft.budget.largest_chunk(least, context, ends_s, num_swapped)
            if chunk < left <= min(most, draft.kv.block_size) and ends_s < math.inf:
                chunk = self._beside_others(draft, request, left, context, ends_s, num_swapped) or chunk
            if chunk <= 0:
                break
            if is_running:
                takes_part = self._room_to_grow(draft, request, chunk)
                if takes_part:
                    draft.add(request, chunk)
            else:
                takes_part = can_admit = self._admit_online(draft, request, hit, chunk)
            if takes_part:
                floor = 0
                if chunk == left:
                    ends_s = min(ends_s, self._until_due_s(draft, request))
        return ends_s

    def _beside_others(
        self, draft: Draft, request: Request, left: int, context: int, ends_s: float, num_swapped: int
    ) -> int:
        """All that is left of a short prompt, if it still is in time so, as what ends in this step is; else 0.

        The streams' pace would put it off to a step of its own, but two such steps take longer than one for both, and
        streams get no more tokens in the time.
        """
        due_s = request.next_deadline_s - self.config.egress_s - draft.now_s
        chunk = draft.budget.largest_chunk(left, context, min(ends_s, due_s), num_swapped)
        return chunk if chunk == left else 0

    def _until_due_s(self, draft: Draft, request: Request) -> float:
        """How long the step may take so that the request's token is in time; infinite if it is late already."""
        due_s = request.next_deadline_s - self.config.egress_s - draft.now_s
        return due_s if sum(draft.budget.predict_with(0)) <= due_s else math.inf

    def _waiting_prompts(self, draft: Draft, bounds: StepBounds) -> tuple[list[Request], list[Request]]:
        """Online requests with prompt left: feasible ones by deadline, relegated ones oldest first, ``priority``
        last. A bounded look: what stands further back than ``LOOK_AHEAD`` is not for this step."""
        waiting, prompts = draft.waiting_online, draft.prompts(online=True)
        if not waiting and not prompts:
            return [], []
        if not self._relegates:
            return sorted(prompts + waiting[:LOOK_AHEAD], key=deadline_order), []
        first = bisect_left(waiting, draft.now_s, key=lambda r: r.next_deadline_s)
        feasible: list[Request] = []
        relegated = waiting[:first][:LOOK_AHEAD]
        ahead = sorted(prompts + waiting[first : first + LOOK_AHEAD], key=deadline_order)
        for request, can_make_it in zip(ahead, self.slack.feasible(draft, ahead, bounds.pace_s), strict=True):
            (feasible if can_make_it or request.num_output_tokens else relegated).append(request)
        return feasible, sorted(relegated, key=lambda r: (r.tier is Tier.PRIORITY, r.arrival_s))

    def _room_to_grow(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        needed = draft.kv.blocks_needed(request, num_tokens)
        if not needed or draft.kv.fits(needed):
            return True

        def victims() -> Iterator[Request]:
            yield from draft.offline_victims()
            yield from draft.online_victims(request)

        return draft.make_room(needed, victims())

    def _admit_online(self, draft: Draft, request: Request, hit: PrefixHit, chunk: int) -> bool:
        cost = draft.kv.admission_cost(hit, request.num_known_tokens - hit.num_tokens)
        seats = max(draft.num_running - self.config.max_num_seqs + 1, 0)
        if not draft.make_room(cost, draft.offline_victims(), keep=set(hit.block_ids), seats=seats):
            return False
        draft.admit(request, hit, chunk)
        return True

    def _unfinished_prompts(self, draft: Draft) -> list[Request]:
        """Online requests with prompt left after this step, in deadline order."""
        waiting, unfinished = draft.waiting_online, draft.unfinished_prompts(online=True)
        if waiting:
            first = bisect_left(waiting, draft.now_s, key=lambda r: r.next_deadline_s)
            unfinished += waiting[first : first + LOOK_AHEAD]
        return sorted(unfinished, key=deadline_order) if unfinished else []
