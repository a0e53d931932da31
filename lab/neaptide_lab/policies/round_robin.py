"""BROS's Round-Robin baseline (arXiv 2504.09590, sections 2.2 and 7.1): the classes take turns, step by step."""

import math
from collections.abc import Iterator
from typing import ClassVar

from neaptide.policy import (
    CostModel,
    Draft,
    HeadroomPredictor,
    KVCacheManager,
    OnlineOrder,
    Request,
    RequestClass,
    SchedulerConfig,
    arrival_order,
)
from neaptide_lab.policies.whole_prompts import WholePromptScheduler


class RoundRobinScheduler(WholePromptScheduler):
    """A step serves one class, first come first served: all resident requests, then those that fit with them.

    The other class has the next turn. A class without requests to run passes its turn, and has the step after it again.
    Memory is shared by the classes: a request waits for free blocks, and a resident one that must grow preempts the
    request admitted last, whatever its class. Only while offline work is paused, which the paper does not know, does
    online work preempt offline requests for all it lacks.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(arrival_order)

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self._served = RequestClass.OFFLINE

    def pack(self, draft: Draft) -> float:
        other = RequestClass.ONLINE if self._served is RequestClass.OFFLINE else RequestClass.OFFLINE
        for request_class in (other, self._served):
            if request_class is RequestClass.ONLINE or not self.offline_paused:
                self._serve(draft, request_class)
            if draft.num_parts:
                draft.notes = request_class
                break
        return math.inf

    def remember(self, draft: Draft) -> None:
        if draft.notes is not None:
            self._served = draft.notes

    def _serve(self, draft: Draft, request_class: RequestClass) -> None:
        num_dropped = draft.preempted.total
        for request in draft.running(request_class):
            draft.at = request
            if draft.is_running(request) and self._fits(draft, request) and self._make_room(draft, request):
                self._take(draft, request)
        if draft.preempted.total > num_dropped:
            return
        while (waiting := self._next_waiting(draft, request_class)) is not None:
            draft.at = waiting
            slots = max(draft.num_running + 1 - self.config.max_num_seqs, 0)
            has_room = draft.make_room(self._blocks(draft, waiting), self._paused(draft), slots=slots)
            if not has_room or not self._fits(draft, waiting):
                return
            self._take(draft, waiting)
        draft.at = None

    def _next_waiting(self, draft: Draft, request_class: RequestClass) -> Request | None:
        if request_class is RequestClass.ONLINE:
            return draft.waiting_online[0] if draft.waiting_online else None
        return draft.pool.peek()

    def _fits(self, draft: Draft, request: Request) -> bool:
        return draft.kv.num_uncomputed(request) <= draft.budget.tokens_left

    def _make_room(self, draft: Draft, request: Request) -> bool:
        num_blocks = self._blocks(draft, request)
        if draft.kv.fits(num_blocks):
            return True

        def victims() -> Iterator[Request]:
            yield from self._paused(draft)
            for other in reversed(draft.all_running()):
                is_younger = other.admission_index > request.admission_index
                if is_younger and not draft.is_scheduled(other) and not self._is_paused(other):
                    yield other

        return draft.make_room(num_blocks, victims())

    def _paused(self, draft: Draft) -> Iterator[Request]:
        return filter(self._is_paused, draft.offline_victims())

    def _is_paused(self, request: Request) -> bool:
        return self.offline_paused and not request.is_online
