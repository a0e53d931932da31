"""BROS (arXiv 2504.09590), section 4: real-time requests by urgency, then best-effort ones.

RT and BE are the paper's names for online and offline. Its bidirectional blocks (section 5) are those of
``neaptide_lab.two_tenants``, if the executor copies slots and there is host memory. Otherwise a request that lacks
blocks preempts others, which are computed again, as in the paper's own run without them (section 7.4.1).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain
from operator import itemgetter
from typing import ClassVar

from neaptide.policy import (
    BatchShape,
    CacheMaker,
    CostModel,
    Draft,
    HeadroomPredictor,
    KVCacheManager,
    OnlineOrder,
    Request,
    RequestClass,
    RequestStatus,
    SchedulerConfig,
    Step,
)
from neaptide_lab.policies.whole_prompts import WholePromptScheduler
from neaptide_lab.two_tenants.cache import (
    num_away,
    num_copied_aside,
    num_preemptible,
    swap_out_or_preempt,
    two_tenant_cache,
)

MEAN_WEIGHT = 0.1
"""Weight of the newest step in the moving average of step times. The paper gives no window."""


class AdaptiveBatchSize:
    """Largest number of requests in a batch: one more after every step without early return, else the initial number.

    Section 4.2, "Adaptive Batch Sizing".
    """

    def __init__(self, initial: int, most: int) -> None:
        self._initial = min(initial, most)
        self._most = most
        self.limit = self._initial

    def observe(self, returned_early: bool) -> None:
        self.limit = self._initial if returned_early else min(self.limit + 1, self._most)


class UrgentChoice:
    """RT requests chosen for a step, most urgent first. Their blocks are allocated once it is certain that they
    stay."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.chosen: list[Request] = []
        self.num_blocks = 0
        """Blocks that the chosen requests lack."""
        self.num_admissions = 0
        self.shape = BatchShape()
        """Shape of the whole batch, BE requests included."""
        self._shape_without_last: BatchShape | None = None

    @property
    def num_requests(self) -> int:
        return len(self.chosen) + self._draft.num_parts

    @property
    def num_slots_taken(self) -> int:
        return self._draft.num_running + self.num_admissions

    def take(self, request: Request, num_blocks: int) -> None:
        self.chosen.append(request)
        self.num_blocks += num_blocks
        self.num_admissions += not self._draft.is_running(request)
        self._add_to(self.shape, request)
        self._shape_without_last = None

    def count(self, request: Request) -> None:
        """Counts a BE request that is added to the step."""
        self._add_to(self.shape, request)
        self._shape_without_last = None

    def shape_without_last(self) -> BatchShape:
        if self._shape_without_last is None:
            self._shape_without_last = self._shape(len(self.chosen) - 1)
        return self._shape_without_last

    def drop_last(self, num_blocks: int) -> None:
        self.shape = self.shape_without_last()
        self._shape_without_last = None
        self.num_blocks -= num_blocks
        self.num_admissions -= not self._draft.is_running(self.chosen.pop())

    def _shape(self, num_chosen: int) -> BatchShape:
        shape = self._draft.budget.shape.copy()
        for request in self.chosen[:num_chosen]:
            self._add_to(shape, request)
        return shape

    def _add_to(self, shape: BatchShape, request: Request) -> None:
        add_to(shape, self._draft, request)


def add_to(shape: BatchShape, draft: Draft, request: Request) -> None:
    """Adds a request to the batch, with the blocks that it needs from host memory."""
    kv = draft.kv
    shape.add(kv.num_uncomputed(request), kv.num_computed(request))
    if slots := num_away(kv, request):
        shape.copied_aside_blocks += -(-slots // kv.block_size)


@dataclass(slots=True)
class BrosNotes:
    """State of a draft that the policy keeps if it is applied."""

    returned_s: dict[Request, float]
    """When the last token of each RT request was returned."""
    returned_early: bool = False


def waiting_order(request: Request) -> tuple[bool, float, float, str]:
    """Sort key: requests that were preempted after their first token, then the others by the deadline of it."""
    return (
        request.num_output_tokens == 0,
        request.arrival_s + request.ttft_slo_s,
        request.arrival_s,
        request.request_id,
    )


class BrosScheduler(WholePromptScheduler):
    """Algorithm 1 with token groups of one token.

    Deadlines are the paper's: TTFT after arrival, then TPOT after the last returned token. Times are predicted without
    a margin.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(waiting_order)
    own_cache: ClassVar[CacheMaker | None] = staticmethod(two_tenant_cache)

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.batch_size = AdaptiveBatchSize(config.bros_initial_batch_size, config.max_num_seqs)
        self._mean_step_s = 0.0
        self._returned_s: dict[Request, float] = {}
        """Time at which the last token of each RT request was returned, without those of the last step."""
        self._in_last_step: list[Request] = []
        """Requests of the last step, which has ended when the next is planned."""

    def observe_step(self, step: Step, seconds: float) -> None:
        weight = MEAN_WEIGHT if self._mean_step_s else 1.0
        self._mean_step_s += weight * (seconds - self._mean_step_s)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._returned_s.pop(request, None)

    def pack(self, draft: Draft) -> float:
        notes = draft.notes = BrosNotes(self._returned_s | self._newly_returned_s(draft.now_s))
        slack_s = self.tightest_slack_s(draft)
        choice = UrgentChoice(draft)
        num_dropped = draft.preempted.total
        notes.returned_early = self._choose_urgent(draft, choice, slack_s)
        if not notes.returned_early and not self.offline_paused:
            are_all_in = self._add_resident_best_effort(draft, choice, slack_s)
            if are_all_in and draft.preempted.total == num_dropped:
                self._admit_best_effort(draft, choice, slack_s)
        for request in choice.chosen:
            draft.at = request
            self._take(draft, request)
        return slack_s

    def remember(self, draft: Draft) -> None:
        notes: BrosNotes = draft.notes
        self._returned_s = notes.returned_s
        self._in_last_step = []
        if draft.num_parts:
            self._in_last_step = [request for request, _ in draft.parts() if request.is_online]
            self.batch_size.observe(notes.returned_early)

    def _newly_returned_s(self, now_s: float) -> dict[Request, float]:
        """Return times of the new tokens of the last step, which has ended by now."""
        return {request: now_s for request in self._in_last_step if request.status is not RequestStatus.FINISHED}

    # ---- step 1: RT ----

    def urgency(self, draft: Draft) -> Callable[[Request], tuple[float, float, str]]:
        """Sort key: deadline of the next token."""
        returned_s: dict[Request, float] = draft.notes.returned_s

        def key(request: Request) -> tuple[float, float, str]:
            last_s = returned_s.get(request)
            if last_s is None:
                return (request.arrival_s + request.ttft_slo_s, request.arrival_s, request.request_id)
            return (last_s + request.tpot_slo_s, request.arrival_s, request.request_id)

        return key

    def pull(self, draft: Draft) -> Iterator[Request]:
        """RT requests, most urgent first.

        Section 4.2, "Request pulling optimization": only requests with tokens are sorted. Those that wait for their
        first token are in order already, and the two lists are merged.
        """
        urgency, waiting = self.urgency(draft), draft.waiting_online
        first = bisect_left(waiting, True, key=lambda r: r.num_output_tokens == 0)
        pending = sorted([*draft.running(RequestClass.ONLINE), *waiting[:first]], key=urgency)
        return merge(pending, waiting[first:], key=urgency)

    def tightest_slack_s(self, draft: Draft) -> float:
        """Least remaining time of the RT requests that can still meet their deadline; infinite without any.

        A request that cannot would otherwise stop all the others: the paper means "the one closest to its deadline
        [that] does not fail".
        """
        urgency = self.urgency(draft)
        for request in self.pull(draft):
            remaining_s = urgency(request)[0] - draft.now_s
            if remaining_s > 0.0 and self._seconds(draft, BatchShape(), request) <= remaining_s:
                return remaining_s
        return math.inf

    def _choose_urgent(self, draft: Draft, choice: UrgentChoice, slack_s: float) -> bool:
        """Lines 5-15: adds RT requests until the batch is full or the step would exceed the tightest slack.

        Returns whether the slack was the limit, which is the early return of lines 11-12. The first request is added
        anyway, because an empty batch would help none. After a waiting request that lacks memory, or a resident one
        that preempted others, only resident requests are added.
        """
        can_admit, num_dropped = True, draft.preempted.online
        for request in self.pull(draft):
            if choice.num_requests >= self.batch_size.limit:
                break
            is_waiting = not draft.is_running(request)
            if is_waiting and not can_admit:
                continue
            draft.at = request
            outlasts = self._seconds(draft, choice.shape, request) > slack_s
            if outlasts and choice.chosen:
                return True
            num_blocks = self._blocks(draft, request)
            fits = self._fits(draft, choice.shape, request)
            if not fits or not self._make_urgent_room(draft, choice, request, num_blocks):
                can_admit &= not is_waiting
                continue
            can_admit &= draft.preempted.online == num_dropped
            choice.take(request, num_blocks)
            if outlasts:
                return True
        draft.at = None
        return False

    def _make_urgent_room(self, draft: Draft, choice: UrgentChoice, request: Request, num_blocks: int) -> bool:
        """Preempts BE requests, youngest first.

        A resident request that must grow may also preempt RT requests with more remaining time, most first (section
        5.2). If a waiting one could, they would preempt each other in turn. No request is preempted for blocks that BE
        requests can release slot by slot.
        """
        is_waiting = not draft.is_running(request)
        slots = max(choice.num_slots_taken + is_waiting - self.config.max_num_seqs, 0)
        num_blocks += choice.num_blocks

        def later() -> Iterator[Request]:
            if not is_waiting:
                urgency = self.urgency(draft)
                own = urgency(request)
                less_urgent = [r for r in draft.running(RequestClass.ONLINE) if urgency(r) > own]
                yield from sorted(less_urgent, key=urgency, reverse=True)

        def victims() -> Iterator[Request]:
            return chain(draft.offline_victims(), later())

        if num_blocks <= draft.kv.available:
            return draft.make_room(0, victims(), slots=slots)
        by_slots = num_preemptible(draft.kv)
        if num_blocks <= draft.kv.available + by_slots:
            return draft.make_room(0, victims(), slots=slots)
        if by_slots and draft.make_room(num_blocks - by_slots, later(), slots=slots):
            return True
        return draft.make_room(num_blocks, victims(), slots=slots)

    # ---- step 2: BE ----

    def _add_resident_best_effort(self, draft: Draft, choice: UrgentChoice, slack_s: float) -> bool:
        """Lines 17-33 for resident BE requests, by the number of their slots in host memory.

        Those with equal numbers cost the same to resume, so they go in order of admission. Returns False if one with
        slots in host memory could not resume: new requests would take the blocks that it needs.
        """
        are_all_in, kv = True, draft.kv
        resident = [(num_away(kv, request), request) for request in draft.running(RequestClass.OFFLINE)]
        for slots_away, request in sorted(resident, key=itemgetter(0)):
            if choice.num_requests >= self.batch_size.limit and not choice.chosen:
                return are_all_in
            if num_away(kv, request) > slots_away:  # Swapped out for an older one.
                are_all_in = False
            elif draft.is_running(request):  # Not preempted for an older one.
                draft.at = request
                is_in = self._add_or_replace(draft, choice, request, slack_s)
                are_all_in &= is_in or not slots_away
        draft.at = None
        return are_all_in

    def _admit_best_effort(self, draft: Draft, choice: UrgentChoice, slack_s: float) -> None:
        """Lines 17-33 for the pool, in its order. Not in a step that preempted requests, which are first in it."""
        while choice.num_slots_taken < self.config.max_num_seqs:
            request = draft.at = draft.pool.peek()
            if request is None or not self._add_or_replace(draft, choice, request, slack_s):
                return

    def _add_or_replace(self, draft: Draft, choice: UrgentChoice, request: Request, slack_s: float) -> bool:
        """Adds a BE request to the batch, or replaces the least urgent RT request that can wait a step."""
        num_blocks = self._blocks(draft, request)
        if not (
            choice.num_requests < self.batch_size.limit
            and self._fits(draft, choice.shape, request)
            and self._seconds(draft, choice.shape, request) <= slack_s
            and self._make_best_effort_room(draft, choice, request, num_blocks)
        ):
            if not choice.chosen:
                return False
            spared = choice.chosen[-1]
            spared_blocks = self._blocks(draft, spared)
            if not self._can_wait(draft, choice, spared, request, slack_s):
                return False
            if not self._is_room_left(draft, choice.num_blocks - spared_blocks, request, num_blocks):
                return False
            choice.drop_last(spared_blocks)
        choice.count(request)
        self._take(draft, request)
        return True

    def _can_wait(self, draft: Draft, choice: UrgentChoice, spared: Request, instead: Request, slack_s: float) -> bool:
        """Constraint (6) for an omitted RT request: this step and its own next one end before its deadline."""
        shape = choice.shape_without_last()
        step_s = self._seconds(draft, shape, instead)
        remaining_s = self.urgency(draft)(spared)[0] - draft.now_s
        next_s = self._mean_step_s or step_s
        return self._fits(draft, shape, instead) and step_s <= slack_s and step_s + next_s <= remaining_s

    def _make_best_effort_room(self, draft: Draft, choice: UrgentChoice, request: Request, num_blocks: int) -> bool:
        """Finds blocks: a resident request may preempt younger ones to grow; a new one takes free blocks."""
        if self._is_room_left(draft, choice.num_blocks, request, num_blocks):
            return True
        if not num_blocks or not draft.is_running(request):
            return False
        younger = (r for r in draft.offline_victims() if r.admission_index > request.admission_index)
        let_go = partial(swap_out_or_preempt, draft)
        return draft.make_room(choice.num_blocks + num_blocks, younger, let_go=let_go)

    def _is_room_left(self, draft: Draft, num_urgent: int, request: Request, num_blocks: int) -> bool:
        """Whether a BE request may get this many blocks, or keep its own, next to what RT requests lack."""
        if draft.kv.fits(num_urgent + num_blocks):
            return True
        return not num_blocks and num_urgent <= draft.kv.available + num_preemptible(draft.kv, besides=request)

    # ---- both ----

    def _take(self, draft: Draft, request: Request) -> None:
        super()._take(draft, request)
        draft.budget.shape.copied_aside_blocks = num_copied_aside(draft.kv)

    def _fits(self, draft: Draft, shape: BatchShape, request: Request) -> bool:
        return shape.num_tokens + draft.kv.num_uncomputed(request) <= self.max_step_tokens

    def _seconds(self, draft: Draft, shape: BatchShape, request: Request) -> float:
        """Predicted time of the batch with one more request."""
        shape = shape.copy()
        add_to(shape, draft, request)
        return self.cost_model.predict(shape).seconds
