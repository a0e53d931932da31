"""Waiting lines of one token file, in the order in which they are admitted."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.prefix_nodes import Path, PrefixNode, own_node, unplanned
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.planned_uses import NEVER, PlannedUses
from neaptide.engine.offline.prefix_tree import NO_NODE, OrderedFile
from neaptide.engine.offline.row_groups import RowGroups
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId

RowKey = Callable[[TokenFile, int], Any]
"""Sort key of one line of a job, for policies that order a job's lines by it."""
UNPLANNED = int(np.iinfo(np.int64).max)
"""Rank of a line that is not in the plan. Such lines follow the planned ones, in their order without a plan."""


class PlannedRows(NamedTuple):
    """Lines of one job in the order of a plan."""

    rows: IntArray
    ranks: IntArray
    """Places in the plan, ascending."""
    uses: IntArray
    """Expected place of each line's admission among all lines of the plan."""

    @classmethod
    def none(cls) -> Self:
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing)


class RowSource:
    """Waiting lines of one token file. Prompts stay in the file until a line becomes a request.

    Args:
        rows: the waiting lines, in order.
        params_index: [rows] indices into the message's table.
    """

    def __init__(
        self, message: AddBatch, tokens: TokenFile, rows: IntArray, params_index: IntArray, now_s: float
    ) -> None:
        self.batch_id = message.batch_id
        self.deadline_s = message.deadline_s
        self.tokens = tokens
        self.made: dict[int, Request] = {}
        """Requests that were made and not admitted yet, by line."""
        self._stand(rows, params_index, np.full(len(rows), UNPLANNED))
        self._params_table = list(message.params_table)
        self._stream_rows = frozenset(message.stream_rows)
        self.arrival_s = now_s
        self.salt = message.salt
        self._share = message.share
        self.num_prompt_tokens_left = int(tokens.lengths(rows).sum())
        """Prompt tokens of the waiting lines."""
        self.num_new_tokens_left = self.num_prompt_tokens_left
        """Prompt tokens of the waiting lines, without those shared with an earlier line."""
        self.max_output_tokens = max(params.max_tokens for params in message.params_table)
        """Largest ``max_tokens`` of all lines."""

    def _stand(self, rows: IntArray, params_index: IntArray, ranks: IntArray) -> None:
        """Sets the waiting lines and their order: planned ones first."""
        self.rows = rows
        self.ranks = ranks
        """[rows] places in the plan, ascending; ``UNPLANNED`` for the others."""
        self.num_left = len(rows)
        self._params_index = params_index
        self._is_left = np.ones(len(rows), np.bool_)
        """[rows] whether the line still waits."""
        self._first = 0
        """Index of the first waiting line."""
        self._planned_end = int(np.searchsorted(ranks, UNPLANNED))
        """Index after the last waiting line of the plan."""

    @property
    def rows_left(self) -> IntArray:
        """The waiting lines, in order."""
        return self.rows[self._first :][self._is_left[self._first :]]

    @property
    def is_planned(self) -> bool:
        """Whether a line of the plan waits."""
        return self._first < self._planned_end

    @property
    def planned_span(self) -> tuple[int, int]:
        """First and last rank of the waiting lines; requires ``is_planned``."""
        return int(self.ranks[self._first]), int(self.ranks[self._planned_end - 1])

    def indices(self) -> Iterator[int]:
        """Indices into ``rows`` of the waiting lines, in order."""
        return (index for index in range(self._first, len(self.rows)) if self._is_left[index])

    def planned_from_back(self) -> Iterator[int]:
        """Indices into ``rows`` of the waiting lines of the plan, the last one first."""
        return (index for index in range(self._planned_end - 1, self._first - 1, -1) if self._is_left[index])

    def planned_at(self, rank: int) -> int | None:
        """Index into ``rows`` of the waiting line of this rank; None without one."""
        index = int(np.searchsorted(self.ranks, rank))
        return index if index < len(self.ranks) and self.ranks[index] == rank and self._is_left[index] else None

    def follow(self, planned: PlannedRows) -> None:
        """Puts the lines in the order of a plan; planned lines that do not wait any more are ignored.

        Does not sort, because a step of the engine waits.
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
        """The waiting lines, and ``max_tokens`` of each."""
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
            prefix_nodes=self._path(row),
            share=self._share,
        )
        return request

    def drop(self, row: int) -> None:
        """Removes a line that was made into a request."""
        del self.made[row]
        self._leave(self._index_of(row))

    def _index_of(self, row: int) -> int:
        """Index of a waiting line, which is nearly always the first line or the last of the plan."""
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


class PrefixRowSource(RowSource):
    """Waiting lines in the order of their prefix tree, with the prefix nodes they need.

    The cost depends on the number of these lines, not on that of the file's. A large file may come in many messages,
    each a job of its own.
    """

    def __init__(
        self, message: AddBatch, file: OrderedFile, rows: IntArray, params_index: IntArray, now_s: float
    ) -> None:
        self._tree, self._place = file.tree, file.place
        self._places = np.empty(0, np.int64)
        """Places of the waiting lines in the tree's order, ascending, as of the last message."""
        self._prefix_nodes: dict[int, PrefixNode] = {}
        """Prefix nodes of the lines that became requests, by the tree's node."""
        self._new_tokens = np.zeros(len(file.tokens), np.int64)
        """[lines of the file] prompt tokens of the waiting lines, without those shared with an earlier line."""
        self._uses: PlannedUses | None = None
        """[use places] planned uses of the current plan."""
        self._use_places: list[int] = []
        """Places of the lines that waited when the plan arrived, ascending."""
        self._groups: RowGroups | None = None
        """Made on demand and updated as lines leave."""
        self._started = set[int]()
        """Top nodes of the tree with an admitted line, whose prefixes may therefore be cached."""
        super().__init__(message, file.tokens, rows[:0], params_index[:0], now_s)
        self._params_table = []
        self.extend(message, rows, params_index)

    def extend(self, message: AddBatch, rows: IntArray, params_index: IntArray) -> None:
        """Adds lines of the file."""
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
        for prefix_node, num_wanting in self._wanting(added):
            prefix_node.num_wanting += num_wanting

    def _wanting(self, places: IntArray) -> list[tuple[PrefixNode, int]]:
        """Each prefix node, with the number of lines at these ascending places that need it."""
        nodes = np.fromiter(self._prefix_nodes, np.int64, len(self._prefix_nodes))
        counts = np.searchsorted(places, self._tree.end[nodes]) - np.searchsorted(places, self._tree.first[nodes])
        return list(zip(self._prefix_nodes.values(), counts.tolist(), strict=True))

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
        for node, prefix_node in self._prefix_nodes.items():
            prefix_node.planned_use = self._planned_use(node)

    def _planned_use(self, node: int) -> Callable[[], int | None]:
        if self._uses is None:
            return unplanned
        first, end = (bisect_left(self._use_places, int(place[node])) for place in (self._tree.first, self._tree.end))
        return partial(self._uses.first, first, end)

    @property
    def prefix_nodes(self) -> Collection[PrefixNode]:
        """Prefix nodes of the requests made so far that some request needs."""
        return [prefix_node for prefix_node in self._prefix_nodes.values() if prefix_node.num_wanting]

    def _num_new_tokens(self, row: int) -> int:
        return int(self._new_tokens[row])

    def wanted_by_rows_left(self) -> list[tuple[PrefixNode, int]]:
        """Each prefix node, with the number of waiting lines that need it."""
        return self._wanting(np.sort(self._place[self.rows_left]))

    def heads(self, taken: Collection[Request], materialized: list[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and request of the candidates that a policy should compare; none of ``taken``.

        Candidates are the first line of each group whose prefix may be cached, and of each bucket the first other line.
        Requests made here are appended to ``materialized``.
        """
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
                materialized.append(request)
            yield bucket, request

    def _tops(self, rows: IntArray) -> IntArray:
        """[rows] top node of the tree above each line."""
        nodes = self._tree.node[self._place[rows]]
        parent = np.append(self._tree.parent, NO_NODE)  # The last entry is for ``NO_NODE``.
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
            # A line without a planned use came after the plan.
            if at < len(self._use_places) and self._use_places[at] == place:
                self._uses.leave(at)
        super()._leave(index)

    def _path(self, row: int) -> Path:
        node, path = int(self._tree.node[self._place[row]]), [own_node()]
        while node != NO_NODE:
            prefix_node = self._prefix_nodes.get(node)
            if prefix_node is None:
                # None of its lines has left: that line would have made the node.
                first, end = np.searchsorted(self._places, (self._tree.first[node], self._tree.end[node])).tolist()
                depth_tokens = int(self._tree.depth_tokens[node])
                prefix_node = self._prefix_nodes[node] = PrefixNode(depth_tokens, end - first, self._planned_use(node))
            path.append(prefix_node)
            node = int(self._tree.parent[node])
        return tuple(reversed(path))
