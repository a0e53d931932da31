"""BROS's Round-Robin baseline (arXiv 2504.09590, sections 2.2 and 7.1): the classes take turns, step by step."""

import math
from collections.abc import Iterator
from typing import ClassVar

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import RequestClass
from neaptide.engine.request import Request
from neaptide.engine.scheduler.baselines.one_queue import arrival_order
from neaptide.engine.scheduler.baselines.whole_prompts import WholePromptScheduler, is_waiting
from neaptide.engine.scheduler.queues import OnlineOrder
from neaptide.engine.scheduler.step import StepBuilder


class RoundRobinScheduler(WholePromptScheduler):
    """A step serves one class, first come first served: all that are resident, then those that fit beside them.

    The other class's turn comes next; one that has nothing to run gives its turn away, and the step after belongs
    to it again. Memory knows no classes: a request waits for free blocks, and a resident one that must grow drops
    the one admitted last, whatever its class. Only while offline work is paused, which the paper does not know, does
    online work take what it lacks from it.
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

    def _pack(self, step: StepBuilder) -> float:
        other = RequestClass.ONLINE if self._served is RequestClass.OFFLINE else RequestClass.OFFLINE
        for request_class in (other, self._served):
            if request_class is RequestClass.ONLINE or not self.offline_paused:
                self._serve(step, request_class)
            if step.scheduled:
                self._served = request_class
                break
        return math.inf

    def _serve(self, step: StepBuilder, request_class: RequestClass) -> None:
        is_online = request_class is RequestClass.ONLINE
        running = self.queues.running_online if is_online else self.queues.running_offline
        num_dropped = self.preemptor.count.online + self.preemptor.count.offline
        for request in list(running.values()):
            step.at = request
            if not is_waiting(request) and self._fits(step, request) and self._make_room(step, request):
                self._take(step, request)
        if self.preemptor.count.online + self.preemptor.count.offline > num_dropped:
            return
        while (waiting := self._next_waiting(is_online)) is not None:
            step.at = waiting
            seats = max(self.queues.num_running + 1 - self.config.max_num_seqs, 0)
            has_room = self.preemptor.make_room(self._blocks(waiting), self._paused(), seats=seats)
            if not has_room or not self._fits(step, waiting):
                return
            self._take(step, waiting)
        step.at = None

    def _next_waiting(self, is_online: bool) -> Request | None:
        if is_online:
            return self.queues.waiting_online[0] if self.queues.waiting_online else None
        return self.queues.pool.peek()

    def _fits(self, step: StepBuilder, request: Request) -> bool:
        return request.num_uncomputed_tokens <= step.budget.tokens_left

    def _make_room(self, step: StepBuilder, request: Request) -> bool:
        num_blocks = self._blocks(request)
        if num_blocks <= self.queues.kv.pool.num_available:
            return True

        def victims() -> Iterator[Request]:
            yield from self._paused()
            for other in sorted(self.queues.running(), key=lambda r: r.admission_index, reverse=True):
                is_younger = other.admission_index > request.admission_index
                if is_younger and other.last_step != step.index and not self._is_paused(other):
                    yield other

        return self.preemptor.make_room(num_blocks, victims())

    def _paused(self) -> Iterator[Request]:
        return filter(self._is_paused, reversed(list(self.queues.running_offline.values())))

    def _is_paused(self, request: Request) -> bool:
        return self.offline_paused and not request.is_online
