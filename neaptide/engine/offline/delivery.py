"""What the engine was told of one batch: rows that wait, in the order in which they are handed out."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.segments import Path, Segment, own_segment, unplanned
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.planned_uses import NEVER, PlannedUses
from neaptide.engine.offline.prefix_tree import NO_NODE, OrderedFile
from neaptide.engine.offline.row_groups import RowGroups
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId

RowKey = Callable[[TokenFile, int], Any]
"""A sortable key of one row of a job: the rows of a job are handed out in its order."""
UNPLANNED = int(np.iinfo(np.int64).max)
"""The rank of a row that no plan knows: it stands behind those of the plan, in the order that it would have without."""


class PlannedRows(NamedTuple):
    """Of one job, in the order of a plan."""

    rows: IntArray
    ranks: IntArray
    """Places in the plan, ascending."""
    uses: IntArray
    """When each is expected to be handed out, by its place among all of the plan."""

    @classmethod
    def none(cls) -> Self:
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing)


class Delivery:
    """Rows of one token file. Prompts stay in the file until a row is looked at.

    Args:
        rows: those that wait, in their order.
        params_index: [rows] into the message's table.
    """

    def __init__(
        self, message: AddBatch, tokens: TokenFile, rows: IntArray, params_index: IntArray, now_s: float
    ) -> None:
        self.batch_id = message.batch_id
        self.deadline_s = message.deadline_s
        self.tokens = tokens
        self.made: dict[int, Request] = {}
        """Requests of rows that were looked at and not handed out, by row."""
        self._stand(rows, params_index, np.full(len(rows), UNPLANNED))
        self._params_table = list(message.params_table)
        self._stream_rows = frozenset(message.stream_rows)
        self.arrival_s = now_s
        self.salt = message.salt
        self._share = message.share
        self.num_prompt_tokens_left = int(tokens.lengths(rows).sum())
        """Of the rows left ..."""
        self.num_new_tokens_left = self.num_prompt_tokens_left
        """... and of those, without what a row is known to share with one before it."""
        self.max_output_tokens = max(params.max_tokens for params in message.params_table)
        """Of any of its rows."""

    def _stand(self, rows: IntArray, params_index: IntArray, ranks: IntArray) -> None:
        """These rows wait, in this order: those of the plan first."""
        self.rows = rows
        self.ranks = ranks
        """[rows] places in the plan, ascending; ``UNPLANNED`` of the others."""
        self.num_left = len(rows)
        self._params_index = params_index
        self._is_left = np.ones(len(rows), np.bool_)
        """[rows] False: it has been handed out."""
        self._first = 0
        """Where the first row that is left stands."""
        self._planned_end = int(np.searchsorted(ranks, UNPLANNED))
        """Behind the last row of the plan that is left."""

    @property
    def rows_left(self) -> IntArray:
        """In their order."""
        return self.rows[self._first :][self._is_left[self._first :]]

    @property
    def is_planned(self) -> bool:
        """Whether a row of the plan is left."""
        return self._first < self._planned_end

    @property
    def planned_span(self) -> tuple[int, int]:
        """The first and the last rank of rows that are left; some row of the plan is."""
        return int(self.ranks[self._first]), int(self.ranks[self._planned_end - 1])

    def indices(self) -> Iterator[int]:
        """Into ``rows``, of those left, in their order."""
        return (index for index in range(self._first, len(self.rows)) if self._is_left[index])

    def planned_from_back(self) -> Iterator[int]:
        """Into ``rows``, of those of the plan that are left, the last one first."""
        return (index for index in range(self._planned_end - 1, self._first - 1, -1) if self._is_left[index])

    def planned_at(self, rank: int) -> int | None:
        """Into ``rows``, the one of this rank; None if it is none of them, or is not left."""
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank and self._is_left[index] else None

    def follow(self, planned: PlannedRows) -> None:
        """A plan has these rows, in this order; what of them is not left any more does not count.

        No sort: a step of the engine waits.
        """
        rows, ranks, _ = planned
        params_of = np.zeros(len(self.tokens), np.int64)
        params_of[self.rows] = self._params_index
        is_open = np.zeros(len(self.tokens), np.bool_)
        left = self.rows_left
        is_open[left] = True
        counts = rows < len(is_open)
        counts[counts] = is_open[rows[counts]]
        is_open[rows[counts]] = False
        others = left[is_open[left]]
        rows = np.concatenate((rows[counts], others))
        self._stand(rows, params_of[rows], np.concatenate((ranks[counts], np.full(len(others), UNPLANNED))))

    @property
    def left(self) -> tuple[IntArray, IntArray]:
        """Rows left, and ``max_tokens`` of each."""
        limits = np.array([params.max_tokens for params in self._params_table], np.int64)
        is_left = self._is_left[self._first :]
        return self.rows_left, limits[self._params_index[self._first :][is_left]]

    def key(self, row_key: RowKey, index: int) -> Any:
        return row_key(self.tokens, int(self.rows[index]))

    def make(self, index: int) -> Request:
        row, params = int(self.rows[index]), self._params_table[self._params_index[index]]
        request = self.made[row] = Request(
            request_id=str(RowId(self.batch_id, row)),
            prompt_token_ids=self.tokens.prompt(row),
            params=params,
            tier=Tier.BATCH,
            arrival_s=self.arrival_s,
            salt=self.salt,
            report_every_step=row in self._stream_rows,
            deadline_s=self.deadline_s,
            segments=self._path(row),
            share=self._share,
        )
        return request

    def drop(self, row: int) -> None:
        """Hands a row out that was looked at, or forgets it."""
        del self.made[row]
        self._leave(self._index_of(row))

    def _index_of(self, row: int) -> int:
        """Of a row that is left; nearly always it is the first, or the last of the plan."""
        for index in (self._first, max(self._planned_end - 1, 0)):
            if self.rows[index] == row and self._is_left[index]:
                return index
        return self._first + int(np.flatnonzero((self.rows == row)[self._first :] & self._is_left[self._first :])[0])

    def _leave(self, index: int) -> None:
        row = int(self.rows[index])
        self.num_prompt_tokens_left -= self.tokens.num_tokens(row)
        self.num_new_tokens_left -= self._num_new_tokens(row)
        self._is_left[index] = False
        self.num_left -= 1
        while self._first < len(self.rows) and not self._is_left[self._first]:
            self._first += 1
        while self._planned_end > self._first and not self._is_left[self._planned_end - 1]:
            self._planned_end -= 1

    def _num_new_tokens(self, row: int) -> int:
        return self.tokens.num_tokens(row)

    def _path(self, row: int) -> Path:
        return ()


class PrefixDelivery(Delivery):
    """Rows of one token file that are handed out along its prefix tree, and what they want of each prefix.

    What is done here goes by the number of these rows, and not by that of the file's: a large file may come in many
    messages, each a job of its own.
    """

    def __init__(
        self, message: AddBatch, file: OrderedFile, rows: IntArray, params_index: IntArray, now_s: float
    ) -> None:
        self._tree, self._place = file.tree, file.place
        self._places = np.empty(0, np.int64)
        """In the tree's order, ascending, of the rows that waited when the last ones came."""
        self._segments: dict[int, Segment] = {}
        """By node, of the nodes of rows that were looked at."""
        self._new_tokens = np.zeros(len(file.tokens), np.int64)
        """[rows of the file] of those left, without what they share with one before them."""
        self._uses: PlannedUses | None = None
        """[use places] of the plan that is followed."""
        self._use_places: list[int] = []
        """The places of the rows that the plan met, ascending."""
        self._groups: RowGroups | None = None
        """Made when they are asked for; kept as rows leave."""
        self._started = set[int]()
        """Nodes at the top of the tree of which a row was handed out since: their prefixes may be cached."""
        super().__init__(message, file.tokens, rows[:0], params_index[:0], now_s)
        self._params_table = []
        self.extend(message, rows, params_index)

    def extend(self, message: AddBatch, rows: IntArray, params_index: IntArray) -> None:
        """Takes in more rows of the file."""
        self.num_prompt_tokens_left += int(self.tokens.lengths(rows).sum())
        added = np.sort(self._place[rows])
        ranks = np.concatenate((self.ranks[self._is_left], np.full(len(rows), UNPLANNED)))
        rows = np.concatenate((self.rows_left, rows))
        params_index = np.concatenate((self._params_index[self._is_left], params_index + len(self._params_table)))
        order = np.lexsort((self._place[rows], ranks))
        self._stand(rows[order], params_index[order], ranks[order])
        self._groups = None
        self._params_table += message.params_table
        self.max_output_tokens = max(self.max_output_tokens, *(params.max_tokens for params in message.params_table))
        self._stream_rows |= frozenset(message.stream_rows)
        self._places = np.sort(self._place[self.rows], kind="stable")  # without a plan it is sorted already
        rows = self._tree.rows[self._places]
        self._new_tokens[rows] = self._tree.new_tokens_at(self._places, self.tokens.lengths(rows))
        self.num_new_tokens_left = int(self._new_tokens[rows].sum())
        for segment, num_wanting in self._wanting(added):
            segment.num_wanting += num_wanting

    def _wanting(self, places: IntArray) -> list[tuple[Segment, int]]:
        """Every segment, with how many of the rows at these places, ascending, want it."""
        nodes = np.fromiter(self._segments, np.int64, len(self._segments))
        counts = np.searchsorted(places, self._tree.end[nodes]) - np.searchsorted(places, self._tree.first[nodes])
        return list(zip(self._segments.values(), counts.tolist(), strict=True))

    def follow(self, planned: PlannedRows) -> None:
        super().follow(planned)
        self._groups = None
        known = planned.rows < len(self._place)
        use_of = np.full(len(self._place), NEVER)
        use_of[planned.rows[known]] = planned.uses[known]
        self._use_places = self._places.tolist()
        waits = np.zeros(len(self._place), np.bool_)
        waits[self.rows] = True
        rows = self._tree.rows[self._places]
        self._uses = PlannedUses(np.where(waits[rows], use_of[rows], NEVER))
        for node, segment in self._segments.items():
            segment.planned_use = self._planned_use(node)

    def _planned_use(self, node: int) -> Callable[[], int | None]:
        if self._uses is None:
            return unplanned
        first, end = (bisect_left(self._use_places, int(place[node])) for place in (self._tree.first, self._tree.end))
        return partial(self._uses.first, first, end)

    @property
    def segments(self) -> Collection[Segment]:
        """Of the prefixes of rows that were looked at: those that are wanted."""
        return [segment for segment in self._segments.values() if segment.num_wanting]

    def _num_new_tokens(self, row: int) -> int:
        return int(self._new_tokens[row])

    def wanted_by_rows_left(self) -> list[tuple[Segment, int]]:
        """For every segment, how many of the rows that are left want it."""
        return self._wanting(np.sort(self._place[self.rows_left]))

    def heads(self, taken: Collection[Request], looked_at: list[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and first row of every group whose prefix may be cached, and of every bucket the first of all
        other rows; none of ``taken``. Requests that are made for it are appended to ``looked_at``."""
        if self._groups is None:
            rows = self.rows_left
            self._groups = RowGroups(rows, self.tokens.lengths(rows), self._tops(rows))
        with_other = set[int]()
        for bucket, top, rows_left in self._groups:
            is_started = top in self._started
            if not is_started and bucket in with_other:
                continue
            row = next((row for row in rows_left if self.made.get(row) not in taken), None)
            if row is None:
                continue
            if not is_started:
                with_other.add(bucket)
            request = self.made.get(row)
            if request is None:
                request = self.make(self._index_of(row))
                looked_at.append(request)
            yield bucket, request

    def _tops(self, rows: IntArray) -> IntArray:
        """[rows] the nodes at the top of the tree above them."""
        nodes = self._tree.node[self._place[rows]]
        parent = np.append(self._tree.parent, NO_NODE)  # its last place is that of ``NO_NODE``
        while (inner := parent[nodes] != NO_NODE).any():
            nodes = np.where(inner, parent[nodes], nodes)
        return nodes

    def _leave(self, index: int) -> None:
        if self._groups is not None:
            top = self._groups.remove(int(self.rows[index]))
            if top != NO_NODE:
                self._started.add(top)
        if self._uses is not None:
            place = int(self._place[self.rows[index]])
            at = bisect_left(self._use_places, place)
            if at < len(self._use_places) and self._use_places[at] == place:  # else it came after the plan
                self._uses.leave(at)
        super()._leave(index)

    def _path(self, row: int) -> Path:
        node, path = int(self._tree.node[self._place[row]]), [own_segment()]
        while node != NO_NODE:
            segment = self._segments.get(node)
            if segment is None:
                # None of its rows has left: that one would have been looked at.
                first, end = np.searchsorted(self._places, (self._tree.first[node], self._tree.end[node])).tolist()
                depth_tokens = int(self._tree.depth_tokens[node])
                segment = self._segments[node] = Segment(depth_tokens, end - first, self._planned_use(node))
            path.append(segment)
            node = int(self._tree.parent[node])
        return tuple(reversed(path))
