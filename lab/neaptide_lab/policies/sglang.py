"""Policy ``lpm``: SGLang's scheduler with ``--schedule-policy lpm``.

Semantics of ``managers/scheduler.py``, ``schedule_policy.py`` and ``schedule_batch.py`` (0.4 to 0.5), without mixed
chunks, priorities and overlap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from neaptide.policy import (
    CostModel,
    Draft,
    HeadroomPredictor,
    KVCacheManager,
    OneQueueScheduler,
    PrefixHit,
    Request,
    SchedulerConfig,
    arrival_order,
)

CLIP_MAX_NEW_TOKENS = 4096
"""Largest number of output tokens expected of a request."""
MAX_SORTED = 128
"""Longest queue that is sorted by prefix; matching every prefix of a longer one would take too long."""
IN_BATCH_TOKENS = 32
"""A request that finds at most this much in the cache, and at least this much in one ahead of it in the queue, waits
until that one is computed."""
INITIAL_RATIO = 0.7
MIN_RATIO = 0.14 * INITIAL_RATIO
RATIO_DECAY = (INITIAL_RATIO - MIN_RATIO) / 600
"""Decay of the ratio per decode step without a retraction."""
RETRACT_TOKENS = 20
"""Room per request that a retraction makes."""


def future_tokens(request: Request) -> int:
    """Output tokens that the request may still make, as far as the scheduler can know."""
    return min(max(request.params.max_tokens - request.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)


def is_prompt(request: Request) -> bool:
    """Whether the last chunk of its prompt is still to be computed."""
    return request.num_output_tokens == 0 or request.num_uncomputed_tokens > 1


@dataclass(slots=True)
class PrefillBudget:
    """Rest of a prefill step's budget."""

    chunk_tokens: int
    promised_tokens: float
    """KV tokens that running and admitted requests are expected to add by decoding."""


@dataclass(slots=True)
class LpmState:
    """State that the policy keeps from step to step."""

    ratio: float = INITIAL_RATIO
    """Fraction of the running requests' possible output for which memory is reserved."""
    full_at: int | None = None
    """Number of running requests when one had to wait for room; none is admitted until there are fewer."""


class Lpm(OneQueueScheduler):
    """Longest prefix match first. A step prefills if a request can be admitted, otherwise all running requests decode.

    A request is admitted if its prompt and all its possible output fit together with ``ratio`` of the possible output
    of the running ones. The ratio falls while decoding goes well. When blocks run out, the requests with the least
    output (then the longest prompt) go back to the queue, and the ratio is set to the used share of the others' limits.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, cost_model: CostModel, headroom: HeadroomPredictor
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self._state = LpmState()

    @property
    def ratio(self) -> float:
        return self._state.ratio

    def pack(self, draft: Draft) -> float:
        state = draft.notes = replace(self._state)
        num_running = draft.num_running
        if num_running == 0:
            state.ratio = INITIAL_RATIO
        if num_running == 0 or (state.full_at is not None and num_running < state.full_at):
            state.full_at = None
        self._pack_prefills(draft, state)
        if not draft.num_parts:
            self._pack_decodes(draft, state)
        while not draft.num_parts and len(prompts := self._prompts(draft)) > 1:
            # Only prompts run, and they block each other. SGLang never has two prompts; ours may after a pause.
            draft.preempt(prompts[-1])
            self._pack_prefills(draft, state)
        draft.at = None
        return math.inf

    def remember(self, draft: Draft) -> None:
        self._state = draft.notes

    def _prompts(self, draft: Draft) -> list[Request]:
        """Running requests with a started and unfinished prompt."""
        return [request for request in self._running(draft) if is_prompt(request)]

    # ---- prefill ----

    def _pack_prefills(self, draft: Draft, state: LpmState) -> None:
        prompts = self._prompts(draft)
        can_drop = self.offline_paused and draft.num_running_offline > 0
        if state.full_at is not None and not prompts and not can_drop:
            return
        promised = state.ratio * sum(future_tokens(r) for r in self._running(draft) if not is_prompt(r))
        budget = PrefillBudget(self.max_step_tokens, promised)
        for request in prompts:
            draft.at = request
            self._continue_prompt(draft, request, budget)
        for request in self._waiting(draft):
            draft.at = request
            if budget.chunk_tokens <= 0:
                break
            if not self._find_slot(draft) or not self._admit(draft, request, budget):
                state.full_at = draft.num_running
                break

    def _tokens_left(self, draft: Draft, budget: PrefillBudget) -> float:
        return draft.kv.available * draft.kv.block_size - budget.promised_tokens

    def _continue_prompt(self, draft: Draft, request: Request, budget: PrefillBudget) -> None:
        kv = draft.kv
        left = kv.num_uncomputed(request)
        reserved = int(self._tokens_left(draft, budget))
        # A started prompt continues even without promised tokens.
        chunk = min(left, budget.chunk_tokens, reserved if reserved > 0 else budget.chunk_tokens)
        while not kv.fits(kv.blocks_needed(request, chunk)) and self._drop_paused(draft):
            pass
        in_blocks = (len(kv.blocks_of(request)) + kv.available) * kv.block_size - kv.num_computed(request)
        chunk = min(chunk, in_blocks)
        if chunk > 0:
            draft.add(request, chunk)
            budget.chunk_tokens -= chunk
            budget.promised_tokens += future_tokens(request) if chunk == left else 0

    def _admit(self, draft: Draft, request: Request, budget: PrefillBudget) -> bool:
        """Admits a waiting request with its prompt or the first chunk; returns False if memory does not allow it."""
        kv = draft.kv
        hit = kv.match_prefix(request)
        left = request.num_known_tokens - hit.num_tokens
        while not self._is_admissible(draft, request, hit, budget):
            if not self._drop_paused(draft):
                return False
        chunk = min(left, budget.chunk_tokens)
        draft.admit(request, hit, chunk)
        budget.chunk_tokens -= chunk
        budget.promised_tokens += kv.block_size + (future_tokens(request) if chunk == left else 0)
        return True

    def _is_admissible(self, draft: Draft, request: Request, hit: PrefixHit, budget: PrefillBudget) -> bool:
        kv = draft.kv
        cost_blocks = kv.admission_cost(hit, request.num_known_tokens - hit.num_tokens)
        if draft.num_running == 0:
            return kv.fits(cost_blocks)
        # One block more, as in SGLang's paged pool: the last page of a request is seldom full.
        needed = (cost_blocks + 1) * kv.block_size + future_tokens(request)
        return needed < self._tokens_left(draft, budget)

    def _waiting(self, draft: Draft) -> Iterator[Request]:
        """Waiting requests in order; each one is admitted before the next is requested."""
        num_offline = 0 if self.offline_paused else len(draft.pool)
        is_short = len(draft.waiting_online) + num_offline <= MAX_SORTED
        if not is_short or not draft.kv.enable_prefix_cache:
            while (head := self._waiting_head(draft)) is not None:
                yield head
            return
        offline = draft.draw_pool(num_offline)
        yield from self._by_longest_prefix(draft, sorted(draft.waiting_online + offline, key=arrival_order))

    def _by_longest_prefix(self, draft: Draft, waiting: Sequence[Request]) -> list[Request]:
        """Longest cached prefix first; last those that share an uncached prefix with an earlier one."""
        seen: set[bytes] = set()
        keys: dict[Request, float] = {}
        for request in waiting:
            num_cached = draft.kv.match_prefix(request).num_tokens
            keys[request] = -num_cached
            if num_cached > IN_BATCH_TOKENS:
                continue
            shared = 0
            for block_hash in request.block_hashes:
                if block_hash not in seen:
                    break
                shared += 1
            if shared * draft.kv.block_size >= IN_BATCH_TOKENS:
                keys[request] = math.inf
            else:
                seen.update(request.block_hashes)
        return sorted(waiting, key=keys.__getitem__)

    # ---- decode ----

    def _pack_decodes(self, draft: Draft, state: LpmState) -> None:
        kv = draft.kv
        decodes = [request for request in self._running(draft) if not is_prompt(request)]
        needed = sum(kv.blocks_needed(request, 1) for request in decodes)
        if self._find_room(draft, needed):
            state.ratio = max(state.ratio - RATIO_DECAY, MIN_RATIO)
        else:
            decodes = self._retract(draft, decodes, state)
        for request in decodes[: draft.budget.tokens_left]:
            draft.at = request
            draft.add(request, kv.num_uncomputed(request))

    def _retract(self, draft: Draft, decodes: list[Request], state: LpmState) -> list[Request]:
        """Returns requests to the queue until the others have room for several steps; returns the others."""
        kv = draft.kv
        kept = sorted(decodes, key=lambda r: (-r.num_output_tokens, r.num_prompt_tokens))
        blocks_each = -(-RETRACT_TOKENS // kv.block_size)
        is_first = True
        while len(kept) > 1 and (is_first or kv.available < len(kept) * blocks_each):
            draft.preempt(kept.pop())
            is_first = False
        if not kv.fits(kv.blocks_needed(kept[0], 1)):
            # The last one competes with a started prompt, which was admitted later.
            for request in self._prompts(draft):
                draft.preempt(request)
        used = sum(r.num_output_tokens + RETRACT_TOKENS for r in kept)
        state.ratio = min(1.0, used / sum(r.params.max_tokens for r in kept))
        return sorted(kept, key=lambda request: request.admission_index)
