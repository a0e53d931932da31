"""Filling what online work leaves of a step with offline work."""

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import HeadroomPredictor
from neaptide.engine.request import Request
from neaptide.engine.scheduler.step import StepBuilder

MIN_CHUNK_TOKENS = 16
"""A smaller chunk of a longer prompt costs more in fixed overhead than it brings."""


class OfflineFill:
    """Resident decodes, resident prompts, then the pool in its order, while time, tokens and blocks last.

    Resident requests need not take part: in a tight step they sit out and keep their KV, and the one that sat
    out longest is the first to come back.
    """

    def __init__(self, config: SchedulerConfig, headroom: HeadroomPredictor) -> None:
        self._config = config
        self._headroom = headroom

    def fill(self, step: StepBuilder, limit_s: float) -> None:
        queues = step.queues
        resident = sorted(queues.running_offline.values(), key=lambda r: (r.last_step, r.admission_index))
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in resident:
            (decodes if request.num_uncomputed_tokens == 1 else prefills).append(request)
        contexts = [r.num_computed_tokens + 1 for r in decodes]
        count = step.budget.most_decodes(contexts, limit_s)
        for request in decodes[: count if count or step.scheduled else 1]:
            step.at = request
            self._continue(step, request, 1)
        if count < len(decodes):
            return
        for request in prefills:
            step.at = request
            chunk = self._chunk(step, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
            if chunk == 0:
                return
            self._continue(step, request, chunk)
        step.at = None
        while self._admit_next(step, limit_s):
            pass

    def _chunk(self, step: StepBuilder, num_tokens: int, context_tokens: int, limit_s: float) -> int:
        """Tokens that fit; 0 if too few to be worth a step. An otherwise empty step takes the least chunk whatever
        it costs: a limit that nothing fits into must not stop offline work for good."""
        least = min(num_tokens, MIN_CHUNK_TOKENS, self._config.max_num_batched_tokens)
        chunk = step.budget.largest_chunk(num_tokens, context_tokens, limit_s)
        if chunk >= least:
            return chunk
        return 0 if step.scheduled else least

    def _blocks_left(self, step: StepBuilder) -> int:
        """Blocks that offline work may still take without touching the share kept for online work."""
        pool = step.queues.kv.pool
        reserved = self._headroom.headroom_blocks(step.now_s)
        most = min(pool.num_blocks - reserved, int(self._config.offline_max_kv_ratio * pool.num_blocks))
        return min(pool.num_available, most - pool.num_offline)

    def _continue(self, step: StepBuilder, request: Request, num_tokens: int) -> None:
        """Adds a resident request, or lets it sit out when it cannot grow."""
        if request.request_id not in step.queues.running_offline:
            return  # an older one needed its blocks
        needed = step.queues.kv.blocks_needed(request, num_tokens)
        is_alone = len(step.queues.running_offline) == 1
        while needed and needed > (step.queues.kv.pool.num_available if is_alone else self._blocks_left(step)):
            victim = next(step.preemptor.offline_victims(step.index), None)
            if victim is None or victim.admission_index <= request.admission_index:
                return
            step.preemptor.preempt(victim)
            is_alone = len(step.queues.running_offline) == 1
        step.add(request, num_tokens)

    def _admit_next(self, step: StepBuilder, limit_s: float) -> bool:
        queues = step.queues
        request = step.at = queues.pool.peek()
        if request is None or queues.num_running >= self._config.max_num_seqs:
            return False
        hit = queues.kv.match_prefix(request)
        chunk = self._chunk(step, request.num_tokens - hit.num_tokens, hit.num_tokens, limit_s)
        if chunk == 0:
            return False
        # The whole prompt is reserved for, not only this chunk: half a prompt is of no use to anybody.
        cost = queues.kv.admission_cost(hit, request.num_tokens - hit.num_tokens)
        is_alone = not queues.running_offline and not queues.waiting_online
        if cost > (queues.kv.pool.num_available if is_alone else self._blocks_left(step)):
            return False
        queues.pool.pop()
        step.admit(request, hit, chunk)
        return True
