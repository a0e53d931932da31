"""QoServe (ASPLOS'26, doi 10.1145/3779212.3790206), which was Niyama (arXiv 2503.22562).

Sources: the paper's abstract, introduction and summaries of its sections 3 and 4; the authors' published scheduler,
``deadline_scheduler.py`` and ``sequence.py`` in branch ``niyama_asplos2026`` of ``microsoft/sarathi-serve``. The whole
text of section 3 was not at hand. Where paper and code differ, the code is followed: only a prompt that has not started
is relegated, and relegated prompts wait behind the others in one queue.

Differences: step times come from the engine's cost model instead of the authors' linear fit or random forest. Memory is
found as in vLLM, because their engine cannot preempt. Their tiers with a deadline for the last token are not modelled.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from heapq import merge
from typing import ClassVar

from neaptide.policy import (
    BatchShape,
    CostModel,
    Draft,
    HeadroomPredictor,
    KVCacheManager,
    OnlineOrder,
    Request,
    SchedulerConfig,
    Step,
)
from neaptide_lab.policies.deadline_chunks import (
    DeadlineChunkScheduler,
    due_from_arrival_s,
    due_from_first_token_s,
)

ALPHA_S = 0.008
"""Seconds by which one prompt token puts a request back: the paper's value for a constant load."""
SAFETY = 1.2
"""Factor on a predicted step time, which must stay below the streams' slack."""
LEAST_STEP_TOKENS = 128
"""Tokens of a step without any slack."""
STEP_UNIT_TOKENS = 256
"""Sizes of larger steps are multiples of this."""
LOW_MEMORY_STEP_TOKENS = 512
"""Most tokens of a step while memory is low."""
MEMORY_STEPS, LOW_MEMORY_TOKENS = 32, 1000
"""Memory is low if this many steps have fewer than so many tokens each."""
RATE_MEMORY = 0.995
"""Weight of the past in the moving average of the prefill rate."""

HybridKey = tuple[float, float, str]


def hybrid_order(alpha_s: float, counts_from_arrival: bool = True) -> OnlineOrder:
    """Sort key: the next deadline, put back by ``alpha_s`` for every token that a waiting request lacks.

    0 is earliest deadline first; a large value is shortest job first.
    """
    due_s = due_from_arrival_s if counts_from_arrival else due_from_first_token_s

    def key(request: Request) -> HybridKey:
        return (due_s(request) + alpha_s * request.num_known_tokens, request.arrival_s, request.request_id)

    return key


def step_sizes(most_tokens: int) -> list[int]:
    """The sizes of a step among which dynamic chunking chooses: 128, 256, 512, 768, ..., and the engine's limit."""
    sizes = [LEAST_STEP_TOKENS, *range(STEP_UNIT_TOKENS, most_tokens, STEP_UNIT_TOKENS)]
    return [*(size for size in sizes if size < most_tokens), most_tokens]


class QoServe(DeadlineChunkScheduler):
    """Hybrid priority, dynamic chunks, eager relegation."""

    alpha_s: ClassVar[float] = ALPHA_S
    online_order: ClassVar[OnlineOrder] = staticmethod(hybrid_order(ALPHA_S))

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, cost_model: CostModel, headroom: HeadroomPredictor
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self._relegated: set[Request] = set()
        self._prefill_rate: float | None = None
        """Prompt tokens per second; None before the first measured one, when the cost model is asked."""

    def observe_step(self, step: Step, seconds: float) -> None:
        tokens = step.plan.shape.prefill_tokens
        if tokens and seconds > 0.0:
            before = self.prefill_rate()
            self._prefill_rate = RATE_MEMORY * before + (1.0 - RATE_MEMORY) * tokens / seconds

    def remember(self, draft: Draft) -> None:
        self._relegated.update(draft.notes)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._relegated.discard(request)

    def pack(self, draft: Draft) -> float:
        draft.notes = []
        streams = self.decode(draft, self.streams(draft))
        slack_s = min((self.due_s(request) for request in streams), default=math.inf) - draft.now_s
        prompts = list(self.in_order(draft))
        size = self.step_size(draft, prompts[0] if prompts else None, slack_s)
        left = self.serve(draft, self.relegating(draft, prompts), size - draft.num_parts)
        self.fill(draft, left, slack_s / SAFETY)
        return max(slack_s, 0.0)

    # ---- hybrid priority ----

    def priority(self, draft: Draft, request: Request) -> HybridKey:
        """``hybrid_order`` with what a running request still lacks."""
        lacking = draft.kv.num_uncomputed(request) if draft.is_running(request) else request.num_known_tokens
        return (self.due_s(request) + self.alpha_s * lacking, request.arrival_s, request.request_id)

    def in_order(self, draft: Draft) -> Iterator[Request]:
        """Online prompts, running and waiting, by hybrid priority; those that were relegated before come last."""
        lacking = {request: self.priority(draft, request) for request in self.prompts(draft)}
        order = type(self).online_order
        running = sorted(lacking, key=lacking.__getitem__)
        relegated = []
        for request in merge(running, list(draft.waiting_online), key=lambda r: lacking.get(r) or order(r)):
            if request in self._relegated:
                relegated.append(request)
            else:
                yield request
        yield from relegated

    # ---- eager relegation ----

    def relegating(self, draft: Draft, prompts: list[Request]) -> Iterator[Request]:
        """The prompts in order. One that cannot start in time is relegated when its turn comes."""
        relegated: list[Request] = []
        rest = iter(prompts)
        for request in rest:
            if request in self._relegated:
                relegated.append(request)
                break
            if self.is_doomed(draft, request):
                relegated.append(request)
                draft.notes.append(request)
            else:
                yield request
        yield from sorted([*relegated, *rest], key=lambda each: self.priority(draft, each))

    def is_doomed(self, draft: Draft, request: Request) -> bool:
        """Whether a prompt that has not started would be late if it started now."""
        if request.num_output_tokens or draft.is_running(request):
            return False
        return draft.now_s + request.num_known_tokens / self.prefill_rate() > self.due_s(request)

    def prefill_rate(self) -> float:
        """Recent prompt tokens per second of steps with prompts."""
        if self._prefill_rate is not None:
            return self._prefill_rate
        return self.max_step_tokens / self.cost_model.predict(BatchShape().plus(self.max_step_tokens, 0)).seconds

    # ---- dynamic chunks ----

    def step_size(self, draft: Draft, first: Request | None, slack_s: float) -> int:
        """The largest step, in tokens, whose prediction with a safety factor fits into the slack.

        The context of the first prompt stands for those of all, as in the authors' code.
        """
        sizes = step_sizes(self.max_step_tokens)
        if slack_s <= 0.0:
            return sizes[0]
        free_tokens = (self.kv.num_blocks - self.kv.num_online) * self.kv.block_size
        if free_tokens // MEMORY_STEPS < LOW_MEMORY_TOKENS:
            sizes = [size for size in sizes if size <= LOW_MEMORY_STEP_TOKENS] or sizes[:1]
        context = draft.kv.num_computed(first) if first is not None and draft.is_running(first) else 0
        shape, num_decodes = draft.budget.shape, draft.num_parts

        def is_over(size: int) -> bool:
            chunk = size - num_decodes
            shape_with = shape.plus(chunk, context) if chunk > 0 else shape
            return SAFETY * self.cost_model.predict(shape_with).seconds > slack_s

        return sizes[max(bisect_left(sizes, True, key=is_over) - 1, 0)]


class QoServeAlpha1(QoServe):
    """1 ms per token: the paper's value for a light load."""

    alpha_s = 0.001
    online_order: ClassVar[OnlineOrder] = staticmethod(hybrid_order(0.001))


class QoServePaced(QoServe):
    """Deadlines from the first token, which is how TPOT is measured here."""

    counts_from_arrival = False
    online_order: ClassVar[OnlineOrder] = staticmethod(hybrid_order(ALPHA_S, counts_from_arrival=False))


class QoServePacedAlpha1(QoServe):
    """Deadlines from the first token, and 1 ms per token."""

    counts_from_arrival, alpha_s = False, 0.001
    online_order: ClassVar[OnlineOrder] = staticmethod(hybrid_order(0.001, counts_from_arrival=False))
