"""Policies ``fcfs-v0`` and ``priority-v0``: the default scheduler of vLLM 0.6, which the papers measured against.

Semantics of ``vllm/core/scheduler.py`` without chunked prefill, preemption by recomputation.
"""

import math
from collections import deque
from typing import ClassVar

from neaptide.policy import (
    CostModel,
    Draft,
    HeadroomPredictor,
    KVCacheManager,
    OneQueueScheduler,
    OnlineOrder,
    PrefixHit,
    Request,
    SchedulerConfig,
    priority_order,
)

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
        self._watermark_blocks = int(WATERMARK * kv.num_blocks)

    @classmethod
    def step_tokens(cls, config: SchedulerConfig) -> int:
        return max(config.max_model_len, config.max_num_batched_tokens)

    def pack(self, draft: Draft) -> float:
        self._pack_prefills(draft)
        if not draft.num_parts:
            self._make_way(draft)
            self._pack_decodes(draft)
        if not draft.num_parts:
            # All requests were preempted: the engine would find none to decode and plan again at once.
            self._pack_prefills(draft)
        return math.inf

    def _make_way(self, draft: Draft) -> None:
        """Preempts running requests for a waiting one; not in this policy."""

    def _decode_order(self, draft: Draft) -> list[Request]:
        return self._running(draft)

    def _pack_prefills(self, draft: Draft) -> None:
        while (request := self._waiting_head(draft)) is not None:
            draft.at = request
            hit = draft.kv.match_prefix(request)
            num_tokens = request.num_known_tokens - hit.num_tokens
            if num_tokens > draft.budget.tokens_left or not self._has_room(draft, request, hit):
                break
            draft.admit(request, hit, num_tokens)
        draft.at = None

    def _has_room(self, draft: Draft, request: Request, hit: PrefixHit) -> bool:
        """Whether there is a slot, and blocks for the whole prompt above the watermark, which the first request may
        also use."""
        spare_blocks = self._watermark_blocks if self._running(draft) else 0
        num_tokens = request.num_known_tokens - hit.num_tokens
        return self._find_slot(draft) and self._find_room_to_admit(draft, hit, num_tokens, spare_blocks)

    def _pack_decodes(self, draft: Draft) -> None:
        running = deque(self._decode_order(draft))
        while running and draft.budget.tokens_left > 0:
            request = draft.at = running.popleft()
            num_tokens = request.num_uncomputed_tokens
            while not self._find_room(draft, draft.kv.blocks_needed(request, num_tokens)):
                victim = running.pop() if running else request
                draft.preempt(victim)
                if victim is request:
                    break
            else:
                draft.add(request, num_tokens)
        draft.at = None


class VllmV0Priority(VllmV0Fcfs):
    """``fcfs-v0`` with ``--scheduling-policy priority``: queue and victims by (priority, arrival).

    A waiting request that got no prefill preempts later running ones until it fits; it is prefilled in the next step.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(priority_order)

    def _decode_order(self, draft: Draft) -> list[Request]:
        return sorted(self._running(draft), key=priority_order)

    def _make_way(self, draft: Draft) -> None:
        request = draft.at = self._waiting_head(draft)
        if request is None:
            return
        running = self._decode_order(draft)
        while running and priority_order(running[-1]) > priority_order(request):
            if self._has_room(draft, request, draft.kv.match_prefix(request)):
                break
            draft.preempt(running.pop())
        draft.at = None
