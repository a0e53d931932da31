"""BROS (arXiv 2504.09590), section 4: real-time requests by urgency, then best-effort ones.

RT and BE are the paper's names for online and offline. Its bidirectional blocks (section 5) are not here: a request
that lacks blocks drops others, which are computed again, as in the paper's own run without them (section 7.4.1).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from heapq import merge
from typing import ClassVar

from neaptide.engine.batch import BatchShape, StepPlan
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.baselines.whole_prompts import WholePromptScheduler, is_waiting
from neaptide.engine.scheduler.queues import OnlineOrder
from neaptide.engine.scheduler.step import StepBuilder

MEAN_WEIGHT = 0.1
"""Weight of the newest step in the moving average of step times; the paper gives no window."""


class AdaptiveBatchSize:
    """Requests of one batch at most: one more after every step without early return, else back to the initial size.

    Section 4.2, "Adaptive Batch Sizing".
    """

    def __init__(self, initial: int, most: int) -> None:
        self._initial = min(initial, most)
        self._most = most
        self.limit = self._initial

    def observe(self, returned_early: bool) -> None:
        self.limit = self._initial if returned_early else min(self.limit + 1, self._most)


class _Draft:
    """RT requests chosen for a step, most urgent first. They take blocks only when it is settled that they stay."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self.chosen: list[Request] = []
        self.num_blocks = 0
        """That they lack."""
        self.num_admissions = 0
        self.shape = BatchShape()
        """Of the whole batch, BE requests included."""
        self._shape_without_last: BatchShape | None = None

    @property
    def num_requests(self) -> int:
        return len(self.chosen) + len(self._step.scheduled)

    def take(self, request: Request, num_blocks: int) -> None:
        self.chosen.append(request)
        self.num_blocks += num_blocks
        self.num_admissions += is_waiting(request)
        self.count(request)

    def count(self, request: Request) -> None:
        """Adds a request to the shape: one of the chosen, or a BE request that has been added to the step."""
        self.shape.add(request.num_uncomputed_tokens, request.num_computed_tokens)
        self._shape_without_last = None

    def shape_without_last(self) -> BatchShape:
        if self._shape_without_last is None:
            shape = self._step.budget.shape.copy()
            for request in self.chosen[:-1]:
                shape.add(request.num_uncomputed_tokens, request.num_computed_tokens)
            self._shape_without_last = shape
        return self._shape_without_last

    def drop_last(self, num_blocks: int) -> None:
        self.shape = self.shape_without_last()
        self._shape_without_last = None
        self.num_blocks -= num_blocks
        self.num_admissions -= is_waiting(self.chosen.pop())


def waiting_order(request: Request) -> tuple[bool, float, float, str]:
    """Requests that were dropped after their first token, then the others by the deadline of their first token."""
    return (
        request.num_output_tokens == 0,
        request.arrival_s + request.ttft_slo_s,
        request.arrival_s,
        request.request_id,
    )


class BrosScheduler(WholePromptScheduler):
    """Algorithm 1 with token groups of one token.

    Deadlines are the paper's: TTFT after arrival, then TPOT after the last returned token. Times are predicted
    without a margin.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(waiting_order)
    initial_batch_size: ClassVar[int] = 16
    """The paper's number is lost."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.batch_size = AdaptiveBatchSize(self.initial_batch_size, config.max_num_seqs)
        self._mean_step_s = 0.0
        self._returned_s: dict[str, float] = {}
        """When the last token of each RT request was returned."""
        self._noted: StepBuilder | None = None

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        weight = MEAN_WEIGHT if self._mean_step_s else 1.0
        self._mean_step_s += weight * (seconds - self._mean_step_s)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._returned_s.pop(request.request_id, None)

    def _pack(self, step: StepBuilder) -> float:
        self._note_returned_tokens(step.now_s)
        slack_s = self.tightest_slack_s(step.now_s)
        draft, num_dropped = _Draft(step), self._num_dropped
        returned_early = self._choose_urgent(step, draft, slack_s)
        if not returned_early and not self.offline_paused:
            self._add_resident_best_effort(step, draft, slack_s)
            if self._num_dropped == num_dropped:
                self._admit_best_effort(step, draft, slack_s)
        for request in draft.chosen:
            step.at = request
            self._take(step, request)
        if step.scheduled:
            self.batch_size.observe(returned_early)
        return slack_s

    def _note_returned_tokens(self, now_s: float) -> None:
        """The step before this one has ended by now, and a request that took part in it has a new token."""
        if self.last is None or self.last is self._noted:
            return
        self._noted = self.last
        for request, _ in self.last.scheduled:
            if request.is_online and request.status is not RequestStatus.FINISHED:
                self._returned_s[request.request_id] = now_s

    # ---- step 1: RT ----

    def urgency(self, request: Request) -> tuple[float, float, str]:
        """By the deadline of its next token."""
        returned_s = self._returned_s.get(request.request_id)
        if returned_s is None:
            return (request.arrival_s + request.ttft_slo_s, request.arrival_s, request.request_id)
        return (returned_s + request.tpot_slo_s, request.arrival_s, request.request_id)

    def pull(self) -> Iterator[Request]:
        """RT requests, most urgent first.

        Section 4.2, "Request pulling optimization": only requests with tokens are sorted; those that wait for their
        first stand in order already, and the two are polled in turn.
        """
        waiting = self.queues.waiting_online
        first = bisect_left(waiting, True, key=lambda r: r.num_output_tokens == 0)
        pending = sorted([*self.queues.running_online.values(), *waiting[:first]], key=self.urgency)
        return merge(pending, waiting[first:], key=self.urgency)

    def tightest_slack_s(self, now_s: float) -> float:
        """Least remaining time of the RT requests that can still make their deadline; infinite without any.

        A request that is lost would otherwise stop all the others: the paper means "the one closest to its deadline
        [that] does not fail".
        """
        for request in self.pull():
            remaining_s = self.urgency(request)[0] - now_s
            if remaining_s > 0.0 and self._seconds(BatchShape(), request) <= remaining_s:
                return remaining_s
        return math.inf

    def _choose_urgent(self, step: StepBuilder, draft: _Draft, slack_s: float) -> bool:
        """Lines 5-15: until the batch is full, or the step would outlast the tightest slack.

        Returns whether the latter was the case: the early return of lines 11-12. The first request is taken anyway:
        an empty batch would help nobody. Behind a waiting request that lacks memory only resident ones are taken,
        and behind a resident one that had others dropped.
        """
        can_admit, num_dropped = True, self.preemptor.count.online
        for request in self.pull():
            if draft.num_requests >= self.batch_size.limit:
                break
            if is_waiting(request) and not can_admit:
                continue
            step.at = request
            outlasts = self._seconds(draft.shape, request) > slack_s
            if outlasts and draft.chosen:
                return True
            num_blocks = self._blocks(request)
            has_room = self._fits(draft.shape, request) and self._make_urgent_room(draft, request, num_blocks)
            if not has_room:
                can_admit &= not is_waiting(request)
                continue
            can_admit &= self.preemptor.count.online == num_dropped
            draft.take(request, num_blocks)
            if outlasts:
                return True
        step.at = None
        return False

    def _make_urgent_room(self, draft: _Draft, request: Request, num_blocks: int) -> bool:
        """Drops BE requests, youngest first. A resident request that must grow may also drop RT requests with more
        remaining time, most first (section 5.2); if a waiting one could, they would drop each other in turn."""
        available = self.queues.kv.pool.num_available
        seats = max(self._num_seats_taken(draft) + is_waiting(request) - self.config.max_num_seqs, 0)
        if not seats and draft.num_blocks + num_blocks <= available:
            return True

        def victims() -> Iterator[Request]:
            yield from reversed(list(self.queues.running_offline.values()))
            if not is_waiting(request):
                urgency = self.urgency(request)
                later = [r for r in self.queues.running_online.values() if self.urgency(r) > urgency]
                yield from sorted(later, key=self.urgency, reverse=True)

        return self.preemptor.make_room(draft.num_blocks + num_blocks, victims(), seats=seats)

    # ---- step 2: BE ----

    def _add_resident_best_effort(self, step: StepBuilder, draft: _Draft, slack_s: float) -> None:
        """Lines 17-33. Without checkpoints every BE request costs the same to resume: in order of admission."""
        for request in list(self.queues.running_offline.values()):
            if draft.num_requests >= self.batch_size.limit and not draft.chosen:
                return
            if request.status is RequestStatus.RUNNING:  # not dropped for an older one
                step.at = request
                self._add_or_replace(step, draft, request, slack_s)
        step.at = None

    def _admit_best_effort(self, step: StepBuilder, draft: _Draft, slack_s: float) -> None:
        """Lines 17-33 for the pool, in its order. Not in a step that dropped requests: they stand first in it."""
        while self._num_seats_taken(draft) < self.config.max_num_seqs:
            request = step.at = self.queues.pool.peek()
            if request is None or not self._add_or_replace(step, draft, request, slack_s):
                return

    def _add_or_replace(self, step: StepBuilder, draft: _Draft, request: Request, slack_s: float) -> bool:
        """Adds a BE request to the batch, or puts it in place of the least urgent RT request that can wait a step."""
        num_blocks = self._blocks(request)
        if not (
            draft.num_requests < self.batch_size.limit
            and self._fits(draft.shape, request)
            and self._seconds(draft.shape, request) <= slack_s
            and self._make_best_effort_room(step, draft, request, num_blocks)
        ):
            if not draft.chosen:
                return False
            spared = draft.chosen[-1]
            spared_blocks = self._blocks(spared)
            if not self._can_wait(step, draft, spared, request, slack_s):
                return False
            if draft.num_blocks - spared_blocks + num_blocks > self.queues.kv.pool.num_available:
                return False
            draft.drop_last(spared_blocks)
        draft.count(request)
        self._take(step, request)
        return True

    def _can_wait(self, step: StepBuilder, draft: _Draft, spared: Request, instead: Request, slack_s: float) -> bool:
        """Constraint (6) for an RT request left out: this step and its own next one end before its deadline."""
        shape = draft.shape_without_last()
        step_s = self._seconds(shape, instead)
        remaining_s = self.urgency(spared)[0] - step.now_s
        next_s = self._mean_step_s or step_s
        return self._fits(shape, instead) and step_s <= slack_s and step_s + next_s <= remaining_s

    def _make_best_effort_room(self, step: StepBuilder, draft: _Draft, request: Request, num_blocks: int) -> bool:
        """A resident request may drop younger ones to grow; a new one takes what is free."""
        if draft.num_blocks + num_blocks <= self.queues.kv.pool.num_available:
            return True
        younger = (r for r in self.preemptor.offline_victims(step.index) if r.admission_index > request.admission_index)
        return not is_waiting(request) and self.preemptor.make_room(draft.num_blocks + num_blocks, younger)

    # ---- both ----

    @property
    def _num_dropped(self) -> int:
        return self.preemptor.count.offline + self.preemptor.count.online

    def _num_seats_taken(self, draft: _Draft) -> int:
        return self.queues.num_running + draft.num_admissions

    def _fits(self, shape: BatchShape, request: Request) -> bool:
        return shape.num_tokens + request.num_uncomputed_tokens <= self.max_step_tokens

    def _seconds(self, shape: BatchShape, request: Request) -> float:
        """Predicted time of the batch with one more request."""
        return self.cost_model.predict(shape.plus(request.num_uncomputed_tokens, request.num_computed_tokens)).seconds
