"""The plan of one step: how many tokens each request of vLLM may compute in it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.deadlines import later_token_due_s
from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.scheduler.judged import Candidate
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.table import Streams
from neaptide_vllm.scheduling.online import Online, is_offline

WHOLE = 1 << 30
"""Grant of a request that may compute all that vLLM would."""

REQUEST_ID = attrgetter("request_id")
COMPUTED, IN_FLIGHT = attrgetter("num_computed_tokens"), attrgetter("num_output_placeholders")
ELIGIBLE = attrgetter("next_decode_eligible_step")
FIRST_TOKEN_S = attrgetter("first_token_s")

T = TypeVar("T")
Rows = IntArray | slice
"""Indices of some rows; a slice for all, which copies nothing."""


class Roster:
    """Running requests, online ones first, and what does not change of them.

    It follows vLLM's list by what comes and goes: to read several hundred requests anew takes as long as the plan.

    Args:
        known: the online requests by id.
        is_async: whether a step is planned while another runs.
        has_drafts: whether vLLM speculates.
    """

    def __init__(self, known: Mapping[str, Online], is_async: bool, has_drafts: bool) -> None:
        self._known = known
        self.is_async, self.has_drafts = is_async, has_drafts
        self._clear()

    def _clear(self) -> None:
        self.running: list[Request] = []
        self.onlines: list[Online] = []
        self.token_ids: list[list[int]] = []
        """[running] vLLM's own lists of prompt and output tokens, which grow."""
        self.nothing_granted: dict[str, int] = {}
        """0 for each offline request, in order."""
        self._has_changed = True
        self._read()

    def follow(self, running: list[Request]) -> None:
        """Takes over vLLM's list, and puts its online requests first: their blocks are allocated first."""
        num_known = len(self.running)
        if running[:num_known] != self.running:
            self._clear()
            num_known = 0
        for request in running[num_known:]:
            self._insert(request)
        if self._has_changed:
            self._read()
            running[:] = self.running

    def _insert(self, request: Request) -> None:
        online = self._known.get(request.request_id)
        if online is None:
            self.nothing_granted[request.request_id] = 0
            row = len(self.running)
        else:
            row = len(self.onlines)
            self.onlines.append(online)
        self.running.insert(row, request)
        self.token_ids.insert(row, request._all_token_ids)
        self._has_changed = True

    def forget(self, request: Request) -> None:
        """The request does not run any more."""
        try:
            row = self.running.index(request)
        except ValueError:  # it waited
            return
        del self.running[row], self.token_ids[row]
        if row < len(self.onlines):
            del self.onlines[row]
        else:
            del self.nothing_granted[request.request_id]
        self._has_changed = True

    def _read(self) -> None:
        self._has_changed = False
        self.tpot_slo_s = np.array([online.tpot_slo_s for online in self.onlines], np.float64)
        self.num_prompt = np.array([online.request.num_prompt_tokens for online in self.onlines], np.int64)
        """[online]; so is ``tpot_slo_s``."""
        limits = [request.num_prompt_tokens + request.max_tokens for request in self.running] if self.is_async else ()
        self.limits = np.array(limits, np.int64)
        """[running] most tokens of each; empty unless a step is planned while another runs."""


class Step:
    """Implements ``JudgedStep`` over vLLM's running requests, and collects what each may compute.

    Args:
        now_s: when the step begins.
        roster: vLLM's running requests.
        next_index: vLLM's number of the step; None if vLLM lets no request pause between two of its decodes.
    """

    is_abortable = False

    def __init__(
        self,
        now_s: float,
        roster: Roster,
        cost_model: CostModel,
        max_tokens: int,
        block_size: int,
        next_index: int | None,
    ) -> None:
        self.now_s, self.block_size, self._max_tokens = now_s, block_size, max_tokens
        self.budget = StepBudget(cost_model, max_tokens)
        self.candidates: list[Candidate] = []
        self.chosen: list[Candidate] = []
        self.num_parts = 0
        self.arrival_waits_s = math.inf
        self.offline_limit_s = 0.0
        """Longest step for offline requests that are admitted."""
        self.barred: set[str] = set()
        """Requests that were preempted for this step: they do not come back in it."""
        self.seconds_for: dict[str, float] = {}
        """Predicted seconds of the step by kind of work."""
        self.is_as_planned = True
        """Whether prompts were admitted with the context that they were planned with."""
        self.online_tokens = 0
        """Tokens of online requests in the step."""
        self._roster = roster
        self._look_at(next_index)

    def _look_at(self, next_index: int | None) -> None:
        """Sorts the running requests into kinds of work. Leaves out those that vLLM passes by.

        Requests are read in columns: a loop over several hundred of them would take longer than all the planning.
        """
        roster = self._roster
        running, num_online = roster.running, len(roster.onlines)
        computed = column(COMPUTED, running)
        total = np.fromiter(map(len, roster.token_ids), np.int64, len(running))
        lacking, num_output = total - computed, total[:num_online] - roster.num_prompt
        is_open = lacking > 0
        if roster.is_async:
            in_flight = column(IN_FLIGHT, running)
            lacking += in_flight
            num_output += in_flight[:num_online] > 0
            is_open = (lacking > 0) & ((in_flight == 0) | (computed + 2 - in_flight < roster.limits))
        if next_index is not None:
            is_open &= column(ELIGIBLE, running) <= next_index
        is_decode = is_open & (lacking == 1) & (computed > 0)
        is_prompt = is_open & ~is_decode

        self.offline = running[num_online:]
        """Running offline requests."""
        self.grants = roster.nothing_granted.copy()
        """Tokens of every online prompt and every running offline request. Online decodes are not here."""
        self.num_online = num_online
        """Running online requests."""
        self.online_blocks = int((-(-computed[:num_online] // self.block_size)).sum())
        """Blocks that they hold, of each kind of cache."""
        rows = _rows(is_decode[num_online:])
        self._offline_decodes = _of(self.offline, rows)
        self._offline_contexts: IntArray = computed[num_online:][rows]
        self.offline_prompts = _of(self.offline, is_prompt[num_online:].nonzero()[0])
        rows = _rows(is_decode[:num_online])
        self._decode_contexts: IntArray = computed[:num_online][rows]
        self._spare_tokens = 0
        """Tokens that online decodes compute beyond one each: drafts of speculation."""
        if roster.has_drafts:
            self._spare_tokens = sum(len(online.request.spec_token_ids) for online in _of(roster.onlines, rows))
        self.online_prompts = _of(roster.onlines, is_prompt[:num_online].nonzero()[0])
        rows = _rows(is_open[:num_online] & (num_output > 0))
        self._streams = self._streams_of(rows, total[:num_online][rows], num_output[rows])

    def _streams_of(self, rows: Rows, total: IntArray, num_output: IntArray) -> Streams:
        first_s = np.fromiter(map(FIRST_TOKEN_S, _of(self._roster.onlines, rows)), np.float64, len(total))
        tpot_slo_s = self._roster.tpot_slo_s[rows]
        # A step in flight samples a first token that is not there yet.
        due_s = later_token_due_s(np.minimum(first_s, self.now_s), num_output, tpot_slo_s, np.zeros(len(total)))
        return Streams(np.arange(len(total)), total, num_output, tpot_slo_s, due_s)

    # ---- as a step that is judged ----

    def streams(self) -> Streams:
        return self._streams

    def stream_reads(self) -> Reads:
        return Reads.among(self.streams().total)

    def offline_contexts(self) -> IntArray:
        return self._offline_contexts

    # ---- building ----

    def mark(self, kind: str) -> None:
        """Notes what the step has become longer by since the last mark, as the time of this kind of work."""
        seconds = self.budget.prediction.seconds if self.num_parts else 0.0
        self.seconds_for[kind] = seconds - sum(self.seconds_for.values())

    def add_online_decodes(self) -> None:
        """Schedules all online decodes."""
        contexts = self._decode_contexts
        if not len(contexts):
            return
        self.budget.add_decodes(len(contexts) + self._spare_tokens, Reads.of(contexts))
        self.num_parts += len(contexts)
        self.online_tokens += len(contexts)

    def add(self, request: Request, num_tokens: int, context_tokens: int) -> None:
        """Schedules a prompt's chunk."""
        self.budget.add(num_tokens, context_tokens)
        self.grants[request.request_id] = num_tokens
        self.num_parts += 1
        if not is_offline(request):
            self.online_tokens += num_tokens

    def add_offline_decodes(self, limit_s: float, last_granted: Mapping[str, int]) -> bool:
        """Schedules as many running offline decodes as fit, least recently scheduled first. Returns whether all did.

        An otherwise empty step takes one, so that offline work goes on.
        """
        if not self._offline_decodes:
            return True
        contexts, decodes = self._offline_contexts, self._offline_decodes
        count = self.budget.most_decodes(contexts, limit_s)
        if count < len(decodes):
            order = sorted(range(len(decodes)), key=lambda row: last_granted.get(decodes[row].request_id, -1))
            decodes, contexts = [decodes[row] for row in order], contexts[order]
            count = self.budget.most_decodes(contexts, limit_s)
            if not count and not self.num_parts:
                count = 1
        if count:
            chosen = decodes[:count]
            drafts = sum(len(request.spec_token_ids) for request in chosen) if self._roster.has_drafts else 0
            self.budget.add_decodes(count + drafts, Reads.of(contexts[:count]))
            chosen_ids = self._roster.nothing_granted if count == len(self.offline) else map(REQUEST_ID, chosen)
            self.grants.update(dict.fromkeys(chosen_ids, WHOLE))
            self.num_parts += count
        return count == len(decodes)

    def offline_chunk(self, most_tokens: int, context_tokens: int) -> int:
        """Tokens of an offline prompt's next chunk; a block's worth at least in an otherwise empty step."""
        chunk = self.budget.largest_chunk(most_tokens, context_tokens, self.offline_limit_s)
        return chunk if chunk or self.num_parts else min(most_tokens, self.block_size)

    def granted_offline(self) -> Collection[str]:
        """Running offline requests that are scheduled."""
        grants = self.grants
        return [request_id for request_id in self._roster.nothing_granted if grants[request_id]]

    def planned_shape(self, output: SchedulerOutput) -> tuple[BatchShape, int] | None:
        """Shape and online tokens if vLLM's step is as planned: no request computes more, so equal sums say it."""
        num_planned = self._max_tokens - self.budget.tokens_left
        is_as_planned = (
            self.is_as_planned
            and not self._roster.has_drafts
            and output.total_num_scheduled_tokens == num_planned
            and len(output.num_scheduled_tokens) == self.num_parts
        )
        return (self.budget.shape, self.online_tokens) if is_as_planned else None


def _rows(is_meant: BoolArray) -> Rows:
    """The rows that are meant."""
    return slice(None) if is_meant.all() else is_meant.nonzero()[0]


def _of(values: list[T], rows: Rows) -> list[T]:
    """The values in these rows."""
    return values[rows] if isinstance(rows, slice) else [values[row] for row in rows.tolist()]


def column(read: Callable[[Request], int], requests: Sequence[Request]) -> IntArray:
    """[requests] what is read of each."""
    return np.fromiter(map(read, requests), np.int64, len(requests))
