"""Echo's BS+E (section 7.1): vLLM's priority scheduling, and an estimator that keeps steps within the targets.

No choice of offline requests by cache or length, no task-aware cache: those are BS+E+S and Echo. The frame is that
of the mixed steps that Echo's equation 8 describes: prompts are cut and run beside decodes.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

from neaptide.engine.request import Request
from neaptide.engine.scheduler.baselines.one_queue import OneQueueScheduler, priority_order
from neaptide.engine.scheduler.queues import OnlineOrder
from neaptide.engine.scheduler.step import StepBuilder


def slack_s(request: Request, now_s: float) -> float:
    """Time until its next token is due: ``D_k = arrival + TTFT + (k - 1) * TPOT``."""
    due_s = request.ttft_slo_s + request.num_output_tokens * request.tpot_slo_s
    return request.arrival_s + due_s - now_s


class EchoBaseWithEstimator(OneQueueScheduler):
    """Online requests first, by arrival; offline ones, by arrival, when no online request waits any more.

    Predicted times carry the cost model's margin, as they do for every policy here that uses it: Echo, too, compares
    its variants with one estimator.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(priority_order)
    publishes_when_planned: ClassVar[bool] = True
    """As in the vLLM v1 steps that are its frame."""

    def _pack(self, step: StepBuilder) -> float:
        num_dropped = self.preemptor.count.offline
        limit_s = self._pack_online(step)
        if not self.queues.waiting_online and not self.offline_paused:
            running = self.queues.running_online.values()
            limit_s = min((slack_s(request, step.now_s) for request in running), default=math.inf)
            self._pack_offline(step, limit_s, num_dropped)
        step.at = None
        return limit_s

    # ---- online ----

    def _pack_online(self, step: StepBuilder) -> float:
        """Decodes, then prompts in chunks that leave the running streams on time."""
        running = sorted(self.queues.running_online.values(), key=priority_order)
        for request in running:
            if request.num_uncomputed_tokens == 1:
                self._continue(step, request, 1)
        limit_s = self._online_limit_s(step)
        for request in running:
            if request.num_uncomputed_tokens > 1:
                chunk = self._chunk(step, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
                self._continue(step, request, chunk)
        while self.queues.waiting_online and self._admit_online(step, limit_s):
            pass
        return limit_s

    def _online_limit_s(self, step: StepBuilder) -> float:
        """Least slack of the streams that keep their deadline at least if nothing is added. One that is late anyway
        must not keep the others' prompts waiting."""
        decodes_s = sum(self.cost_model.predict(step.budget.shape))
        slacks = [slack_s(r, step.now_s) for r in self.queues.running_online.values() if r.num_output_tokens]
        return min((slack for slack in slacks if slack >= decodes_s), default=math.inf)

    def _admit_online(self, step: StepBuilder, limit_s: float) -> bool:
        """The first waiting request, if it fits as a whole beside the others, offline ones dropped for it."""
        request = step.at = self.queues.waiting_online[0]
        hit = self.queues.kv.match_prefix(request)
        left = request.num_tokens - hit.num_tokens
        chunk = self._chunk(step, left, hit.num_tokens, limit_s)
        seats = max(self.queues.num_running + 1 - self.config.max_num_seqs, 0)
        cost = self.queues.kv.admission_cost(hit, left)
        if chunk == 0 or not self.preemptor.make_room(cost, self._victims(step, request), set(hit.block_ids), seats):
            return False
        step.admit(request, hit, chunk)
        return True

    # ---- offline ----

    def _pack_offline(self, step: StepBuilder, limit_s: float, num_dropped: int) -> None:
        """Resident ones in order of admission, then the pool, as long as the step stays within the least slack.

        Nobody leaves the pool in a step that dropped somebody: there had been ``num_dropped`` before it.
        """
        for request in list(self.queues.running_offline.values()):
            if request.request_id not in self.queues.running_offline:
                continue  # dropped for an earlier one
            chunk = self._chunk(step, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
            if chunk == 0:
                return
            self._continue(step, request, chunk)
        if self.preemptor.count.offline == num_dropped:
            while self._admit_offline(step, limit_s):
                pass

    def _admit_offline(self, step: StepBuilder, limit_s: float) -> bool:
        request = step.at = self.queues.pool.peek()
        if request is None or self.queues.num_running >= self.config.max_num_seqs:
            return False
        hit = self.queues.kv.match_prefix(request)
        left = request.num_tokens - hit.num_tokens
        chunk = self._chunk(step, left, hit.num_tokens, limit_s)
        if chunk == 0 or self.queues.kv.admission_cost(hit, left) > self.queues.kv.pool.num_available:
            return False
        self._admit_head(step, request, hit, chunk)
        return True

    # ---- both ----

    def _chunk(self, step: StepBuilder, num_tokens: int, context_tokens: int, limit_s: float) -> int:
        return step.budget.largest_chunk(num_tokens, context_tokens, limit_s)

    def _continue(self, step: StepBuilder, request: Request, num_tokens: int) -> None:
        """Adds a running request if it has tokens and room; else it sits this step out and keeps its KV."""
        step.at = request
        if request.request_id not in self.queues.running_online and request.is_online:
            return  # dropped for an earlier one
        if num_tokens == 0 or step.budget.tokens_left == 0:
            return
        num_blocks = self.queues.kv.blocks_needed(request, num_tokens)
        has_room = num_blocks <= self.queues.kv.pool.num_available
        if has_room or self.preemptor.make_room(num_blocks, self._victims(step, request)):
            step.add(request, num_tokens)

    def _victims(self, step: StepBuilder, request: Request) -> Iterator[Request]:
        """Those that come after the request in order of (priority, arrival), last first: offline ones before online."""
        order = priority_order(request)
        running = sorted(self.queues.running(), key=priority_order, reverse=True)
        return (r for r in running if r.last_step != step.index and priority_order(r) > order)
