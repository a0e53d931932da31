"""The state that vLLM's runner has of each request, and of all slots of the request table at once."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.steps.plan import NewRequest, StepPlan
from neaptide.engine.table import NO_ROWS, RequestTable

NULL_BLOCKS = 1
"""vLLM reserves its block 0; our blocks follow it."""


@dataclass(slots=True, eq=False)
class RunnerState:
    """A request and the runner's state of it."""

    new: NewRequest
    params: Any
    """vLLM's sampling parameters."""
    is_sent: bool = False
    must_resend: bool = False
    row: int = 0
    epoch: int = 0
    num_blocks: int = 0
    num_output: int = 0
    """Output tokens that the runner has, including the one being sampled."""
    order: int = 0
    """Number of the last scheduler output that included the request."""
    end: int = 0
    """Tokens whose KV is in the cache after that step."""


class CachedRequest(NamedTuple):
    """Parts of a plan that continue from the runner's state, apart from new blocks."""

    which: BoolArray | None
    """[parts] Which parts continue; None: all."""
    grown: IntArray
    """Indices of the continuing parts with new blocks."""
    num_told: IntArray
    """Number of blocks that the runner knows for each of those."""


@dataclass(slots=True)
class _LastPlan:
    """The last scheduler output and the runner's state after it; arrays are [parts]."""

    rows: IntArray
    order: int
    epoch: IntArray
    num_blocks: IntArray
    num_output: IntArray
    ends: IntArray


class RunnerRows:
    """The runner's state of all slots of a table.

    Most parts of most steps continue without changes, and most steps have the same parts as the one before. An epoch is
    unique to a request's stay in a slot: equal epochs mean the same request.
    """

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self._last: _LastPlan | None = None
        """Not written to the columns yet, because the next plan usually has the same parts."""
        self._epoch: IntArray = np.full(table.num_slots, -1)
        self._num_blocks: IntArray = np.zeros(table.num_slots, np.int64)
        self._num_output: IntArray = np.zeros(table.num_slots, np.int64)
        self._order: IntArray = np.zeros(table.num_slots, np.int64)
        self._end: IntArray = np.zeros(table.num_slots, np.int64)

    def compare(self, plan: StepPlan, order: int | None) -> CachedRequest:
        """The parts that continue from the runner's state. With ``order``, only parts of that last scheduler output
        count."""
        return self._of_same_parts(plan) or self._of_any_parts(plan, order)

    def _of_same_parts(self, plan: StepPlan) -> CachedRequest | None:
        """The result if the parts are those of the last plan and all continue, else None.

        Compares bytes: for few parts, numpy's calls cost more than their work, and several times more after a forward
        pass.
        """
        last, rows, table = self._last, plan.rows, self.table
        if (
            last is None
            or table.epoch.take(rows).tobytes() != last.epoch.tobytes()  # epochs are unique
            or plan.output_position.tobytes() != last.num_output.tobytes()
            or plan.num_computed.tobytes() != last.ends.tobytes()
        ):
            return None
        num_blocks = table.blocks.num_blocks.take(rows)
        if num_blocks.tobytes() == last.num_blocks.tobytes():
            return CachedRequest(None, NO_ROWS, NO_ROWS)
        new_blocks = num_blocks - last.num_blocks
        grown = new_blocks.nonzero()[0]
        return None if new_blocks.min() < 0 else CachedRequest(None, grown, last.num_blocks.take(grown))

    def _of_any_parts(self, plan: StepPlan, order: int | None) -> CachedRequest:
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
        return CachedRequest(None if as_told.all() else as_told, grown, num_told.take(grown))

    def new_blocks(self, rows: IntArray, first: IntArray) -> list[list[int]]:
        """New block ids in the runner's numbering, from block ``first`` on, for slots that have grown."""
        table = self.table.blocks
        num_blocks = table.num_blocks.take(rows)
        if (num_blocks == first + 1).all():
            return [[block] for block in (table.ids[rows, first] + NULL_BLOCKS).tolist()]
        spans = zip(rows.tolist(), first.tolist(), num_blocks.tolist(), strict=True)
        return [runner_blocks(self.table, row, start, end) for row, start, end in spans]

    def note(self, plan: StepPlan, order: int) -> None:
        """Records that the plan's parts have been sent. Call it after ``compare``."""
        rows, table = plan.rows, self.table
        self._last = _LastPlan(
            rows,
            order,
            table.epoch.take(rows),
            table.blocks.num_blocks.take(rows),
            plan.output_position + plan.sample,
            plan.ends,
        )

    def update(self, told: RunnerState) -> None:
        """Updates a request's own record."""
        self._settle()
        if self._is_of(told):
            told.num_blocks, told.num_output = int(self._num_blocks[told.row]), int(self._num_output[told.row])
            told.order, told.end = int(self._order[told.row]), int(self._end[told.row])

    def drop(self, told: RunnerState) -> None:
        """Marks the request as unknown to the runner."""
        self._settle()
        if self._is_of(told):
            self._epoch[told.row] = -1

    def _is_of(self, told: RunnerState) -> bool:
        return told.is_sent and told.row < len(self._epoch) and bool(self._epoch[told.row] == told.epoch)

    def forget(self, rows: IntArray) -> None:
        """Forgets the runner's state of these slots, because it is uncertain or was not sent."""
        self._settle()
        self._epoch[rows] = -1

    def _settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._epoch[last.rows], self._num_blocks[last.rows] = last.epoch, last.num_blocks
            self._num_output[last.rows], self._order[last.rows] = last.num_output, last.order
            self._end[last.rows] = last.ends


def runner_blocks(table: RequestTable, row: int, start: int, end: int) -> list[int]:
    """Blocks ``start`` to ``end`` of a slot in the runner's numbering."""
    blocks: list[int] = (table.blocks.ids[row, start:end] + NULL_BLOCKS).tolist()
    return blocks
