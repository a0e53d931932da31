"""Frame of ``qoserve`` and ``slidingserve``: streams decode, prompts share a chunk that deadlines bound.

Both papers schedule on top of Sarathi-Serve: a step has one token of every stream and a chunk of prompts. Neither knows
work without deadlines. Here offline work is the lowest class, as their own lower classes are: it takes what a step has
left after the prompts, and gives its blocks and slots to online requests.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar

from neaptide.policy import BatchShape, Draft, Request, RequestClass, Scheduler


def due_from_arrival_s(request: Request) -> float:
    """Deadline of the next token as both papers count it, in the engine clock's seconds.

    Token k is due at ``arrival + TTFT + (k - 1) * TPOT``. After a late first token, later ones count from it.
    """
    first_due_s = request.arrival_s + request.ttft_slo_s
    if not request.num_output_tokens:
        return first_due_s
    return max(first_due_s, request.first_token_s) + request.num_output_tokens * request.tpot_slo_s


def due_from_first_token_s(request: Request) -> float:
    """Deadline of the next token as load generators measure TPOT: an early first token gives no slack."""
    return request.next_deadline_s


class DeadlineChunkScheduler(Scheduler):
    """Steps of decodes and prompt chunks. A policy chooses the order of the prompts and the size of the chunk.

    Memory is found as in vLLM: a request starts if all of its known tokens fit, and gets blocks chunk by chunk. Online
    requests preempt offline ones, youngest first, and running ones also online requests that were admitted later.
    """

    counts_from_arrival: ClassVar[bool] = True
    """Whether token deadlines count from the arrival, as in the papers; otherwise from the first token."""

    def due_s(self, request: Request) -> float:
        return due_from_arrival_s(request) if self.counts_from_arrival else due_from_first_token_s(request)

    # ---- online ----

    def streams(self, draft: Draft) -> list[Request]:
        """Running online requests that lack the next token of their answer, earliest deadline first."""
        running = draft.running(RequestClass.ONLINE)
        streams = [r for r in running if r.num_output_tokens and draft.kv.num_uncomputed(r) == 1]
        return sorted(streams, key=lambda r: (self.due_s(r), r.admission_index))

    def prompts(self, draft: Draft) -> list[Request]:
        """Running online requests that lack tokens of their prompt, or that compute an answer again."""
        running = draft.running(RequestClass.ONLINE)
        return [r for r in running if not r.num_output_tokens or draft.kv.num_uncomputed(r) > 1]

    def decode(self, draft: Draft, streams: Iterable[Request]) -> list[Request]:
        """Schedules a token of every stream that gets its block; returns those that are scheduled."""
        scheduled = []
        for request in streams:
            draft.at = request
            if draft.budget.tokens_left <= 0:
                break
            if draft.is_running(request) and self._has_room(draft, request, 1):
                draft.add(request, 1)
                scheduled.append(request)
        draft.at = None
        return scheduled

    def serve(self, draft: Draft, prompts: Iterable[Request], num_tokens: int) -> int:
        """Gives ``num_tokens`` prompt tokens to online requests in order; returns how many are left.

        After an online request had to wait for room or was preempted, no other one starts.
        """
        can_admit, num_preempted = True, draft.preempted.online
        for request in prompts:
            most = min(num_tokens, draft.budget.tokens_left)
            if most <= 0:
                break
            draft.at = request
            can_admit &= draft.preempted.online == num_preempted
            if draft.is_running(request):
                chunk = min(draft.kv.num_uncomputed(request), most)
                if self._has_room(draft, request, chunk):
                    draft.add(request, chunk)
                    num_tokens -= chunk
            elif can_admit:
                chunk = self._start(draft, request, most)
                num_tokens -= chunk
                can_admit = chunk > 0
        draft.at = None
        return num_tokens

    def _has_room(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        """Whether a running request gets blocks for its next tokens, if need be those of others."""
        num_blocks = draft.kv.blocks_needed(request, num_tokens)
        return draft.kv.fits(num_blocks) or draft.make_room(num_blocks, self._victims(draft, request))

    def _victims(self, draft: Draft, request: Request) -> Iterator[Request]:
        def younger() -> Iterator[Request]:
            for other in reversed(draft.running(request.request_class)):
                if other.admission_index > request.admission_index and not draft.is_scheduled(other):
                    yield other

        return chain(draft.offline_victims(), younger()) if request.is_online else younger()

    def _start(self, draft: Draft, request: Request, most_tokens: int) -> int:
        """Admits a waiting online request; returns its tokens in this step, 0 without room for all of them."""
        hit = draft.kv.match_prefix(request)
        missing = request.num_known_tokens - hit.num_tokens
        slots = max(draft.num_running + 1 - self.config.max_num_seqs, 0)
        num_blocks = draft.kv.admission_cost(hit, missing)
        if not draft.make_room(num_blocks, draft.offline_victims(), keep=hit.block_ids, slots=slots):
            return 0
        chunk = min(missing, most_tokens)
        draft.admit(request, hit, chunk)
        return chunk

    # ---- offline ----

    def fill(self, draft: Draft, num_tokens: int, limit_s: float) -> None:
        """Adds offline work: at most ``num_tokens``, while the step is predicted to take at most ``limit_s``.

        Running requests go on in order of admission; then requests of the pool start, if none was preempted.
        """
        if self.offline_paused:
            return
        for request in draft.running(RequestClass.OFFLINE):
            draft.at = request
            if not draft.is_running(request):
                continue  # preempted for an older one
            chunk = self._chunk(draft, draft.kv.num_uncomputed(request), draft.kv.num_computed(request), limit_s)
            chunk = min(chunk, num_tokens)
            if chunk <= 0:
                break
            if self._has_room(draft, request, chunk):
                draft.add(request, chunk)
                num_tokens -= chunk
        while not draft.preempted.total and draft.num_running < self.config.max_num_seqs:
            head = draft.at = draft.pool.peek()
            if head is None:
                break
            hit = draft.kv.match_prefix(head)
            missing = head.num_known_tokens - hit.num_tokens
            chunk = min(self._chunk(draft, missing, hit.num_tokens, limit_s), num_tokens)
            if chunk <= 0 or not draft.kv.fits(draft.kv.admission_cost(hit, missing)):
                break
            draft.admit(head, hit, chunk)
            num_tokens -= chunk
        draft.at = None

    def _chunk(self, draft: Draft, num_tokens: int, context_tokens: int, limit_s: float) -> int:
        """The most of these tokens with which the step is predicted to take at most ``limit_s``."""
        shape, most = draft.budget.shape, min(num_tokens, draft.budget.tokens_left)
        return self.largest_chunk(shape, most, context_tokens, limit_s)

    def largest_chunk(
        self, shape: BatchShape, most_tokens: int, context_tokens: int, limit_s: float, unit: int = 1
    ) -> int:
        """The largest chunk that a step of this shape can take within ``limit_s``, by prediction without a margin.

        It is a multiple of ``unit``, or ``most_tokens``.
        """
        if most_tokens <= 0 or limit_s == math.inf:
            return max(most_tokens, 0)

        def is_over(chunk: int) -> bool:
            return self.cost_model.predict(shape.plus(chunk, context_tokens)).seconds > limit_s

        if not is_over(most_tokens):
            return most_tokens
        return unit * bisect_left(range(unit, most_tokens, unit), True, key=is_over)
