"""Work list of a step's attention: which tokens read which keys, and which results are merged.

It is built once per step with numpy and shared by all layers. Rows 0 to N - 1 are the step's tokens. If several tokens'
contexts begin with the same run of blocks, each gets another row for that run. One item then reads the run once for all
of them, and the results are merged (BatchLLM section 5). Prefixes may nest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neaptide.kernels.paged_attention.tables import IntArray, StepTables

MAX_ROWS = 48
"""Query rows (tokens times heads per KV head) per item: the values of one KV head then fit the first-level cache."""
MIN_SHARED_TOKENS = 64
"""A shorter run does not repay a merge."""
MAX_LEVELS = 4
"""Depth of nested prefixes."""


@dataclass(slots=True)
class WorkList:
    """The work list in the layout that the kernels read."""

    items: IntArray
    """[items, 5]: first row, last row, start of the request's block table, first key, last key."""
    row_tokens: npt.NDArray[np.int32]
    row_limits: npt.NDArray[np.int32]
    """[rows] Number of keys that the row may see."""
    row_parts: npt.NDArray[np.int32]
    """[rows] The part of the token's result that the row computes; -1 if it computes all."""
    merges: IntArray
    """[tokens with parts, 3]: token, first part, last part."""


def build_work_list(
    query_lens: IntArray,
    seq_lens: IntArray,
    tables: StepTables,
    block_size: int,
    group: int,
    *,
    merge_prefixes: bool = True,
    max_rows: int = MAX_ROWS,
    shared_chunk_tokens: int = 1,
    left_out: Sequence[int] = (),
) -> WorkList:
    """Builds the work list of a step.

    Args:
        query_lens: [requests] tokens computed in this step, each > 0.
        seq_lens: [requests] context after this step.
        tables: block tables of these requests.
        block_size: tokens per block.
        group: query heads per KV head.
        merge_prefixes: read shared blocks once.
        max_rows: query rows of an item, at least ``group``.
        shared_chunk_tokens: requests that compute at most this many tokens join shared runs. A longer chunk fills items
            of its own.
        left_out: requests without items, which are computed elsewhere. They join no shared run.
    """
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    num_tokens = int(starts[-1])
    tile = max(1, max_rows // group)
    tiles = -(-query_lens // tile)
    request = np.repeat(np.arange(len(query_lens)), tiles)
    index = np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = starts[request] + index * tile
    last = np.minimum(first + tile, starts[request + 1])
    context = seq_lens - query_lens
    first_key = np.zeros_like(first)
    last_key = context[request] + last - starts[request]
    items = np.stack((first, last, tables.starts[request], first_key, last_key), axis=1)
    positions = np.arange(num_tokens) + np.repeat(context - starts[:-1], query_lens)
    row_tokens, row_limits = np.arange(num_tokens, dtype=np.int32), (positions + 1).astype(np.int32)
    row_parts = np.full(num_tokens, -1, np.int32)
    merges = np.zeros((0, 3), np.int64)
    kept = np.ones(len(query_lens), np.bool_)
    kept[list(left_out)] = False
    if merge_prefixes:
        shared = _SharedRuns(starts, context, tables, block_size, tile)
        shared.find(np.flatnonzero(kept & (query_lens <= shared_chunk_tokens) & (context >= block_size)))
        if shared.items:
            offsets = np.array([(num_tokens, num_tokens, 0, 0, 0)])
            items = np.concatenate((items, np.array(shared.items) + offsets))
            readers = np.array(shared.readers, np.int32)
            row_tokens = np.concatenate((row_tokens, readers))
            # Every shared run ends before the token.
            row_limits = np.concatenate((row_limits, np.full(len(readers), np.iinfo(np.int32).max, np.int32)))
            row_parts, merges = _number_parts(shared, num_tokens)
            own_items = np.cumsum(tiles) - tiles
            for each, key in shared.own_from.items():
                items[own_items[each] : own_items[each] + tiles[each], 3] = key
    if left_out:
        items = items[np.concatenate((kept[request], np.ones(len(items) - len(request), np.bool_)))]
    return WorkList(items, row_tokens, row_limits, row_parts, merges)


class _SharedRuns:
    """Runs of blocks that several requests read before the tokens that they compute."""

    def __init__(self, starts: IntArray, context: IntArray, tables: StepTables, block_size: int, tile: int) -> None:
        self._starts, self._context = starts, context
        self._tables, self._block_size, self._tile = tables, block_size, tile
        self.items: list[tuple[int, int, int, int, int]] = []
        self.readers: list[int] = []
        """Token of each shared row."""
        self.rows_of: dict[int, list[int]] = {}
        """Token -> its shared rows."""
        self.own_from: dict[int, int] = {}
        """Request -> first key that it reads by itself."""

    def find(self, requests: IntArray, column: int = 0, begin: int = 0, levels: int = MAX_LEVELS) -> None:
        """Finds shared runs from block ``column`` on.

        All ``requests`` have the same blocks before ``column``; those from ``begin`` on are not covered by an item yet.
        Block ``column`` of each request is full and precedes its new tokens.
        """
        entries, table_starts = self._tables
        heads = entries[table_starts[requests] + column]
        order = heads.argsort(kind="stable")
        cuts = np.flatnonzero(np.diff(heads[order])) + 1
        if len(cuts) + 1 >= len(requests):
            return
        for members in np.split(requests[order], cuts):
            if len(members) < 2:
                continue
            full_blocks = int(self._context[members].min() // self._block_size)
            behind = entries[table_starts[members][:, None] + np.arange(column, full_blocks)]
            differs = (behind[1:] != behind[:1]).any(axis=0)
            end = column + (int(differs.argmax()) if differs.any() else len(differs))
            is_long = (end - begin) * self._block_size >= MIN_SHARED_TOKENS
            if is_long:
                self._add(members, begin, end)
            longer = members[self._context[members] >= (end + 1) * self._block_size]
            if levels > 1:
                self.find(longer, end, end if is_long else begin, levels - 1)

    def _add(self, members: IntArray, begin: int, end: int) -> None:
        first_key, last_key = begin * self._block_size, end * self._block_size
        table = int(self._tables.starts[members[0]])
        self.own_from.update(dict.fromkeys(members.tolist(), last_key))
        tokens = np.concatenate([np.arange(*self._starts[each : each + 2]) for each in members]).tolist()
        for part in range(0, len(tokens), self._tile):
            readers = tokens[part : part + self._tile]
            first = len(self.readers)
            self.items.append((first, first + len(readers), table, first_key, last_key))
            for row, token in enumerate(readers, first):
                self.rows_of.setdefault(token, []).append(row)
            self.readers += readers


def _number_parts(shared: _SharedRuns, num_tokens: int) -> tuple[npt.NDArray[np.int32], IntArray]:
    """Numbers the parts: a token's are consecutive, those of shared runs first."""
    row_parts = np.full(num_tokens + len(shared.readers), -1, np.int32)
    merges: list[tuple[int, int, int]] = []
    count = 0
    for token, rows in shared.rows_of.items():
        every = [num_tokens + row for row in rows] + [token]
        row_parts[every] = range(count, count + len(every))
        merges.append((token, count, count + len(every)))
        count += len(every)
    return row_parts, np.array(merges, np.int64)


def split_items(work: WorkList, most_keys: int) -> WorkList:
    """The same work list with at most ``most_keys`` keys per item, so that a long context keeps several processors
    busy.

    Each piece has rows of its own; their results are merged like those of shared runs. A piece keeps rows that see none
    of its keys.
    """
    keys = work.items[:, 4] - work.items[:, 3]
    pieces = np.maximum(1, -(-keys // most_keys))
    if not (pieces > 1).any():
        return work
    item = np.repeat(np.arange(len(pieces)), pieces)
    piece = np.arange(len(item)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items = work.items[item]
    items[:, 3] += piece * most_keys
    items[:, 4] = np.minimum(items[:, 4], items[:, 3] + most_keys)
    counts = np.where(piece > 0, items[:, 1] - items[:, 0], 0)  # number of new rows of each piece
    sources = np.repeat(items[:, 0], counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    is_new = piece > 0
    items[is_new, 0] = len(work.row_tokens) + (np.cumsum(counts) - counts)[is_new]
    items[is_new, 1] = items[is_new, 0] + counts[is_new]
    row_tokens = np.concatenate((work.row_tokens, work.row_tokens[sources]))
    row_limits = np.concatenate((work.row_limits, work.row_limits[sources]))
    num_parts = np.bincount(row_tokens)
    tokens = np.flatnonzero(num_parts > 1)
    last = np.cumsum(num_parts[tokens])
    merges = np.stack((tokens, last - num_parts[tokens], last), axis=1)
    order = row_tokens.argsort(kind="stable")
    in_parts = order[num_parts[row_tokens[order]] > 1]
    row_parts = np.full(len(row_tokens), -1, np.int32)
    row_parts[in_parts] = np.arange(len(in_parts))
    return WorkList(items, row_tokens, row_limits, row_parts, merges)
