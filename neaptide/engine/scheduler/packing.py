"""Packing one step: online first by deadline, then offline with what time and memory leave.

Sources of the order: BROS Algorithm 1 (slack-ordered packing), Echo section 4.1 (fill with offline work).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.draft import NO_HIT, PrefixHit
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.growth import held_online, most_held_tokens
from neaptide.engine.scheduler.judgement import Judgement, PendingPrompt
from neaptide.engine.scheduler.offline_fill import OfflineFill
from neaptide.engine.scheduler.parts import Divisible
from neaptide.engine.scheduler.prompts import PACE, Company, LateCredit, PromptChunks, Unfinished, unfinished_s
from neaptide.engine.scheduler.queues import OnlineOrder, Reservation, deadline_order, streams_first
from neaptide.engine.scheduler.residual import Residual, usual_step
from neaptide.engine.scheduler.traffic import RecentTraffic
from neaptide.engine.steps.step import Step

LOOK_AHEAD = 64
"""Waiting online requests that one step looks at: planning stays short however long the queue is."""
LATE_PATIENCE_TARGETS, STREAM_PATIENCE_TARGETS, LONGEST_TARGET_S = 9.0, 1.0, 3.0
"""TTFT targets after which memory and a slot are reserved for a late prompt, and for a late stream that was preempted.

One target later all that it needs is reserved. A target counts as the server's if it is shorter, so that none gets room
sooner by asking for what cannot be. It counts as the third number, in seconds, if it is longer.
"""
LATE_SHARE = 0.1
"""Largest fraction of the time in which something is reserved: others wait for it, and may be late."""


LOOK_UPS = 8
"""Waiting prompts that are looked up in the cache in one step."""


@dataclass(slots=True)
class Notes:
    """What a draft is remembered by."""

    lacking: Request | None = None
    """The first late request that found no memory or no slot, a stream if there is one."""
    passed: list[Request] | None = None
    """See ``OfflineFill.fill``."""
    has_late: bool = False
    """Whether a prompt is late."""
    late_s: float = 0.0
    """Seconds of the step for the late prompt whose turn it is."""
    in_time: list[Request] = field(default_factory=list)
    """Prompts that can be in time."""
    first_tokens_s: list[float] = field(default_factory=list)
    """Seconds until each first token of the step is due."""


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
        self.traffic = RecentTraffic(config, cost_model)
        self._fill = OfflineFill(config, headroom, self._is_worth_evicting, type(self).left_out)
        self._late = Reservation()
        """Reservation for a late request."""
        self._next_late_s = 0.0
        """When the next one may begin to grow."""
        self._cached: dict[Request, tuple[int, float]] = {}
        """Cached tokens of waiting prompts, and the time until which they are taken for granted."""
        self._late_credit = LateCredit()
        self._residual = Residual()
        self.queues.pool.looks_ahead = True

    def observe_arrival(self, request: Request) -> None:
        super().observe_arrival(request)
        self.traffic.observe_arrival(request)

    def forget(self, request: Request) -> None:
        if request.is_online:
            self.traffic.observe_end(request)
            self._cached.pop(request, None)
        super().forget(request)

    def begin(self, now_s: float) -> None:
        super().begin(now_s)
        self.traffic.begin()
        self._look_up_prompts(now_s)
        pool = self.queues.pool
        if pool.ends is not None:
            pool.begin_planned_step(self._fill.most_blocks_now(now_s, self.kv.num_blocks) * self.kv.block_size)
            left = pool.left()
            pool.target_density = self._residual.density(left.density)
            pool.usual_step = usual_step(left, pool.kv_tokens)

    def _look_up_prompts(self, now_s: float) -> None:
        """Looks up what the cache has of the first waiting prompts, again after half of a TTFT target."""
        if not self.queues.waiting_online:
            return
        late, in_time = _by_lateness(self.queues.waiting_online, now_s)
        due = [each for each in in_time + late[:1] if now_s >= self._cached.get(each, (0, now_s))[1]]
        if due:
            kv = self.kv.draft()
            for request in due[:LOOK_UPS]:
                self._cached[request] = kv.match_prefix(request).num_tokens, now_s + 0.5 * request.ttft_slo_s

    def observe_step(self, step: Step, seconds: float) -> None:
        if (ends := self.queues.pool.ends) is not None:
            self._residual.observe(step, seconds, ends)

    def remember(self, draft: Draft) -> None:
        notes: Notes = draft.notes or Notes()  # nothing was packed in a step that only drops requests
        if notes.passed is not None:
            self._fill.remember(draft, notes.passed)
        for action in draft.actions:
            if isinstance(action, Admit) and action.request.is_online:
                self.traffic.observe_admission(action.request, action.request.num_known_tokens - action.hit.num_tokens)
        self._late_credit.observe(notes.has_late, draft.budget.prediction.seconds, notes.late_s)
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
        judgement = Judgement(draft, self.config, self.cost_model, self.traffic, type(self).left_out)
        self._pack_online_decodes(draft)
        self._pack_online_prompts(draft, judgement)
        draft.at = None
        if self.offline_paused:
            return math.inf
        length_s = draft.budget.prediction.seconds
        if draft.budget.tokens_left > 0:
            unfinished_s, ahead_s = self._unfinished_s(draft, notes.in_time)
            length_s = judgement.offline_length_s(draft, notes.first_tokens_s + unfinished_s, ahead_s)
        limit_s = draft.budget.with_margin_s(length_s)
        draft.budget.expected_limit_s = length_s
        notes.passed = self._fill.fill(draft, limit_s)
        draft.budget.expected_limit_s = math.inf
        return limit_s

    def _pack_online_decodes(self, draft: Draft) -> None:
        rows, reads = draft.decoding_streams()
        draft.add_decodes(rows, lambda request: self._room_to_grow(draft, request, 1), draft.kv.available, reads)

    def _pack_online_prompts(self, draft: Draft, judgement: Judgement) -> None:
        waiting, running = draft.waiting_online, draft.prompts(online=True)
        if not waiting and not running:
            return
        notes: Notes = draft.notes
        late, in_time = _by_lateness(waiting, draft.now_s)
        for request in running:
            is_late = request.next_deadline_s < draft.now_s and not request.num_output_tokens
            (late if is_late else in_time).append(request)
        prompts = [self._prompt(draft, request) for request in sorted(in_time, key=deadline_order)]
        first_late = self._prompt(draft, min(late, key=_oldest)) if late else None
        choice = judgement.choose(draft, prompts, first_late)
        late = sorted(late + choice.late, key=_oldest)
        ahead = choice.in_time
        notes.has_late, notes.in_time = bool(late), ahead
        holder = self._holder(draft)
        if holder in late or (holder is not None and not draft.is_running(holder) and holder not in ahead):
            late = [holder, *(request for request in late if request is not holder)]
        limit_s = choice.limit_s
        chunks = PromptChunks(draft.budget, draft.block_size, draft.now_s, self.config.delivery_latency_s)
        company = judgement.company()
        for request in running:
            if not request.num_output_tokens:
                company.join(request.num_known_tokens, request.tpot_slo_s)
        notes.first_tokens_s = chunks.first_tokens_s
        if late and self._late_credit:
            before_s = draft.budget.prediction.seconds
            self._pack_prompts(draft, late[:1], limit_s, chunks, company, needs_room=False)
            notes.late_s = draft.budget.prediction.seconds - before_s
        self._pack_prompts(draft, ahead, limit_s, chunks, company)
        late_limit_s = min(limit_s, PACE * judgement.tpot_slo_s) if judgement.has_streams else limit_s
        lacking = self._pack_prompts(draft, late, late_limit_s, chunks, company)
        if lacking is not None:  # None behind it was admitted.
            pushed_out = (request for request in late if request.num_output_tokens and not draft.is_running(request))
            notes.lacking = next(pushed_out, lacking)

    def _prompt(self, draft: Draft, request: Request) -> PendingPrompt[Request]:
        if draft.is_running(request):
            return PendingPrompt(request, draft.kv.num_uncomputed(request), draft.kv.num_computed(request))
        cached, _ = self._cached.get(request, (0, 0.0))
        return PendingPrompt(request, request.num_known_tokens - cached, cached)

    def _pack_prompts(
        self,
        draft: Draft,
        prompts: list[Request],
        limit_s: float,
        chunks: PromptChunks,
        company: Company,
        *,
        needs_room: bool = True,
    ) -> Request | None:
        """Schedules prompts in order. Returns the first that found no slot or no memory.

        Once there is one no other is admitted, but those that run go on: they hold what it waits for. One without
        room in the company is passed by: a giant keeps out no small ones.
        """
        can_admit = True
        lacking: Request | None = None
        for request in prompts:
            if draft.is_scheduled(request):
                continue
            is_running = draft.is_running(request)
            if not is_running and not can_admit:
                continue
            if not is_running and needs_room and not company.has_room(request.num_known_tokens):
                continue
            draft.at = request
            hit = NO_HIT if is_running else draft.kv.match_prefix(request)
            context = request.num_computed_tokens if is_running else hit.num_tokens
            left = (request.num_tokens if is_running else request.num_known_tokens) - context
            chunk = chunks.size(left, context, limit_s, len(hit.host_hashes))
            if not chunk:
                break
            if is_running:
                is_scheduled = self._room_to_grow(draft, request, chunk)
                if is_scheduled:
                    draft.add(request, chunk)
            else:
                is_scheduled = can_admit = self._admit_online(draft, request, hit, chunk)
                if is_scheduled:
                    company.join(request.num_known_tokens, request.tpot_slo_s)
            if is_scheduled:
                if chunk == left:
                    chunks.ended(request.next_deadline_s)
            elif lacking is None:
                lacking = request
        return lacking

    def _unfinished_s(self, draft: Draft, prompts: list[Request]) -> tuple[list[float], float]:
        """See ``unfinished_s``."""
        left: list[Unfinished] = []
        for request in prompts:
            num_tokens = draft.num_tokens_of(request)
            num_left = draft.kv.num_uncomputed(request) - num_tokens
            if num_left > 0:
                left.append(Unfinished(num_left, draft.kv.num_computed(request) + num_tokens, request.next_deadline_s))
        return unfinished_s(left, self.cost_model, draft.now_s, self.config.delivery_latency_s)

    def _holder(self, draft: Draft) -> Request | None:
        """The late request for which something is reserved in this step, if there is one."""
        holder = self._late.holder
        if holder is None or holder.status is RequestStatus.FINISHED or not self._late.part(draft.now_s):
            return None
        return holder

    def _leaves_claim(self, draft: Draft, request: Request, num_blocks: int) -> bool:
        """Whether enough is left for the reservation if this request is admitted, with so many blocks and a slot.

        Once the holder has begun, only what it can take in a step is reserved.
        """
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

    def _can_stay(self, draft: Draft, request: Request, num_blocks: int) -> bool:
        """Whether a stream that was preempted will find memory to its end beside those that run.

        Else it would take the place of another, which comes back at its expense: both are computed again and again.
        """
        if not request.num_output_tokens or request is self._holder(draft):
            return True
        held = held_online(draft)
        if not len(held.tokens):
            return True
        num_output = np.append(held.num_output, request.num_output_tokens)
        most = np.append(held.most_left, request.params.max_tokens - request.num_output_tokens)
        left = np.minimum(self.traffic.tokens_left(num_output), most)
        left[:-1] += held.lacking
        own = np.append(held.own_tokens(draft.kv.pool.num_online), num_blocks * draft.block_size)
        held_tokens = (draft.kv.pool.num_online + num_blocks) * draft.block_size
        return most_held_tokens(held_tokens, own, left) <= draft.kv.pool.num_blocks * draft.block_size

    def _is_worth_evicting(self, draft: Draft, num_tokens: int, num_blocks: int, keep: Sequence[int]) -> bool:
        """Whether computing so many offline tokens takes longer than what it evicts of conversations is expected to."""
        lost_s = self.online_return_s(draft, num_blocks, keep)
        return not lost_s or lost_s <= num_tokens * self.block_s() / self.kv.block_size

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
        if not self._leaves_claim(draft, request, cost) or not self._can_stay(draft, request, cost):
            return False
        slots = max(draft.num_running - self.config.max_num_seqs + 1, 0)
        if not draft.make_room(cost, draft.offline_victims(), keep=set(hit.block_ids), slots=slots):
            return False
        draft.admit(request, hit, chunk)
        return True


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


def _oldest(request: Request) -> tuple[bool, bool, float]:
    """Sort key of late requests: those pushed out amid their answers first, then the oldest."""
    return (not request.num_output_tokens, not request.is_priority, request.arrival_s)
