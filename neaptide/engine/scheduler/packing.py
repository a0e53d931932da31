"""Packing one step: online first by deadline, then offline with what time and memory leave.

Sources of the order: BROS Algorithm 1 (slack-ordered packing), Echo section 4.1 (fill with offline work).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.draft import NO_HIT, PrefixHit
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import Tier
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.controller import OverrunController
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.offline_fill import OfflineFill
from neaptide.engine.scheduler.parts import Divisible
from neaptide.engine.scheduler.queues import OnlineOrder, Reservation, deadline_order, streams_first
from neaptide.engine.scheduler.residual import Residual, usual_step
from neaptide.engine.scheduler.slack import SlackTracker, StepBounds
from neaptide.engine.steps.step import Step

LOOK_AHEAD = 64
"""Waiting online requests that one step looks at: planning stays short however long the queue is."""
LATE_PATIENCE_TARGETS, STREAM_PATIENCE_TARGETS, LONGEST_TARGET_S = 9.0, 1.0, 3.0
"""So many of its TTFT targets a relegated prompt finds no memory or no seat before both are kept for it, in one more
target all that it needs; a stream that was pushed out in the middle of its answer and is late not so long, for somebody
reads it. A target counts as the server's if it is shorter, for none should get room sooner by asking for what cannot
be, and as the third if it is longer ..."""
LATE_SHARE = 0.1
"""... and nothing is kept in more than this part of the time: what one late prompt gets, others have to wait for, and
those may be late for it."""


@dataclass(slots=True)
class Notes:
    """What a draft is remembered by."""

    lacking: Request | None = None
    """The first of the relegated requests that found no memory or no seat, a stream if there is one."""
    passed: list[Request] | None = None
    """See ``OfflineFill.fill``."""


class NeaptideScheduler(Scheduler, Divisible):
    """Our policy."""

    online_order: ClassVar[OnlineOrder] = staticmethod(streams_first)
    publishes_when_planned: ClassVar[bool] = True
    follows_prefixes: ClassVar[bool] = True
    has_shares: ClassVar[bool] = True
    server_order: ClassVar[str | None] = "ends"
    evicts_by_reuse: ClassVar[bool] = True
    abortable_steps: ClassVar[bool] = True

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
        self._late = Reservation()
        """Of a relegated request."""
        self._next_late_s = 0.0
        """When the next one may begin to grow."""
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

    def remember(self, draft: Draft) -> None:
        notes: Notes = draft.notes or Notes()  # nothing was packed in a step that only drops requests
        if notes.passed is not None:
            self._fill.remember(draft, notes.passed)
        late, now_s = self._late, draft.now_s
        if late.holder is not None and _has_begun(late.holder):
            rest_s = late.stood_s(now_s) * (1.0 / LATE_SHARE - 1.0)
            self._next_late_s = max(self._next_late_s, now_s + rest_s)
            late.holder = None
        if late.holder is None and (lacking := notes.lacking) is not None:
            num_targets = STREAM_PATIENCE_TARGETS if lacking.num_output_tokens else LATE_PATIENCE_TARGETS
            target_s = min(max(lacking.ttft_slo_s, self.config.ttft_slo_s), LONGEST_TARGET_S)
            late.begin(lacking, max(now_s + num_targets * target_s, self._next_late_s), target_s)

    def pack(self, draft: Draft) -> float:
        notes = draft.notes = Notes()
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
            notes.passed = self._fill.fill(draft, min(draft.bounds_s.values()) * factor)
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
        ends_s, _ = self._pack_prompts(draft, feasible, bounds.prompts_s, reserved)
        limit_s = min(bounds.pace_s, bounds.late_prompts_s)
        ends_s, lacking = self._pack_prompts(draft, relegated, limit_s, 0, ends_s)
        if lacking is not None:  # none behind it was admitted
            streams = (r for r in relegated if r.num_output_tokens and not draft.is_running(r))
            draft.notes.lacking = next(streams, lacking)
        return ends_s

    def _pack_prompts(
        self, draft: Draft, prompts: list[Request], limit_s: float, reserved: int, ends_s: float = math.inf
    ) -> tuple[float, Request | None]:
        """Chunks as large as the limit and the tokens allow, leaving ``reserved`` tokens of the step.

        The first one always gets a block's worth: streams that fill the whole bound must not starve it. Once one finds
        no seat or no memory no other is admitted, but those that run go on: they hold what it waits for. What comes
        behind a prompt that ends must not make its first token late, not with that block either, which may be as long
        as a prompt: returns how long the step may take for that, ``ends_s`` being for those that are in it; and the
        first that found no seat or no memory.
        """
        floor, can_admit = draft.kv.block_size, True
        lacking: Request | None = None
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
                is_scheduled = self._room_to_grow(draft, request, chunk)
                if is_scheduled:
                    draft.add(request, chunk)
            else:
                is_scheduled = can_admit = self._admit_online(draft, request, hit, chunk)
            if is_scheduled:
                floor = 0
                if chunk == left:
                    ends_s = min(ends_s, self._until_due_s(draft, request))
            elif lacking is None:
                lacking = request
        return ends_s, lacking

    def _beside_others(
        self, draft: Draft, request: Request, left: int, context: int, ends_s: float, num_swapped: int
    ) -> int:
        """All that is left of a short prompt, if it still is in time so, as what ends in this step is; else 0.

        The streams' pace would put it off to a step of its own, but two such steps take longer than one for both, and
        streams get no more tokens in the time.
        """
        due_s = request.next_deadline_s - self.config.delivery_latency_s - draft.now_s
        chunk = draft.budget.largest_chunk(left, context, min(ends_s, due_s), num_swapped)
        return chunk if chunk == left else 0

    def _until_due_s(self, draft: Draft, request: Request) -> float:
        """How long the step may take so that the request's token is in time: no longer than it does now if it will only
        be without the margin, and infinite if it is late already."""
        due_s = request.next_deadline_s - self.config.delivery_latency_s - draft.now_s
        seconds, margin_s = draft.budget.predict_with(0)
        return max(due_s, seconds + margin_s) if seconds <= due_s else math.inf

    def _waiting_prompts(self, draft: Draft, bounds: StepBounds) -> tuple[list[Request], list[Request]]:
        """Online requests with prompt left: feasible ones by deadline, relegated ones oldest first, ``priority``
        last, but before all the one for which room is kept. A bounded look: what stands further back than
        ``LOOK_AHEAD`` is not for this step."""
        waiting, prompts = draft.waiting_online, draft.prompts(online=True)
        if not waiting and not prompts:
            return [], []
        if not self._relegates:
            return sorted(prompts + waiting[:LOOK_AHEAD], key=deadline_order), []
        feasible: list[Request] = []
        relegated, in_time = _by_lateness(waiting, draft.now_s)
        ahead = sorted(prompts + in_time, key=deadline_order)
        for request, can_make_it in zip(ahead, self.slack.feasible(draft, ahead, bounds.pace_s), strict=True):
            (feasible if can_make_it or request.num_output_tokens else relegated).append(request)
        relegated.sort(key=lambda r: (r.tier is Tier.PRIORITY, r.arrival_s))
        holder = self._holder(draft)
        if holder in relegated or (holder is not None and not draft.is_running(holder) and holder not in feasible):
            relegated = [holder, *(request for request in relegated if request is not holder)]
        return feasible, relegated

    def _holder(self, draft: Draft) -> Request | None:
        """The relegated request for which something is kept in this step, if there is one."""
        holder = self._late.holder
        if holder is None or holder.status is RequestStatus.FINISHED or not self._late.part(draft.now_s):
            return None
        return holder

    def _leaves_claim(self, draft: Draft, request: Request, num_blocks: int) -> bool:
        """Whether what is kept for a relegated request is still there for it with this one admitted, which takes so
        many blocks and a seat. Once it has begun, only what it can take in a step is kept."""
        holder = self._holder(draft)
        if holder is None or request is holder or request.num_output_tokens:
            return True
        part, kv = self._late.part(draft.now_s), draft.kv
        if is_running := draft.is_running(holder):
            num_tokens = min(kv.num_uncomputed(holder), self.config.max_num_batched_tokens)
            needed = kv.blocks_needed(holder, num_tokens)
        else:
            needed = kv.admission_cost(NO_HIT, holder.num_known_tokens)
        num_slots = draft.num_running - draft.num_running_offline + 1 + (int(part) if not is_running else 0)
        left = kv.available + kv.pool.num_offline - num_blocks
        kept = draft.kept_blocks[holder.request_id] = int(needed * part)
        return num_slots <= self.config.max_num_seqs and kept <= left

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
        if not self._leaves_claim(draft, request, cost):
            return False
        slots = max(draft.num_running - self.config.max_num_seqs + 1, 0)
        if not draft.make_room(cost, draft.offline_victims(), keep=set(hit.block_ids), slots=slots):
            return False
        draft.admit(request, hit, chunk)
        return True

    def _unfinished_prompts(self, draft: Draft) -> list[Request]:
        """Online requests with prompt left after this step, in deadline order."""
        waiting, unfinished = draft.waiting_online, draft.unfinished_prompts(online=True)
        if waiting:
            unfinished += _by_lateness(waiting, draft.now_s)[1]
        return sorted(unfinished, key=deadline_order) if unfinished else []


def _by_lateness(waiting: list[Request], now_s: float) -> tuple[list[Request], list[Request]]:
    """Those whose next token is late, and the others: the first of each, but all that were pushed out of their answer,
    which stand first."""
    num_streams = bisect_left(waiting, True, key=lambda r: not r.num_output_tokens)
    num_late = bisect_left(waiting, now_s, 0, num_streams, key=lambda r: r.next_deadline_s)
    first = bisect_left(waiting, now_s, num_streams, key=lambda r: r.next_deadline_s)
    late = waiting[:num_late] + waiting[num_streams:first][:LOOK_AHEAD]
    return late, waiting[num_late:num_streams] + waiting[first : first + LOOK_AHEAD]


def _has_begun(request: Request) -> bool:
    """Whether a request for which room was kept needs no more of it: all that it lacked is computed or planned."""
    if request.status is RequestStatus.RUNNING:
        return request.num_uncomputed_tokens <= 1
    return request.status is RequestStatus.FINISHED
