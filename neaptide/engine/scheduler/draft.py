"""Draft of a step: a value that a policy builds, and that changes nothing until it is applied."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Any

import numpy as np

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.kv.draft import PrefixHit
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.params import RequestClass
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.actions import (
    Action,
    Admit,
    DrawPool,
    Grow,
    OnCache,
    Preempt,
    PreemptionCount,
    Schedule,
    ScheduleRows,
)
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.scheduler.judged import Candidate
from neaptide.engine.scheduler.queues import Queues, deadline_order
from neaptide.engine.table import Streams


class Limit(StrEnum):
    """What kept more offline work out of a step."""

    TIME = "time"
    TOKENS = "step tokens"
    SEATS = "seats"
    MEMORY = "KV blocks"
    WORK = "nothing more waits"


class Draft:
    """Actions of a step, in order: preemptions, admissions, and the scheduled requests with their token counts.

    A draft answers queries as if its actions so far had been executed. Several drafts of one state can be made and
    compared (``budget.shape`` has the cost). ``Scheduler.apply`` executes one.
    """

    def __init__(
        self,
        index: int,
        now_s: float,
        queues: Queues,
        budget: StepBudget,
        publishes_when_planned: bool = False,
        publishes_decodes_when_planned: bool = False,
    ) -> None:
        self.index = index
        self.now_s = now_s
        self.budget = budget
        self.limit_s = math.inf
        """Time budget that the policy gave the step."""
        self.candidates: list[Candidate] = []
        """Step lengths that the policy compared. Empty if it does not report them."""
        self.chosen: list[Candidate] = []
        """The best of them for each kind of work."""
        self.offline_ended_by: Limit | None = None
        """What ended offline admissions. None while offline work is paused, or if the policy does not report it."""
        self.kept_blocks: dict[str, int] = {}
        """KV blocks reserved for other requests, by their ids."""
        self.is_abortable = False
        """Whether an online arrival may abort the step, as there is no online work. Such a step may be longer."""
        self.arrival_waits_s = math.inf
        """Time before the step's end in which an arrival waits for it instead of aborting it."""
        self.at: Request | None = None
        """The request being considered, which is at fault if planning fails."""
        self.notes: Any = None
        """State that the policy keeps once the draft is applied."""
        self.actions: list[Action] = []
        self.table = queues.table
        self.kv = queues.kv.draft()
        self._shared_reads = queues.kv.shared_reads_draft()
        self.pool = PoolDraft(queues.pool)
        self.preempted = PreemptionCount()
        self.has_offline = False
        self.num_parts = 0
        self.num_running, self.num_running_offline = queues.num_running, len(queues.running_offline)
        self._decodes, self._prompts = self.table.lacking(now_s)
        self._publishes = publishes_when_planned
        self._publishes_decodes = publishes_decodes_when_planned
        self._queues = queues
        self._waiting_online = queues.draft_waiting_online()
        self._parts: dict[Request, int] = {}
        self._admitted: dict[Request, None] = {}
        self._makes_way: set[Request] = set()
        """Preempted requests that had a slot; they may be admitted again."""
        self._row_makes_way: BoolArray | None = None
        self._row_is_scheduled: BoolArray | None = None
        self._taking_part: list[IntArray] = []
        """Scheduled slots that are not marked in ``_row_is_scheduled`` yet."""
        self._untouched = {True, False}
        """Classes (whether online) of which no slot is preempted or scheduled."""
        self._youngest_offline: list[Request] | None = None
        self._streams: Streams | None = None
        self._stream_reads: Reads | None = None

    # ---- the state after the draft ----

    @property
    def waiting_online(self) -> list[Request]:
        """Waiting online requests in the policy's order; not to be changed."""
        return self._waiting_online.requests

    def is_running(self, request: Request) -> bool:
        if request in self._admitted:
            return True
        return request.status is RequestStatus.RUNNING and request not in self._makes_way

    def is_scheduled(self, request: Request) -> bool:
        if request in self._parts:
            return True
        marks = self._marks()
        return marks is not None and request.slot >= 0 and request not in self._admitted and bool(marks[request.slot])

    def running(self, request_class: RequestClass) -> list[Request]:
        """Requests with a slot and tokens to compute, in order of admission."""
        online = request_class is RequestClass.ONLINE
        seated = self._queues.running_online if online else self._queues.running_offline
        total, computed = self.table.total, self.table.computed
        running = [
            request
            for request in seated.values()
            if request not in self._makes_way and total[request.slot] > computed[request.slot]
        ]
        return running + self.admitted(online)

    def online_rows(self) -> IntArray:
        """Slots of online requests with tokens to compute that are not preempted."""
        table = self.table
        chosen = table.live & table.online & (table.total > table.computed)
        if self._row_makes_way is not None:
            chosen &= ~self._row_makes_way
        return np.flatnonzero(chosen)

    def admitted(self, online: bool) -> list[Request]:
        """Requests of one class that the draft admits."""
        return [request for request in self._admitted if request.is_online == online]

    def all_running(self) -> list[Request]:
        """``running`` of both classes, in order of admission."""
        running = self.running(RequestClass.ONLINE) + self.running(RequestClass.OFFLINE)
        seated = [request for request in running if request not in self._admitted]
        return sorted(seated, key=lambda request: request.admission_index) + list(self._admitted)

    def _left(self, rows: IntArray, online: bool) -> IntArray:
        """The rows of one class that are neither preempted nor scheduled."""
        if online in self._untouched or not len(rows):
            return rows
        for mask in (self._row_makes_way, self._marks()):
            if mask is not None:
                rows = rows[~mask[rows]]
        return rows

    def _marks(self) -> BoolArray | None:
        """[slots] whether each is scheduled; None if none is."""
        if self._taking_part:
            marks = self._row_is_scheduled
            if marks is None:
                marks = self._row_is_scheduled = np.zeros(self.table.num_slots, np.bool_)
            for rows in self._taking_part:
                marks[rows] = True
            self._taking_part.clear()
        return self._row_is_scheduled

    def due_decodes(self, online: bool) -> IntArray:
        """Slots that lack one token and are not scheduled yet."""
        return self._left(self._decodes.of(online), online)

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.kv.block_size

    def offline_contexts(self) -> IntArray:
        """[slots] computed tokens of the offline ``due_decodes``."""
        return self.table.computed[self.due_decodes(online=False)]

    def streams(self) -> Streams:
        """Online requests with output that will have more."""
        if self._streams is None:
            rows, prompts = self._decodes.online, self._prompts.online
            self._streams = self.table.with_output(np.concatenate((rows, prompts)) if len(prompts) else rows)
        return self._streams

    def stream_reads(self) -> Reads:
        """Reads of ``streams`` (at least one) if each lacked one token."""
        if self._stream_reads is None:
            streams = self.streams()
            self._stream_reads = Reads.among(streams.total, self._shared_reads.alone(streams.rows))
        return self._stream_reads

    def shared_tokens(self, rows: IntArray) -> int:
        """KV tokens that decodes of these slots need not read, because one read of a prefix serves several of them and
        of the step's decodes so far. 0 if the kernel shares no reads."""
        return self._shared_reads.with_rows(rows)

    def decoding_streams(self) -> tuple[IntArray, Reads | None]:
        """``due_decodes`` of online requests, earliest deadline first, and their reads, if known."""
        rows, streams = self.due_decodes(online=True), self.streams()
        if rows is not streams.rows:
            return self.table.by_deadline(rows), None
        return self.table.by_deadline(rows, streams.due_s), self._stream_reads

    def prompt_rows(self, online: bool) -> IntArray:
        """Slots that lack more than one token and are not scheduled yet."""
        return self._left(self._prompts.of(online), online)

    def prompts(self, online: bool) -> list[Request]:
        """Running requests that lack more than one token and are not scheduled yet, in order of admission."""
        rows = self.prompt_rows(online)
        return self.table.requests_of(self.table.by_admission(rows)) if len(rows) else []

    def unfinished_prompts(self, online: bool) -> list[Request]:
        """Running requests that would lack more than one token if the step ended here."""
        rows = self._prompts.of(online)
        if not len(rows) and not self._admitted:
            return []
        running = self.table.requests_of(rows)
        prompts = [request for request in running if request not in self._makes_way]
        prompts += [request for request in self._admitted if request.is_online == online]
        return [r for r in prompts if self.kv.num_uncomputed(r) > max(self.num_tokens_of(r), 1)]

    def num_tokens_of(self, request: Request) -> int:
        """Scheduled tokens of the request in this step."""
        return self._parts.get(request, int(self.is_scheduled(request)))

    def parts(self) -> Iterator[tuple[Request, int]]:
        """Scheduled requests with their token counts, in the step's order."""
        for action in self.actions:
            if isinstance(action, Schedule):
                yield action.request, action.num_tokens
            elif isinstance(action, ScheduleRows):
                yield from ((request, 1) for request in self.table.requests_of(action.rows))

    # ---- building ----

    def add(self, request: Request, num_tokens: int) -> None:
        """Schedules a running request whose blocks are known to be available. It then stays in the step."""
        self.kv.grow(request, num_tokens)
        num_computed, is_seated = self.kv.num_computed(request), request.slot >= 0 and request not in self._admitted
        self.budget.add(num_tokens, num_computed)
        self.budget.shape.swapped_blocks = self.kv.num_swapped
        if num_tokens == 1 and num_computed and is_seated:
            self.budget.shape.shared_prefix_tokens += self._shared_reads.add(np.array([request.slot]))
        self._parts[request] = num_tokens
        if is_seated:
            self._row_is_scheduled = _marked(self._row_is_scheduled, request.slot, self.table.num_slots)
            self._untouched.discard(request.is_online)
        self.actions.append(Schedule(request, num_tokens))
        self.num_parts += 1
        self.has_offline |= not request.is_online
        if self._publishes:
            self.kv.publish(request, num_computed + num_tokens)

    def add_decodes(
        self, rows: IntArray, find_room: Callable[[Request], bool], spare_blocks: int, reads: Reads | None = None
    ) -> None:
        """Schedules slots of one class that lack one token, in order, while the step has tokens.

        ``spare_blocks`` may be allocated to them in order. For each slot beyond those, ``find_room`` is asked; without
        room it is not scheduled. ``reads`` are the reads of all of them, if known; which of them are shared is counted
        anew.
        """
        if not len(rows):
            return
        contexts = self.table.computed[rows]
        are_full = self.table.blocks.are_full(rows, contexts)
        num_easy = min(len(rows), self.budget.tokens_left)
        if num_easy > spare_blocks and np.count_nonzero(are_full[:num_easy]) > spare_blocks:
            num_easy = int(np.searchsorted(are_full.cumsum(), spare_blocks, side="right"))
        if num_easy == len(rows):
            self._add_rows(rows, contexts, are_full, reads)
            return
        if num_easy:
            self._add_rows(rows[:num_easy], contexts[:num_easy], are_full[:num_easy])
        for request in self.table.requests_of(rows[num_easy:]):
            if self.budget.tokens_left <= 0:
                break
            self.at = request
            if self.is_running(request) and find_room(request):
                self.add(request, 1)
        self.at = None

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> None:
        """Admits a waiting request with its cached prefix, at any position of the pool."""
        if request.is_online:
            self._waiting_online.remove(request)
        else:
            self.pool.take(request)
        self.kv.admit(request, hit)
        self._admitted[request] = None
        self.num_running += 1
        self.num_running_offline += not request.is_online
        self.actions.append(Admit(request, hit))
        self.add(request, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocates blocks for a running request before it is known whether it is scheduled."""
        self.kv.grow(request, num_tokens)
        self.actions.append(Grow(request, num_tokens))

    def preempt(self, victim: Request) -> None:
        assert not self.is_scheduled(victim)
        self.preempted.add(victim)
        self.kv.release(victim)
        self._makes_way.add(victim)
        self.num_running -= 1
        self.num_running_offline -= not victim.is_online
        self._row_makes_way = _marked(self._row_makes_way, victim.slot, self.table.num_slots)
        self._untouched.discard(victim.is_online)
        if victim.is_online:
            self._waiting_online.add(victim)
        else:
            self.pool.give_back(victim)
        self.actions.append(Preempt(victim))

    def on_cache(self, act: Callable[[Any], None]) -> None:
        """Calls an operation that only the policy's own cache has: now on its draft, in ``apply`` on the cache."""
        act(self.kv)
        self.actions.append(OnCache(act))

    def draw_pool(self, count: int) -> list[Request]:
        """Moves the first requests of the pool to its front, so that they may be admitted in any order."""
        drawn = [self.pool.pop() for _ in range(count)]
        for request in reversed(drawn):
            self.pool.give_back(request)
        self.actions.append(DrawPool(count))
        return drawn

    # ---- making room ----
    # Victims lose their KV, which is recomputed later. A victim is never scheduled in this step. No more are preempted
    # than needed, and none for a request that would still not fit.

    def make_room(
        self,
        num_blocks: int,
        victims: Iterable[Request],
        keep: Collection[int] = (),
        slots: int = 0,
        let_go: Callable[[Request], None] | None = None,
    ) -> bool:
        """Preempts ``victims`` in order until ``num_blocks`` are available and ``slots`` slots are free.

        Unneeded victims are spared, the last first. If all together do not suffice, none is preempted.

        ``keep`` are blocks that the requester will read (its prefix hit): freeing those frees nothing for it.
        ``let_go`` takes the blocks of a victim; ``preempt`` unless given.
        """
        missing = num_blocks - self.kv.available
        if missing <= 0 and slots <= 0:
            return True
        chosen: list[Request] = []
        value = self.kv.release_value(keep)
        for victim in victims:
            if missing <= value.num_blocks and len(chosen) >= slots:
                break
            chosen.append(victim)
            value.add(victim)
        if missing > value.num_blocks or len(chosen) < slots:
            return False
        for victim in reversed(chosen.copy()):
            if len(chosen) > slots and missing <= value.num_blocks - value.of(victim):
                value.remove(victim)
                chosen.remove(victim)
        for victim in chosen:
            (let_go or self.preempt)(victim)
        return True

    def offline_victims(self) -> Iterator[Request]:
        """Running offline requests that are not scheduled in this step, youngest first."""
        if self._youngest_offline is None:
            self._youngest_offline = self.running(RequestClass.OFFLINE)[::-1]
        for request in self._youngest_offline:
            if self.is_running(request) and not self.is_scheduled(request):
                yield request

    def online_victims(self, requester: Request) -> Iterator[Request]:
        """Running online requests with a later deadline than the requester's, latest first."""
        later = [
            request
            for request in self.running(RequestClass.ONLINE)
            if not self.is_scheduled(request) and deadline_order(request) > deadline_order(requester)
        ]
        yield from sorted(later, key=deadline_order, reverse=True)

    def _add_rows(self, rows: IntArray, contexts: IntArray, are_full: BoolArray, reads: Reads | None = None) -> None:
        """``add`` for slots of one class with one token each; ``contexts`` are their computed tokens."""
        table, full = self.table, rows[are_full]
        request_class = table.request(int(rows[0])).request_class
        self.kv.grow_rows(len(full), request_class)
        self.budget.shape.swapped_blocks = self.kv.num_swapped
        if (num_behind := int(np.count_nonzero(contexts))) == len(rows):
            shared_tokens = self._shared_reads.add(rows)
            reads = Reads.of(contexts) if reads is None else reads
            self.budget.add_decodes(num_behind, reads._replace(shared_tokens=shared_tokens))
        elif num_behind:
            behind = contexts > 0
            self.budget.add_decodes(num_behind, Reads.of(contexts[behind], self._shared_reads.add(rows[behind])))
        for _ in range(len(rows) - num_behind):
            self.budget.add(1, 0)
        self._taking_part.append(rows)
        self._untouched.discard(request_class is RequestClass.ONLINE)
        self.actions.append(ScheduleRows(rows, full))
        self.num_parts += len(rows)
        self.has_offline |= request_class is RequestClass.OFFLINE
        if self._publishes_decodes:
            for request, end in zip(table.requests_of(rows), (contexts + 1).tolist(), strict=True):
                self.kv.publish(request, end)


def _marked(mask: BoolArray | None, slot: int, num_slots: int) -> BoolArray:
    if mask is None:
        mask = np.zeros(num_slots, np.bool_)
    mask[slot] = True
    return mask
