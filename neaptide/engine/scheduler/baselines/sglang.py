"""``lpm``: SGLang's scheduler with ``--schedule-policy lpm``.

Semantics of ``managers/scheduler.py``, ``schedule_policy.py`` and ``schedule_batch.py`` (0.4 to 0.5), without mixed
chunks, priorities and overlap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager, PrefixHit
from neaptide.engine.request import Request
from neaptide.engine.scheduler.baselines.one_queue import OneQueueScheduler, arrival_order
from neaptide.engine.scheduler.step import StepBuilder

CLIP_MAX_NEW_TOKENS = 4096
"""No request is expected to make more tokens than these."""
MAX_SORTED = 128
"""A longer queue is served by arrival: matching every prefix would take too long."""
IN_BATCH_TOKENS = 32
"""A request that finds at most so much in the cache, and at least so much in one ahead of it in the queue, steps back
until that one is computed."""
INITIAL_RATIO = 0.7
MIN_RATIO = 0.14 * INITIAL_RATIO
RATIO_DECAY = (INITIAL_RATIO - MIN_RATIO) / 600
"""Per decode step that found its blocks."""
RETRACT_TOKENS = 20
"""Room per request that a retraction makes."""


def future_tokens(request: Request) -> int:
    """Output tokens that it may still make, as far as the scheduler can know."""
    return min(max(request.params.max_tokens - request.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)


def is_prompt(request: Request) -> bool:
    """Whether the last chunk of its prompt is still to come."""
    return request.num_output_tokens == 0 or request.num_uncomputed_tokens > 1


@dataclass(slots=True)
class PrefillBudget:
    """What a prefill step may still take."""

    chunk_tokens: int
    promised_tokens: float
    """KV tokens that running and admitted requests are expected to add by decoding."""


class Lpm(OneQueueScheduler):
    """Longest prefix match first. A step prefills if anybody can be admitted, else decodes everybody.

    A request is admitted if its prompt and all output it may make fit beside ``ratio`` of what the running ones may
    still make. The ratio falls while decoding goes well; when blocks run out, those with the least output (then the
    longest prompt) go back to the queue and the ratio is set to what the others have used of their limits.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, cost_model: CostModel, headroom: HeadroomPredictor
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.ratio = INITIAL_RATIO
        self._full_at: int | None = None
        """Running requests when somebody had to wait for room: nobody is admitted until there are fewer."""

    def _pack(self, step: StepBuilder) -> float:
        num_running = self.queues.num_running
        if num_running == 0:
            self.ratio = INITIAL_RATIO
        if num_running == 0 or (self._full_at is not None and num_running < self._full_at):
            self._full_at = None
        self._pack_prefills(step)
        if not step.scheduled:
            self._pack_decodes(step)
        while not step.scheduled and len(prompts := self._prompts()) > 1:
            # Only prompts run, and they block each other: theirs never has two, ours may after a pause.
            self.preemptor.preempt(prompts[-1])
            self._pack_prefills(step)
        step.at = None
        return math.inf

    def _prompts(self) -> list[Request]:
        """Running requests whose prompt was begun and is not finished."""
        return [request for request in self._running() if is_prompt(request)]

    # ---- prefill ----

    def _pack_prefills(self, step: StepBuilder) -> None:
        prompts = self._prompts()
        can_drop = self.offline_paused and bool(self.queues.running_offline)
        if self._full_at is not None and not prompts and not can_drop:
            return
        promised = self.ratio * sum(future_tokens(r) for r in self._running() if not is_prompt(r))
        budget = PrefillBudget(self.max_step_tokens, promised)
        for request in prompts:
            step.at = request
            self._continue_prompt(step, request, budget)
        for request in self._waiting():
            step.at = request
            if budget.chunk_tokens <= 0:
                break
            if not self._find_seat() or not self._admit(step, request, budget):
                self._full_at = self.queues.num_running
                break

    def _tokens_left(self, budget: PrefillBudget) -> float:
        return self.queues.kv.pool.num_available * self.queues.kv.block_size - budget.promised_tokens

    def _continue_prompt(self, step: StepBuilder, request: Request, budget: PrefillBudget) -> None:
        kv = self.queues.kv
        left = request.num_uncomputed_tokens
        reserved = int(self._tokens_left(budget))
        # A prompt that was begun goes on even when nothing is left of what may be promised.
        chunk = min(left, budget.chunk_tokens, reserved if reserved > 0 else budget.chunk_tokens)
        while kv.blocks_needed(request, chunk) > kv.pool.num_available and self._drop_paused():
            pass
        in_blocks = (len(request.block_ids) + kv.pool.num_available) * kv.block_size - request.num_computed_tokens
        chunk = min(chunk, in_blocks)
        if chunk > 0:
            step.add(request, chunk)
            budget.chunk_tokens -= chunk
            budget.promised_tokens += future_tokens(request) if chunk == left else 0

    def _admit(self, step: StepBuilder, request: Request, budget: PrefillBudget) -> bool:
        """Starts a waiting request with its prompt or the first chunk of it; False if memory does not allow it."""
        kv = self.queues.kv
        hit = kv.match_prefix(request)
        left = request.num_tokens - hit.num_tokens
        while not self._is_admissible(request, hit, budget):
            if not self._drop_paused():
                return False
        chunk = min(left, budget.chunk_tokens)
        if not request.is_online:
            self.queues.pool.remove(request.request_id)
        step.admit(request, hit, chunk)
        budget.chunk_tokens -= chunk
        budget.promised_tokens += kv.block_size + (future_tokens(request) if chunk == left else 0)
        return True

    def _is_admissible(self, request: Request, hit: PrefixHit, budget: PrefillBudget) -> bool:
        kv = self.queues.kv
        cost_blocks = kv.admission_cost(hit, request.num_tokens - hit.num_tokens)
        if self.queues.num_running == 0:
            return cost_blocks <= kv.pool.num_available
        # One block more, as in a paged pool of theirs: the last page of a request is seldom full.
        needed = (cost_blocks + 1) * kv.block_size + future_tokens(request)
        return needed < self._tokens_left(budget)

    def _waiting(self) -> Iterator[Request]:
        """Waiting requests in their order; whoever is shown is admitted before the next is asked for."""
        pool = self.queues.pool
        num_offline = 0 if self.offline_paused else len(pool)
        is_short = len(self.queues.waiting_online) + num_offline <= MAX_SORTED
        if not is_short or not self.queues.kv.enable_prefix_cache:
            while (head := self._waiting_head()) is not None:
                yield head
            return
        offline: list[Request] = []
        try:
            while len(offline) < num_offline:
                offline.append(pool.pop())
        finally:
            # Back at once, as requests that aborts and cancellations find.
            for request in reversed(offline):
                pool.give_back(request)
        yield from self._by_longest_prefix(sorted(self.queues.waiting_online + offline, key=arrival_order))

    def _by_longest_prefix(self, waiting: Sequence[Request]) -> list[Request]:
        """Longest cached prefix first; last those that share an uncached prefix with one before them."""
        seen: set[bytes] = set()
        keys: dict[Request, float] = {}
        for request in waiting:
            num_cached = self.queues.kv.match_prefix(request).num_tokens
            keys[request] = -num_cached
            if num_cached > IN_BATCH_TOKENS:
                continue
            shared = 0
            for block_hash in request.block_hashes:
                if block_hash not in seen:
                    break
                shared += 1
            if shared * self.queues.kv.block_size >= IN_BATCH_TOKENS:
                keys[request] = math.inf
            else:
                seen.update(request.block_hashes)
        return sorted(waiting, key=keys.__getitem__)

    # ---- decode ----

    def _pack_decodes(self, step: StepBuilder) -> None:
        kv = self.queues.kv
        decodes = [request for request in self._running() if not is_prompt(request)]
        needed = sum(kv.blocks_needed(request, 1) for request in decodes)
        if self._find_room(needed):
            self.ratio = max(self.ratio - RATIO_DECAY, MIN_RATIO)
        else:
            decodes = self._retract(decodes)
        for request in decodes[: step.budget.tokens_left]:
            step.at = request
            step.add(request, request.num_uncomputed_tokens)

    def _retract(self, decodes: list[Request]) -> list[Request]:
        """Sends requests back to the queue until the others have room for some steps; returns the others."""
        kv = self.queues.kv
        kept = sorted(decodes, key=lambda r: (-r.num_output_tokens, r.num_prompt_tokens))
        blocks_each = -(-RETRACT_TOKENS // kv.block_size)
        is_first = True
        while len(kept) > 1 and (is_first or kv.pool.num_available < len(kept) * blocks_each):
            self.preemptor.preempt(kept.pop())
            is_first = False
        if kv.blocks_needed(kept[0], 1) > kv.pool.num_available:
            # The last one stands against a prompt that was begun: that one was admitted later.
            for request in self._prompts():
                self.preemptor.preempt(request)
        used = sum(r.num_output_tokens + RETRACT_TOKENS for r in kept)
        self.ratio = min(1.0, used / sum(r.params.max_tokens for r in kept))
        return sorted(kept, key=lambda request: request.admission_index)
