"""From step plans to what vLLM's model runner is told, and what the runner has been told so far.

The runner keeps tokens and block tables of its requests and hears of changes only. It knows a request by what we last
said of it: if the row's epoch is another since, or the output is not as long as it thinks, the request is told anew.
vLLM has two runners, V1 and V2, which differ in how: V1 is told a known request's whole table; V2 forgets the request
and hears of it as a new one with the tokens that it has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.steps.plan import NewRequest, StepPlan
from neaptide.engine.table import NO_ROWS, RequestTable

NULL_BLOCKS = 1
"""vLLM's block 0 holds nothing; ours are those behind it."""


@dataclass(slots=True, eq=False)
class Told:
    """A request, and what the runner knows of it."""

    new: NewRequest
    params: Any
    """vLLM's sampling parameters."""
    is_sent: bool = False
    must_resend: bool = False
    row: int = 0
    epoch: int = 0
    num_blocks: int = 0
    num_output: int = 0
    """Tokens of the output that the runner has, the one being sampled included."""
    order: int = 0
    """The last one that it was in ..."""
    end: int = 0
    """... and its tokens whose KV is in the cache after that."""


@dataclass(slots=True)
class RunnerKind:
    """What a translation depends on beside the plan."""

    is_v2: bool
    is_async: bool
    """A step may begin before the one before it is done."""
    vocab_size: int


class _GoingOn(NamedTuple):
    """Parts of a plan that go on where the runner has left them, but perhaps for new blocks."""

    which: BoolArray | None
    """[parts]; None: all."""
    grown: IntArray
    """Those of them with new blocks ..."""
    num_told: IntArray
    """... and how many blocks of each the runner knows."""


@dataclass(slots=True)
class _LastPlan:
    """What the runner was told last, and where it is with that. [parts]"""

    rows: IntArray
    order: int
    epoch: IntArray
    num_blocks: IntArray
    num_output: IntArray
    ends: IntArray


class _Rows:
    """What the runner was last told of the rows of a table, for all of them at once: most parts of most steps go on
    without a word, and most steps are of the same parts as the one before. A row's epoch is its own: if it is the same,
    so is the request."""

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self._last: _LastPlan | None = None
        """Not yet written to the columns: most often the next plan says the same of its rows."""
        self._epoch: IntArray = np.full(table.num_seats, -1)
        self._num_blocks: IntArray = np.zeros(table.num_seats, np.int64)
        self._num_output: IntArray = np.zeros(table.num_seats, np.int64)
        self._order: IntArray = np.zeros(table.num_seats, np.int64)
        self._end: IntArray = np.zeros(table.num_seats, np.int64)

    def compare(self, plan: StepPlan, order: int | None) -> _GoingOn:
        """What of the plan needs no words; only of parts that were in this order, the last one, if it is given."""
        return self._of_same_parts(plan) or self._of_any_parts(plan, order)

    def _of_same_parts(self, plan: StepPlan) -> _GoingOn | None:
        """None unless the parts are those of the last plan and all go on. By bytes: where parts are few, numpy's calls
        cost more than what they do, and after a forward pass several times as much as in a loop."""
        last, rows, table = self._last, plan.rows, self.table
        if (
            last is None
            or rows.tobytes() != last.rows.tobytes()
            or plan.output_position.tobytes() != last.num_output.tobytes()
            or plan.num_computed.tobytes() != last.ends.tobytes()
            or table.epoch.take(rows).tobytes() != last.epoch.tobytes()
        ):
            return None
        num_blocks = table.blocks.num_blocks.take(rows)
        if num_blocks.tobytes() == last.num_blocks.tobytes():
            return _GoingOn(None, NO_ROWS, NO_ROWS)
        new_blocks = num_blocks - last.num_blocks
        grown = new_blocks.nonzero()[0]
        return None if new_blocks.min() < 0 else _GoingOn(None, grown, last.num_blocks.take(grown))

    def _of_any_parts(self, plan: StepPlan, order: int | None) -> _GoingOn:
        self._settle()
        rows, table = plan.rows, self.table
        as_told: BoolArray = self._epoch.take(rows) == table.epoch.take(rows)
        as_told &= self._num_output.take(rows) == plan.output_position
        as_told &= self._end.take(rows) == plan.num_computed
        if order is not None:
            as_told &= self._order.take(rows) == order
        num_told = self._num_blocks.take(rows)
        new_blocks = table.blocks.num_blocks.take(rows) - num_told
        as_told &= new_blocks >= 0
        grown = np.flatnonzero(as_told & (new_blocks > 0))
        return _GoingOn(None if as_told.all() else as_told, grown, num_told.take(grown))

    def new_blocks(self, rows: IntArray, first: IntArray) -> list[list[int]]:
        """As the runner counts them, of rows that have grown, from these blocks on."""
        table = self.table.blocks
        num_blocks = table.num_blocks.take(rows)
        if (num_blocks == first + 1).all():
            return [[block] for block in (table.ids[rows, first] + NULL_BLOCKS).tolist()]
        spans = zip(rows.tolist(), first.tolist(), num_blocks.tolist(), strict=True)
        return [_blocks(self.table, row, start, end) for row, start, end in spans]

    def note(self, plan: StepPlan, order: int) -> None:
        """The plan's parts have been told, behind ``compare``."""
        rows, table = plan.rows, self.table
        self._last = _LastPlan(
            rows,
            order,
            table.epoch.take(rows),
            table.blocks.num_blocks.take(rows),
            plan.output_position + plan.sample,
            plan.ends,
        )

    def update(self, told: Told) -> None:
        """Brings a request's own account up to date."""
        self._settle()
        if self._is_of(told):
            told.num_blocks, told.num_output = int(self._num_blocks[told.row]), int(self._num_output[told.row])
            told.order, told.end = int(self._order[told.row]), int(self._end[told.row])

    def drop(self, told: Told) -> None:
        """The runner is to forget the request."""
        self._settle()
        if self._is_of(told):
            self._epoch[told.row] = -1

    def _is_of(self, told: Told) -> bool:
        return told.is_sent and told.row < len(self._epoch) and bool(self._epoch[told.row] == told.epoch)

    def forget(self, rows: IntArray) -> None:
        """What was told of them is in doubt, or they have not been told."""
        self._settle()
        self._epoch[rows] = -1

    def _settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._epoch[last.rows], self._num_blocks[last.rows] = last.epoch, last.num_blocks
            self._num_output[last.rows], self._order[last.rows] = last.num_output, last.order
            self._end[last.rows] = last.ends


class Translator:
    """Keeps account of what the runner knows.

    Args:
        to_params: vLLM's sampling parameters of a request.
    """

    def __init__(self, kind: RunnerKind, to_params: Callable[[NewRequest], Any]) -> None:
        self._kind = kind
        self._to_params = to_params
        self.told: dict[str, Told] = {}
        """Requests that have not ended."""
        self.seeded: set[str] = set()
        """Those of them with a seed ..."""
        self.scored: set[str] = set()
        """... and those whose prompts are scored."""
        self._finished: set[str] = set()
        """What the runner has still to hear ..."""
        self._preempted: set[str] = set()
        self.invalid: set[str] = set()
        """Those with a token id outside the vocabulary: the runner never hears of them."""
        self._rows = _Rows(RequestTable(0, 1, 1))
        self._num_orders = 0
        self._counts: tuple[list[str], bytes, dict[str, int]] = [], b"", {}
        """Of the last order: its parts, their tokens, and both together."""
        self._last: Any = None
        """The last order, unless it is in doubt whether the runner has heard it ..."""
        self._before_last: Any = None
        """... and the one before, whose step may still be in flight."""

    def heed(self, plan: StepPlan) -> None:
        """Takes in which requests ended, began and lost their KV."""
        for request_id in plan.finished_ids:
            self._forget(request_id)
        for request_id in plan.preempted_ids:
            told = self.told.get(request_id)
            if told is not None and told.is_sent:
                self._must_resend(told)
        for new in plan.new_requests:
            self._forget(new.request_id)  # it may be told again
            told = self.told[new.request_id] = Told(new, self._to_params(new))
            if self._has_bad_token(new.prompt_token_ids):
                self.invalid.add(new.request_id)
            if told.params.seed is not None:
                self.seeded.add(new.request_id)
            if new.params.prompt_logprobs is not None:
                self.scored.add(new.request_id)

    def order(self, plan: StepPlan) -> Any:
        """What the runner is told of the plan's parts, the invalid ones left out: a ``SchedulerOutput``."""
        order = SchedulerOutput.make_empty()
        cached = order.scheduled_cached_reqs
        order.num_scheduled_tokens = self._counted(plan)
        order.total_num_scheduled_tokens = plan.shape.num_tokens
        if plan.table is not self._rows.table:
            for told in self.told.values():
                self._rows.update(told)
            self._rows = _Rows(plan.table)
        going_on = self._rows.compare(plan, self._must_have_run())
        self._go_on(cached, plan, going_on)
        refused = [] if going_on.which is None else self._tell_of(order, plan, np.flatnonzero(~going_on.which))
        self._num_orders += 1
        self._rows.note(plan, self._num_orders)
        if refused:  # with a step in flight, their next parts are planned before their error is known
            self._rows.forget(plan.rows[refused])
        order.finished_req_ids, self._finished = self._finished, set()
        order.preempted_req_ids, self._preempted = self._preempted, set()
        self._before_last, self._last = self._last, order
        return order

    def _counted(self, plan: StepPlan) -> dict[str, int]:
        """Tokens of each part: most often those of the step before, for most steps only decode."""
        ids, num_tokens, counts = self._counts
        if plan.request_ids != ids or plan.num_tokens.tobytes() != num_tokens:
            counts = dict(zip(plan.request_ids, plan.num_tokens.tolist(), strict=True))
            self._counts = plan.request_ids, plan.num_tokens.tobytes(), counts
        return counts.copy()

    def _go_on(self, cached: CachedRequestData, plan: StepPlan, going_on: _GoingOn) -> None:
        """Parts that go on where they were, those that have grown with new blocks."""
        which, grown = going_on.which, going_on.grown
        blocks: list[Any] = [None] * len(plan)
        if len(grown):
            new_blocks = self._rows.new_blocks(plan.rows.take(grown), going_on.num_told)
            for i, ids in zip(grown.tolist(), new_blocks, strict=True):
                blocks[i] = (ids,)
        if which is None:
            cached.req_ids += plan.request_ids
            cached.new_block_ids = blocks
            cached.num_computed_tokens += plan.num_computed.tolist()
            cached.num_output_tokens += plan.output_position.tolist()
        else:
            chosen = which.tolist()
            cached.req_ids += compress(plan.request_ids, chosen)
            cached.new_block_ids += compress(blocks, chosen)
            cached.num_computed_tokens += plan.num_computed[which].tolist()
            cached.num_output_tokens += plan.output_position[which].tolist()

    def _tell_of(self, order: Any, plan: StepPlan, parts: IntArray) -> list[int]:
        """These parts one by one; returns those that the runner must not hear of."""
        ids, again = plan.request_ids, set(plan.resumed_ids)
        refused = []
        for i in parts.tolist():
            if ids[i] in self.invalid:
                order.total_num_scheduled_tokens -= order.num_scheduled_tokens.pop(ids[i])
                refused.append(i)
            else:
                self._tell(order, plan, i, ids[i] in again)
        return refused

    def _tell(self, order: Any, plan: StepPlan, i: int, is_resumed: bool) -> None:
        """One part of which the runner has to hear more than that it goes on."""
        cached, table, row = order.scheduled_cached_reqs, plan.table, int(plan.rows[i])
        start, num_output = int(plan.num_computed[i]), int(plan.output_position[i])
        epoch, held = int(table.epoch[row]), int(table.blocks.num_blocks[row])
        request_id = plan.request_ids[i]
        told = self.told[request_id]
        self._rows.update(told)
        if told.is_sent and (is_resumed or not self._agrees(told, epoch, start, num_output)):
            self._must_resend(told)
        if told.is_sent:
            blocks = None
            if told.must_resend:
                blocks = (_blocks(table, row, 0, held),)
                cached.resumed_req_ids.add(request_id)
            elif held != told.num_blocks:
                blocks = (_blocks(table, row, told.num_blocks, held),)
            self._add_cached(cached, request_id, blocks, start, num_output)
            if self._kind.is_async and num_output and (told.must_resend or not self._took_part(request_id)):
                cached.all_token_ids[request_id] = _known(table, row)
        else:
            order.scheduled_new_reqs.append(self._new_data(told, table, row, held, start, num_output))
        told.is_sent, told.must_resend = True, False
        told.row, told.epoch, told.num_blocks, told.num_output = row, epoch, held, num_output + int(plan.sample[i])
        told.order, told.end = self._num_orders + 1, start + int(plan.num_tokens[i])

    def _must_have_run(self) -> int | None:
        """The order that a part must have been in to go on without further words; None for any."""
        return self._num_orders if self._kind.is_async and not self._kind.is_v2 else None

    def distrust(self, plan: StepPlan) -> None:
        """The step failed: nobody knows how much of it the runner took in. What it heard it may hear again."""
        for order in (self._before_last, self._last):
            if order is not None:
                # But not of those that it has been told of since: it would lose them.
                self._finished |= {name for name in order.finished_req_ids if not self._is_sent(name)}
                self._preempted |= {name for name in order.preempted_req_ids if not self._is_sent(name)}
        self._before_last = self._last = None
        new = {request.request_id for request in plan.new_requests}
        if plan.table is self._rows.table:
            self._rows.forget(plan.rows)
        for request_id in plan.request_ids:
            told = self.told.get(request_id)
            if told is None or not told.is_sent:
                continue
            if request_id in new:
                told.is_sent = False
                self._finished.add(request_id)
            else:
                self._must_resend(told)

    def _is_sent(self, request_id: str) -> bool:
        told = self.told.get(request_id)
        return told is not None and told.is_sent

    def _took_part(self, request_id: str) -> bool:
        """In the last step."""
        return self._last is not None and request_id in self._last.num_scheduled_tokens

    def _agrees(self, told: Told, epoch: int, start: int, num_output: int) -> bool:
        """Whether the runner's tokens, blocks and progress are those of the row, or will be by what it is told."""
        if told.must_resend or told.epoch != epoch:
            return False
        if start == told.end and num_output == told.num_output:
            return True
        # A step was undone. V2 counts by itself what it has computed. V1 goes where it is told, and drops tokens that
        # it has too many; but one that it samples in the order before, not known to it yet, it would take for the last
        # one of the part.
        return not self._kind.is_v2 and num_output <= told.num_output and told.order != self._must_have_run()

    def _must_resend(self, told: Told) -> None:
        self._rows.drop(told)
        if self._kind.is_v2:
            told.is_sent = False
            self._preempted.add(told.new.request_id)
        else:
            told.must_resend = True

    def _forget(self, request_id: str) -> None:
        told = self.told.pop(request_id, None)
        self.seeded.discard(request_id)
        self.scored.discard(request_id)
        self.invalid.discard(request_id)
        if told is not None and told.is_sent:
            self._rows.drop(told)
            self._finished.add(request_id)

    def _has_bad_token(self, token_ids: list[int]) -> bool:
        return not (min(token_ids) >= 0 and max(token_ids) < self._kind.vocab_size)

    def _new_data(self, told: Told, table: RequestTable, row: int, num_blocks: int, start: int, num_output: int) -> Any:
        data = NewRequestData(
            req_id=told.new.request_id,
            prompt_token_ids=told.new.prompt_token_ids,
            mm_features=[],
            sampling_params=told.params,
            pooling_params=None,
            block_ids=(_blocks(table, row, 0, num_blocks),),
            num_computed_tokens=start,
            lora_request=None,
        )
        if self._kind.is_v2:
            data.prefill_token_ids = _known(table, row) if num_output else told.new.prompt_token_ids
        return data

    @staticmethod
    def _add_cached(cached: CachedRequestData, request_id: str, blocks: Any, start: int, num_output: int) -> None:
        cached.req_ids.append(request_id)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(start)
        cached.num_output_tokens.append(num_output)


def _blocks(table: RequestTable, row: int, start: int, end: int) -> list[int]:
    blocks: list[int] = (table.blocks.ids[row, start:end] + NULL_BLOCKS).tolist()
    return blocks


def _known(table: RequestTable, row: int) -> list[int]:
    tokens: list[int] = table.tokens[row, : table.known[row]].tolist()
    return tokens
