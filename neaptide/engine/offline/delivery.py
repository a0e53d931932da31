"""What the engine was told of one batch: rows that wait, in the order in which they are handed out."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.segments import Path, Segment, own_segment
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree
from neaptide.engine.offline.row_groups import RowGroups
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId

RowKey = Callable[[TokenFile, int], Any]
"""A sortable key of one row of a job: the rows of a job are handed out in its order."""


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
        self.rows = rows
        self.next_index = 0
        """Into ``rows``: what lies before has been handed out."""
        self.made: dict[int, Request] = {}
        """Requests of rows that were looked at and not handed out, by row."""
        self._params_index = params_index
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

    @property
    def num_left(self) -> int:
        return len(self.rows) - self.next_index

    @property
    def left(self) -> tuple[IntArray, IntArray]:
        """Rows left, and ``max_tokens`` of each."""
        limits = np.array([params.max_tokens for params in self._params_table], np.int64)
        return self.rows[self.next_index :], limits[self._params_index[self.next_index :]]

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

    def take(self, index: int) -> Request:
        """Hands the row out."""
        request = self.made.pop(int(self.rows[index]), None)
        if request is None:
            request = self.make(index)
            del self.made[int(self.rows[index])]
        self._leave(index)
        return request

    def drop(self, row: int) -> None:
        """Forgets a row that is left; nearly always it is the first."""
        del self.made[row]
        self._leave(self._index_of(row))

    def _index_of(self, row: int) -> int:
        index = self.next_index
        if self.rows[index] != row:
            index += int(np.flatnonzero(self.rows[index:] == row)[0])
        return index

    def _leave(self, index: int) -> None:
        row = int(self.rows[index])
        self.num_prompt_tokens_left -= self.tokens.num_tokens(row)
        self.num_new_tokens_left -= self._num_new_tokens(row)
        if index == self.next_index:
            self.next_index += 1
        else:
            self.rows, self._params_index = np.delete(self.rows, index), np.delete(self._params_index, index)

    def _num_new_tokens(self, row: int) -> int:
        return self.tokens.num_tokens(row)

    def _path(self, row: int) -> Path:
        return ()


class PrefixDelivery(Delivery):
    """Rows of one token file that are handed out along its prefix tree, and what they want of each prefix."""

    def __init__(
        self, message: AddBatch, tokens: TokenFile, rows: IntArray, params_index: IntArray, now_s: float
    ) -> None:
        self._tree = tree = PrefixTree.load(tokens.stem, len(tokens))
        self._place = np.empty(len(tokens), np.int64)
        """Of each row in the tree's order."""
        self._place[tree.rows] = np.arange(len(tokens))
        self._num_wanting = np.zeros(len(tree.parent), np.int64)
        """[nodes] of those without a segment."""
        self._segments: dict[int, Segment] = {}
        """By node, of the nodes of rows that were looked at."""
        self._new_tokens = np.zeros(len(tokens), np.int64)
        """[rows of the file] of those left, without what they share with one before them."""
        self._groups: RowGroups | None = None
        """Made when they are asked for; kept as rows leave."""
        self._started = set[int]()
        """Nodes at the top of the tree of which a row was handed out since: their prefixes may be cached."""
        super().__init__(message, tokens, rows[:0], params_index[:0], now_s)
        self._params_table = []
        self.extend(message, rows, params_index)

    def extend(self, message: AddBatch, rows: IntArray, params_index: IntArray) -> None:
        """Takes in more rows of the file."""
        rows = np.concatenate((self.rows[self.next_index :], rows))
        params_index = np.concatenate((self._params_index[self.next_index :], params_index + len(self._params_table)))
        self.num_prompt_tokens_left += int(self.tokens.lengths(rows[self.num_left :]).sum())
        added = self._tree.restricted(rows[self.num_left :]).num_wanted
        order = np.argsort(self._place[rows], kind="stable")
        self.rows, self._params_index, self.next_index = rows[order], params_index[order], 0
        self._groups = None
        self._params_table += message.params_table
        self.max_output_tokens = max(self.max_output_tokens, *(params.max_tokens for params in message.params_table))
        self._stream_rows |= frozenset(message.stream_rows)
        self._num_wanting += added
        self._new_tokens[self.rows] = self._tree.restricted(self.rows).new_tokens(self.tokens.lengths(self.rows))
        self.num_new_tokens_left = int(self._new_tokens[self.rows].sum())
        for node, segment in self._segments.items():
            segment.num_wanting += int(added[node])

    def _num_new_tokens(self, row: int) -> int:
        return int(self._new_tokens[row])

    def wanted_by_rows_left(self) -> list[tuple[Segment, int]]:
        """For every segment, how many of the rows that are left want it."""
        left = self._tree.restricted(self.rows[self.next_index :]).num_wanted
        return [(segment, int(left[node])) for node, segment in self._segments.items()]

    def heads(self, taken: Collection[Request], looked_at: list[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and first row of every group whose prefix may be cached, and of every bucket the first of all
        other rows; none of ``taken``. Requests that are made for it are appended to ``looked_at``."""
        if self._groups is None:
            rows = self.rows[self.next_index :]
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
        super()._leave(index)

    def _path(self, row: int) -> Path:
        node, path = int(self._tree.node[self._place[row]]), [own_segment()]
        while node != NO_NODE:
            segment = self._segments.get(node)
            if segment is None:
                segment = Segment(int(self._tree.depth_tokens[node]), int(self._num_wanting[node]))
                self._segments[node] = segment
            path.append(segment)
            node = int(self._tree.parent[node])
        return tuple(reversed(path))
