"""``fcfs-v0`` and ``priority-v0``: the default scheduler of vLLM 0.6, against which the papers measured.

Semantics of ``vllm/core/scheduler.py`` without chunked prefill, preemption by recomputation.
"""

import math
from collections import deque
from typing import ClassVar

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager, PrefixHit
from neaptide.engine.request import Request
from neaptide.engine.scheduler.baselines.one_queue import OneQueueScheduler, priority_order
from neaptide.engine.scheduler.queues import OnlineOrder
from neaptide.engine.scheduler.step import StepBuilder

WATERMARK = 0.01
"""Share of the blocks that an admission leaves free, so that the next decodes do not preempt at once."""


class VllmV0Fcfs(OneQueueScheduler):
    """Prefill first: a step is whole prompts if any fits, else one token of every running request.

    When blocks run out, the last running request goes back to the front of the queue.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, cost_model: CostModel, headroom: HeadroomPredictor
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.max_step_tokens = max(config.max_model_len, config.max_num_batched_tokens)
        self._watermark_blocks = int(WATERMARK * kv.pool.num_blocks)

    def _pack(self, step: StepBuilder) -> float:
        self._pack_prefills(step)
        if not step.scheduled:
            self._make_way(step)
            self._pack_decodes(step)
        if not step.scheduled:
            # Everybody made way: the engine would find nobody to decode and plan again at once.
            self._pack_prefills(step)
        return math.inf

    def _make_way(self, step: StepBuilder) -> None:
        """Preemption for the sake of a waiting request: not here."""

    def _decode_order(self) -> list[Request]:
        return self._running()

    def _pack_prefills(self, step: StepBuilder) -> None:
        while (request := self._waiting_head()) is not None:
            step.at = request
            hit = self.queues.kv.match_prefix(request)
            num_tokens = request.num_tokens - hit.num_tokens
            if num_tokens > step.budget.tokens_left or not self._has_room(request, hit):
                break
            self._admit_head(step, request, hit, num_tokens)
        step.at = None

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        """A seat, and blocks for the whole prompt above the watermark, which the first request may use as well."""
        spare_blocks = self._watermark_blocks if self._running() else 0
        return self._find_seat() and self._find_room_to_admit(hit, request.num_tokens - hit.num_tokens, spare_blocks)

    def _pack_decodes(self, step: StepBuilder) -> None:
        running = deque(self._decode_order())
        while running and step.budget.tokens_left > 0:
            request = step.at = running.popleft()
            num_tokens = request.num_uncomputed_tokens
            while not self._find_room(self.queues.kv.blocks_needed(request, num_tokens)):
                victim = running.pop() if running else request
                self.preemptor.preempt(victim)
                if victim is request:
                    break
            else:
                step.add(request, num_tokens)
        step.at = None


class VllmV0Priority(VllmV0Fcfs):
    """The same with ``--scheduling-policy priority``: queue and victims by (priority, arrival), and a waiting request
    that got no prefill preempts running ones that come after it until it fits; it is prefilled in the next step."""

    online_order: ClassVar[OnlineOrder] = staticmethod(priority_order)

    def _decode_order(self) -> list[Request]:
        return sorted(self._running(), key=priority_order)

    def _make_way(self, step: StepBuilder) -> None:
        request = step.at = self._waiting_head()
        if request is None:
            return
        running = self._decode_order()
        while running and priority_order(running[-1]) > priority_order(request):
            if self._has_room(request, self.queues.kv.match_prefix(request)):
                break
            self.preemptor.preempt(running.pop())
        step.at = None
