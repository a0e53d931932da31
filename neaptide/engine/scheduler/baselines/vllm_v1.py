"""Policies ``fcfs`` and ``priority``: the scheduler of vLLM v1.

Semantics of ``vllm/v1/core/sched/scheduler.py`` and ``kv_cache_manager.py`` as of vLLM 0.32, with its defaults.
"""

import math
from typing import ClassVar

from neaptide.engine.request import Request
from neaptide.engine.scheduler.baselines.one_queue import OneQueueScheduler, priority_order
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.queues import OnlineOrder


class VllmV1Fcfs(OneQueueScheduler):
    """vLLM v1's first come, first served.

    Running requests are scheduled in order of admission, each with the tokens it needs, as far as the budget allows.
    Then come waiting ones by arrival, unless a request was preempted in this step. A waiting request starts if blocks
    for all its known tokens are free at that moment (``scheduler_reserve_full_isl``, vLLM's default); they are
    allocated chunk by chunk.

    When blocks run out, the last running request goes back to the front of the queue, even if it is the one that needs
    them.
    """

    publishes_when_planned: ClassVar[bool] = True
    publishes_decodes_when_planned: ClassVar[bool] = True
    """vLLM caches full blocks as it allocates them: the next waiting request of the same step finds them."""
    watermark: ClassVar[float] = 0.0
    """Share of the blocks that an admission leaves free while requests run; vLLM's default is 0."""

    def pack(self, draft: Draft) -> float:
        # If each considered request was preempted, the step is empty; the engine would plan again at once.
        while not draft.num_parts:
            if not self._pack_running(draft):
                self._pack_waiting(draft)
                break
        return math.inf

    def _victim(self, running: list[Request]) -> Request:
        return running[-1]

    def _pack_running(self, draft: Draft) -> bool:
        """Schedules running requests; returns whether one was preempted."""
        kv, running = draft.kv, self._running(draft)
        taken: dict[Request, int] = {}
        """Tokens per request, added to the step at the end, because a later request may preempt an earlier one."""
        tokens_left, index, preempted = draft.budget.tokens_left, 0, False
        while index < len(running) and tokens_left > 0:
            request = draft.at = running[index]
            num_tokens = min(request.num_uncomputed_tokens, tokens_left)
            while not self._find_room(draft, kv.blocks_needed(request, num_tokens)):
                victim = self._victim(running)
                index -= running.index(victim) < index
                running.remove(victim)
                tokens_left += taken.pop(victim, 0)
                draft.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                draft.grow(request, num_tokens)
                taken[request] = num_tokens
                tokens_left -= num_tokens
                index += 1
                continue
            break  # The request that needed blocks was the victim; later ones are not scheduled in this step.
        for request, num_tokens in taken.items():
            draft.at = request
            draft.add(request, num_tokens)
        draft.at = None
        return preempted

    def _pack_waiting(self, draft: Draft) -> None:
        while draft.budget.tokens_left > 0 and (request := self._waiting_head(draft)) is not None:
            draft.at = request
            if not self._find_slot(draft):
                break
            hit = draft.kv.match_prefix(request)
            num_tokens = request.num_known_tokens - hit.num_tokens
            spare_blocks = int(self.watermark * draft.kv.pool.num_blocks) if draft.num_running else 0
            if not self._find_room_to_admit(draft, hit, num_tokens, spare_blocks):
                break
            draft.admit(request, hit, min(num_tokens, draft.budget.tokens_left))
        draft.at = None


class VllmV1Priority(VllmV1Fcfs):
    """``fcfs`` with ``--scheduling-policy priority``: the queue and the victims are ordered by (priority, arrival).

    No request is preempted for a slot or for tokens, only for blocks.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(priority_order)

    def _victim(self, running: list[Request]) -> Request:
        return max(running, key=priority_order)
