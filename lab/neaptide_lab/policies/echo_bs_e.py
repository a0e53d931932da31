"""Echo's BS+E (section 7.1): vLLM's priority scheduling, and an estimator that keeps steps within the targets.

It does not choose offline requests by cache or length and has no task-aware cache: those are BS+E+S and Echo. The frame
is that of the mixed steps in Echo's equation 8: prompts are split and run together with decodes.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

from neaptide.policy import Draft, OneQueueScheduler, OnlineOrder, Request, RequestClass, priority_order


def slack_s(request: Request, now_s: float) -> float:
    """Time until its next token is due: ``D_k = arrival + TTFT + (k - 1) * TPOT``."""
    due_s = request.ttft_slo_s + request.num_output_tokens * request.tpot_slo_s
    return request.arrival_s + due_s - now_s


class EchoBaseWithEstimator(OneQueueScheduler):
    """Online requests first, by arrival; then offline ones, by arrival, once no online request waits.

    Predicted times include the cost model's margin, as for every policy here that uses it. Echo, too, compares its
    variants with one estimator.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(priority_order)
    publishes_when_planned: ClassVar[bool] = True
    publishes_decodes_when_planned: ClassVar[bool] = True
    """As in the vLLM v1 steps that are its frame."""

    def pack(self, draft: Draft) -> float:
        limit_s = self._pack_online(draft)
        if not draft.waiting_online and not self.offline_paused:
            running = draft.running(RequestClass.ONLINE)
            limit_s = min((slack_s(request, draft.now_s) for request in running), default=math.inf)
            self._pack_offline(draft, limit_s)
        draft.at = None
        return limit_s

    # ---- online ----

    def _pack_online(self, draft: Draft) -> float:
        """Adds decodes, then prompts in chunks that leave the running streams on time."""
        running = sorted(draft.running(RequestClass.ONLINE), key=priority_order)
        for request in running:
            if request.num_uncomputed_tokens == 1:
                self._continue(draft, request, 1)
        limit_s = self._online_limit_s(draft)
        for request in running:
            if request.num_uncomputed_tokens > 1:
                chunk = self._chunk(draft, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
                self._continue(draft, request, chunk)
        while draft.waiting_online and self._admit_online(draft, limit_s):
            pass
        return limit_s

    def _online_limit_s(self, draft: Draft) -> float:
        """Least slack of the streams that meet their deadline if nothing is added.

        A stream that is late anyway must not delay the others' prompts.
        """
        decodes_s = sum(self.cost_model.predict(draft.budget.shape))
        running = draft.running(RequestClass.ONLINE)
        slacks = [slack_s(request, draft.now_s) for request in running if request.num_output_tokens]
        return min((slack for slack in slacks if slack >= decodes_s), default=math.inf)

    def _admit_online(self, draft: Draft, limit_s: float) -> bool:
        """Admits the first waiting request if it fits as a whole next to the others; offline ones are dropped
        for it."""
        request = draft.at = draft.waiting_online[0]
        hit = draft.kv.match_prefix(request)
        left = request.num_known_tokens - hit.num_tokens
        chunk = self._chunk(draft, left, hit.num_tokens, limit_s)
        slots = max(draft.num_running + 1 - self.config.max_num_seqs, 0)
        cost = draft.kv.admission_cost(hit, left)
        if chunk == 0 or not draft.make_room(cost, self._victims(draft, request), set(hit.block_ids), slots):
            return False
        draft.admit(request, hit, chunk)
        return True

    # ---- offline ----

    def _pack_offline(self, draft: Draft, limit_s: float) -> None:
        """Adds resident offline requests, then the pool, while the step stays within the least slack.

        None leaves the pool in a step that preempted one.
        """
        for request in self._residents(draft):
            if not draft.is_running(request):
                continue  # Preempted for an earlier one.
            chunk = self._chunk(draft, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
            if chunk == 0:
                return
            self._continue(draft, request, chunk)
        if not draft.preempted.offline:
            while self._admit_offline(draft, limit_s):
                pass

    def _residents(self, draft: Draft) -> list[Request]:
        """Resident offline requests in order of admission."""
        return draft.running(RequestClass.OFFLINE)

    def _admit_offline(self, draft: Draft, limit_s: float) -> bool:
        request = draft.at = draft.pool.peek()
        if request is None or draft.num_running >= self.config.max_num_seqs:
            return False
        hit = draft.kv.match_prefix(request)
        left = request.num_known_tokens - hit.num_tokens
        chunk = self._chunk(draft, left, hit.num_tokens, limit_s)
        if chunk == 0 or not draft.kv.fits(draft.kv.admission_cost(hit, left)):
            return False
        draft.admit(request, hit, chunk)
        return True

    # ---- both ----

    def _chunk(self, draft: Draft, num_tokens: int, context_tokens: int, limit_s: float) -> int:
        return draft.budget.largest_chunk(num_tokens, context_tokens, limit_s)

    def _continue(self, draft: Draft, request: Request, num_tokens: int) -> None:
        """Adds a running request if it has tokens and room; otherwise it skips this step and keeps its KV."""
        draft.at = request
        if not draft.is_running(request):
            return  # Preempted for an earlier one.
        if num_tokens == 0 or draft.budget.tokens_left == 0:
            return
        num_blocks = draft.kv.blocks_needed(request, num_tokens)
        if draft.kv.fits(num_blocks) or draft.make_room(num_blocks, self._victims(draft, request)):
            draft.add(request, num_tokens)

    def _victims(self, draft: Draft, request: Request) -> Iterator[Request]:
        """Requests after this one in order of (priority, arrival), last first, so offline ones before online ones."""
        order = priority_order(request)
        running = sorted(draft.all_running(), key=priority_order, reverse=True)
        return (r for r in running if not draft.is_scheduled(r) and priority_order(r) > order)
