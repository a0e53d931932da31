"""The request table: the state of every running request in numpy columns, with one slot per request.

``Request`` is a view on its slot. Policies query the table by name (``by_deadline``, ``Draft.due_decodes``) and pass
on the slot numbers they get; only this module indexes the columns.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neaptide.engine.arrays import ONE, BoolArray, FloatArray, IntArray, TokenArray
from neaptide.engine.deadlines import first_token_due_s, later_token_due_s
from neaptide.engine.kv.block_table import BlockTables

if TYPE_CHECKING:
    from neaptide.engine.request import Request


PLACEHOLDER_TOKEN_ID = -1
"""Placeholder for a token that a step in flight will sample."""


NO_ROWS: IntArray = np.zeros(0, np.int64)


class ByClass(NamedTuple):
    """Slots by the class of their requests."""

    online: IntArray
    offline: IntArray

    def of(self, online: bool) -> IntArray:
        return self.online if online else self.offline


NO_ROWS_OF_EITHER = ByClass(NO_ROWS, NO_ROWS)


class Lacking(NamedTuple):
    """Slots by the number of their uncomputed tokens."""

    ones: ByClass
    """Exactly one token: decodes."""
    more: ByClass
    """More than one token: prompts, and tokens that are computed again."""


class Streams(NamedTuple):
    """Slots with output tokens, and the values that bound the step time."""

    rows: IntArray
    total: IntArray
    num_output: IntArray
    tpot_slo_s: FloatArray
    due_s: FloatArray
    """When its next token is due."""

    def slower_than(self, seconds: float) -> "Streams":
        """The streams whose TPOT target is longer than ``seconds``."""
        kept = self.tpot_slo_s > seconds
        return Streams(
            self.rows[kept], self.total[kept], self.num_output[kept], self.tpot_slo_s[kept], self.due_s[kept]
        )


class RequestTable:
    """Columns of running requests. A slot's values are valid while ``live`` is set.

    Args:
        num_slots: most requests that run at once.
        max_tokens: most prompt and output tokens of one request.
        block_size: tokens per KV block.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.requests: list[Request | None] = [None] * num_slots
        self.ids: list[str] = [""] * num_slots
        self.blocks = BlockTables(num_slots, max_tokens, block_size)
        num_blocks = max_tokens // block_size + 1
        self.token_blocks: TokenArray = np.zeros((num_slots, num_blocks, block_size), np.int32)
        """[slots, blocks, positions]: ``tokens``, by KV block."""
        self.tokens: TokenArray = self.token_blocks.reshape(num_slots, num_blocks * block_size)
        """[slots, positions]: prompt and output. Pages that no token has touched take no memory."""
        self.live: BoolArray = np.zeros(num_slots, np.bool_)
        self.computed = _ints(num_slots)
        """Tokens whose KV is in the cache, or will be when the steps in flight end."""
        self.committed = _ints(num_slots)
        """Tokens whose KV was computed by committed steps or found in the cache."""
        self.reached = _ints(num_slots)
        """Tokens whose KV the request had before it was preempted or put off; 0 if it never was."""
        self.known = _ints(num_slots)
        """Tokens of prompt and output whose ids are known."""
        self.total = _ints(num_slots)
        """``known``, plus one while a step in flight samples a token that another token will follow."""
        self.prompt = _ints(num_slots)
        self.limit = _ints(num_slots)
        """Prompt tokens plus ``max_tokens``."""
        self.min_output = _ints(num_slots)
        self.indexed = _ints(num_slots)
        """Leading blocks that have been offered to the prefix index."""
        self.last_step = _ints(num_slots)
        self.admission = _ints(num_slots)
        """Number of the request's admission."""
        self.epoch = _ints(num_slots)
        """Version of the slot; it changes whenever results of a step in flight become invalid."""
        self.arrival_s = _floats(num_slots)
        self.ttft_slo_s = _floats(num_slots)
        self.tpot_slo_s = _floats(num_slots)
        self.first_token_s = _floats(num_slots)
        self.not_before_s = _floats(num_slots)
        """Earliest time at which the request runs again, in seconds; 0 if it is not put off."""
        self.put_off_s = _floats(num_slots)
        """Total time for which the request was put off, in seconds. Its deadlines move by this."""
        self.all_run_at_s = 0.0
        """Time from which no slot is put off any more."""
        self.online: BoolArray = np.zeros(num_slots, np.bool_)
        self.offline: BoolArray = np.zeros(num_slots, np.bool_)
        self.no_priority: BoolArray = np.zeros(num_slots, np.bool_)
        self.streams: BoolArray = np.zeros(num_slots, np.bool_)
        """Whether its tokens are reported at every step."""
        self.ignore_eos: BoolArray = np.zeros(num_slots, np.bool_)
        self.own_stops: BoolArray = np.zeros(num_slots, np.bool_)
        """Whether it has stop tokens of its own."""
        self.num_own_stops = 0
        """Number of live slots with stop tokens of their own."""
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_epochs = 0
        """Number of changes of ``epoch``."""

    # ---- slots ----

    def assign_slot(self, request: "Request", token_ids: list[int], admission_index: int) -> int:
        """Assigns a slot to a starting request, without blocks or computed tokens."""
        slot = self._free.pop()
        params = request.params
        num_tokens = len(token_ids)
        self.requests[slot], self.ids[slot] = request, request.request_id
        self.tokens[slot, :num_tokens] = token_ids
        self.computed[slot] = self.committed[slot] = self.indexed[slot] = 0
        self.reached[slot] = request.num_reached_tokens
        self.known[slot] = self.total[slot] = num_tokens
        self.prompt[slot] = request.num_prompt_tokens
        self.limit[slot] = request.num_prompt_tokens + params.max_tokens
        self.min_output[slot] = params.min_tokens
        self.last_step[slot], self.admission[slot] = -1, admission_index
        self.arrival_s[slot] = request.arrival_s
        self.ttft_slo_s[slot], self.tpot_slo_s[slot] = request.ttft_slo_s, request.tpot_slo_s
        self.first_token_s[slot] = request.first_token_s
        self.not_before_s[slot], self.put_off_s[slot] = 0.0, request.put_off_s
        self.online[slot], self.offline[slot] = request.is_online, not request.is_online
        self.no_priority[slot] = not request.is_priority
        self.streams[slot] = request.report_every_step
        self.ignore_eos[slot], self.own_stops[slot] = params.ignore_eos, bool(params.stop_token_ids)
        self.num_own_stops += bool(params.stop_token_ids)
        self.live[slot] = True
        self.renew(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        """Frees the slot of a request that ends or waits again; its blocks have been freed before."""
        assert not self.blocks.num_blocks[slot]
        self.live[slot] = False
        self.num_own_stops -= bool(self.own_stops[slot])
        self.computed[slot] = self.total[slot] = 0
        self.requests[slot] = None
        self.renew(slot)
        self._free.append(slot)

    def renew(self, slot: int) -> None:
        """Invalidates the results of steps in flight for this slot."""
        self.num_epochs += 1
        self.epoch[slot] = self.num_epochs

    def put_off(self, slot: int, num_committed: int, now_s: float, late_s: float) -> None:
        """Puts off the request for ``late_s`` seconds because its mask was late; it computes its last token again.

        The delay is not the scheduler's fault, so the request's deadlines move: a stream is not late when it resumes.
        """
        put_off_s = float(self.put_off_s[slot]) + late_s
        if num_output := int(self.known[slot] - self.prompt[slot]):
            first_token_s, tpot_slo_s = float(self.first_token_s[slot]), float(self.tpot_slo_s[slot])
            due_s = later_token_due_s(first_token_s, num_output, tpot_slo_s, 0.0)
            put_off_s = max(put_off_s, now_s + late_s - due_s)
        self.computed[slot] = num_committed
        self.reached[slot] = max(int(self.reached[slot]), int(self.committed[slot]))
        self.committed[slot] = min(int(self.committed[slot]), num_committed)
        self.total[slot] = self.known[slot]
        self.not_before_s[slot] = now_s + late_s
        self.put_off_s[slot] = put_off_s
        self.all_run_at_s = max(self.all_run_at_s, now_s + late_s)
        self.renew(slot)

    def request(self, slot: int) -> "Request":
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def requests_of(self, rows: IntArray) -> "list[Request]":
        if not len(rows):
            return []
        requests = self.requests
        return [requests[slot] for slot in rows.tolist()]

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free)

    # ---- what policies ask ----

    def lacking(self, now_s: float) -> Lacking:
        """Slots with tokens to compute. Omits slots whose last token a step in flight samples, and those that are put
        off."""
        lacking = self.total - self.computed
        if now_s < self.all_run_at_s:
            lacking[self.not_before_s > now_s] = 0
        ones = self._by_class(lacking == ONE)
        if len(ones.online) + len(ones.offline) == self.num_running:
            return Lacking(ones, NO_ROWS_OF_EITHER)
        return Lacking(ones, self._by_class(lacking > 1))

    def _by_class(self, chosen: BoolArray) -> ByClass:
        """Splits the chosen slots by class."""
        return ByClass((chosen & self.online).nonzero()[0], (chosen & self.offline).nonzero()[0])

    def with_output(self, rows: IntArray) -> Streams:
        """The rows with output, in their order. Returns the given array itself if all have some."""
        total = self.total[rows]
        num_output = total - self.prompt[rows]
        if np.count_nonzero(num_output) < len(rows):
            return self.with_output(rows[num_output > 0])
        tpot_slo_s = self.tpot_slo_s[rows]
        due_s = later_token_due_s(self.first_token_s[rows], num_output, tpot_slo_s, self.put_off_s[rows])
        return Streams(rows, total, num_output, tpot_slo_s, due_s)

    def num_recomputed(self, rows: IntArray, starts: IntArray, ends: IntArray) -> int:
        """Tokens between ``starts`` and ``ends`` of these slots that were in the KV cache before, and were lost."""
        reached = self.reached[rows]
        if not np.count_nonzero(reached):
            return 0
        return int(np.maximum(np.minimum(reached, ends) - starts, 0).sum())

    def next_deadline_s(self, rows: IntArray) -> FloatArray:
        """Deadline of each row's next token."""
        num_output = self.total[rows] - self.prompt[rows]
        due_s = later_token_due_s(self.first_token_s[rows], num_output, self.tpot_slo_s[rows], self.put_off_s[rows])
        if np.count_nonzero(num_output) < len(rows):
            due_s = np.where(num_output == 0, first_token_due_s(self.arrival_s[rows], self.ttft_slo_s[rows]), due_s)
        return due_s

    def by_deadline(self, rows: IntArray, deadline_s: FloatArray | None = None) -> IntArray:
        """Earliest next deadline first. Ties: ``priority`` before ``default``, then the older request, then by id.

        The same order as ``scheduler.queues.deadline_order``. ``deadline_s``: their ``next_deadline_s``, if it is
        known.
        """
        if len(rows) < 2:
            return rows
        if deadline_s is None:
            deadline_s = self.next_deadline_s(rows)
        arrival_s, no_priority = self.arrival_s[rows], self.no_priority[rows]
        order = np.lexsort((arrival_s, no_priority, deadline_s))
        in_order = arrival_s[order]
        same_arrival = in_order[1:] == in_order[:-1]
        if np.count_nonzero(same_arrival):
            left, right = order[:-1], order[1:]
            ties = (deadline_s[left] == deadline_s[right]) & (no_priority[left] == no_priority[right])
            if np.count_nonzero(ties & same_arrival):
                ids = [self.ids[slot] for slot in rows.tolist()]
                keys = list(zip(deadline_s.tolist(), no_priority.tolist(), arrival_s.tolist(), ids, strict=True))
                order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        return rows[order]

    def by_last_step(self, rows: IntArray) -> IntArray:
        """Least recently scheduled first, then in order of admission."""
        return rows[np.lexsort((self.admission[rows], self.last_step[rows]))] if len(rows) > 1 else rows

    def by_admission(self, rows: IntArray) -> IntArray:
        return rows[self.admission[rows].argsort()] if len(rows) > 1 else rows

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, requests and counts agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        seated = {slot for slot, request in enumerate(self.requests) if request is not None}
        assert not free & seated
        assert len(free) + len(seated) == self.num_slots
        assert seated == set(np.flatnonzero(self.live).tolist())
        rows = np.flatnonzero(self.live)
        assert all(self.request(slot).slot == slot for slot in seated)
        assert self.num_own_stops == np.count_nonzero(self.own_stops[rows])
        assert (self.computed[rows] <= self.total[rows]).all(), "more computed than there is"
        assert (self.committed[rows] <= self.computed[rows]).all(), "more committed than computed"
        block_size = self.blocks.block_size
        assert (self.computed[rows] <= self.blocks.num_blocks[rows] * block_size).all(), (
            "computed tokens without a block"
        )
        assert (self.indexed[rows] * block_size <= self.computed[rows]).all(), "a row published too much"
        assert (self.blocks.num_blocks[~self.live] == 0).all(), "an empty slot holds blocks"
        assert (self.total[~self.live] == 0).all(), "an empty slot has tokens"
        assert (self.computed[~self.live] == 0).all(), "an empty slot has computed tokens"


def _ints(count: int) -> IntArray:
    return np.zeros(count, np.int64)


def _floats(count: int) -> FloatArray:
    return np.zeros(count, np.float64)
