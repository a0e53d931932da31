"""Sorted order of a pool's prompts, which defines its prefix tree.

Prompts that share a prefix are consecutive. So the order, together with the tokens that each prompt shares with the one
before it, contains the whole tree.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from sys import byteorder
from typing import Self

import numpy as np
import numpy.typing as npt

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.offline.planning.prompts import Prompts

WINDOW_BYTES = 64 << 20
"""Bytes of tokens that are compared at a time. Sorting takes a few times this memory, however long prompts are."""
MIN_WINDOW_TOKENS, MAX_WINDOW_TOKENS = 16, 4096
SORTED_PART = 4
"""One of this many columns of a window is sorted by, from the first difference on."""

TokenTable = npt.NDArray[np.uint32]
"""[rows, tokens]"""


@dataclass(slots=True, frozen=True)
class PromptOrder:
    rows: IntArray
    """[rows] sorted by salt and tokens; a prompt precedes those that it is a prefix of."""
    shared_tokens: IntArray
    """[rows] tokens shared with the prompt before; 0 for the first."""

    @classmethod
    def of(cls, prompts: Prompts, rows: IntArray | None = None) -> Self:
        """Sorts the prompts one window of tokens at a time.

        Only rows that are equal so far use the next window, so prompts without shared prefixes drop out after the
        first. Columns that are equal in all runs are skipped, and only the first columns after them are sorted by.
        Windows grow, so that long prompts need few.
        """
        rows = np.arange(len(prompts)) if rows is None else rows
        rows = rows[np.argsort(prompts.salt[rows], kind="stable")]
        shared_tokens = np.zeros(len(rows), np.int64)
        salts = prompts.salt[rows]
        alike, start, width = _in_runs(salts[1:] == salts[:-1]), 0, MIN_WINDOW_TOKENS
        while len(alike.places):
            places = alike.places
            table = prompts.windows(rows[places], start, min(width, _window_tokens(len(places))))
            table, passed = _first_difference(table, alike.run, start == 0)
            start, width = start + passed, 2 * width
            order = _sorted_within(table, alike.run)
            rows[places], table = rows[places][order], table[order]
            differs = table[1:] != table[:-1]
            is_equal = ~differs.any(axis=1)
            num_equal = np.where(is_equal, table.shape[1], differs.argmax(axis=1))
            lengths = prompts.lengths[rows[places]]
            same_run = alike.run[1:] == alike.run[:-1]
            shorter, longer = np.minimum(lengths[1:], lengths[:-1]), np.maximum(lengths[1:], lengths[:-1])
            shared_tokens[places[1:][same_run]] = np.minimum(start + num_equal, shorter)[same_run]
            start += table.shape[1]
            alike = _in_runs(same_run & is_equal & (longer >= start)).within(places)
        return cls(rows, shared_tokens)

    def added(self, prompts: Prompts, rows: IntArray) -> "PromptOrder":
        """The order with these rows added; ``prompts`` has all rows. Takes a few comparisons per added row."""
        new = PromptOrder.of(prompts, rows)
        standing, key = self.rows.tolist(), cache(prompts.sort_key)  # The first probes are the same for all rows.
        lows, highs = self._with_the_same_head(prompts, new.rows)
        near = zip(new.rows.tolist(), lows.tolist(), highs.tolist(), strict=True)
        before = np.array([bisect_right(standing, key(row), *bounds, key=key) for row, *bounds in near], np.int64)
        merged = np.insert(self.rows, before, new.rows)
        shared_tokens = np.insert(self.shared_tokens, before, new.shared_tokens)
        at = before + np.arange(len(before))
        is_new = np.zeros(len(merged) + 1, np.bool_)
        is_new[at] = True
        # Prefixes shared by two new rows are known.
        changed = np.flatnonzero(is_new != np.roll(is_new, 1))
        for place in changed[(changed > 0) & (changed < len(merged))].tolist():
            shared_tokens[place] = prompts.num_shared(int(merged[place - 1]), int(merged[place]))
        if len(merged):
            shared_tokens[0] = 0
        return PromptOrder(merged, shared_tokens)

    def _with_the_same_head(self, prompts: Prompts, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Bounds of the rows among which each new row has its place.

        They have its salt, and equal tokens at the first difference within the salt. Computed for all rows at once, so
        that few are compared one by one.
        """
        salts, own_salts = prompts.salt[self.rows], prompts.salt[rows]
        lows, highs = np.searchsorted(salts, own_salts), np.searchsorted(salts, own_salts, side="right")
        for salt in np.unique(own_salts[highs - lows > 1]).tolist():
            low, high = np.searchsorted(salts, [salt, salt + 1]).tolist()
            common = int(self.shared_tokens[low + 1 : high].min())
            at = np.flatnonzero(own_salts == salt)
            if common:
                first = int(self.rows[low])
                at = at[[prompts.num_shared(first, row) >= common for row in rows[at].tolist()]]
            heads, own = prompts.heads(self.rows[low:high], common), prompts.heads(rows[at], common)
            lows[at], highs[at] = low + np.searchsorted(heads, own), low + np.searchsorted(heads, own, side="right")
        return lows, highs

    def without(self, rows: IntArray) -> "PromptOrder":
        """The order without these rows: neighbours share the least of what was shared between them."""
        kept = np.flatnonzero(~np.isin(self.rows, rows))
        if not len(kept):
            return PromptOrder(self.rows[:0], self.shared_tokens[:0])
        starts = np.concatenate(([0], kept[:-1] + 1))
        shared_tokens = np.minimum.reduceat(self.shared_tokens[: kept[-1] + 1], starts)
        shared_tokens[0] = 0
        return PromptOrder(self.rows[kept], shared_tokens)


@dataclass(slots=True, frozen=True)
class _Runs:
    """Places that belong to a run of at least two."""

    places: IntArray
    run: IntArray
    """[places] index of each one's run, ascending."""

    def within(self, places: IntArray) -> "_Runs":
        """The same runs as places of an outer array."""
        return _Runs(places[self.places], self.run)


def _in_runs(is_alike: BoolArray) -> _Runs:
    """Finds the runs. ``is_alike``: whether each place but the first is in one run with the one before it."""
    joined = np.concatenate(([False], is_alike, [False]))
    in_run = joined[1:] | joined[:-1] if len(is_alike) else np.zeros(0, np.bool_)
    places = np.flatnonzero(in_run)
    return _Runs(places, np.cumsum(~joined[places]))


def _window_tokens(num_rows: int) -> int:
    return min(max(WINDOW_BYTES // (4 * num_rows), MIN_WINDOW_TOKENS), MAX_WINDOW_TOKENS)


def _first_difference(table: TokenTable, run: IntArray, is_first: bool) -> tuple[TokenTable, int]:
    """The columns to sort by, and the number of columns before them that are equal in every run."""
    differs = (table[1:] != table[:-1])[run[1:] == run[:-1]].any(axis=0)
    passed = int(differs.argmax()) if differs.any() else table.shape[1] - 1
    width = table.shape[1] if is_first else max(table.shape[1] // SORTED_PART, MIN_WINDOW_TOKENS)
    return table[:, passed : passed + width], passed


def _sorted_within(table: TokenTable, run: IntArray) -> IntArray:
    """The order of rows by their tokens within each run; runs of equal rows stay as they are."""
    differs = (table[1:] != table[:-1]).any(axis=1) & (run[1:] == run[:-1])
    is_open = np.zeros(int(run[-1]) + 1, np.bool_)
    is_open[run[1:][differs]] = True
    places = np.flatnonzero(is_open[run])
    order = np.arange(len(run))
    if len(places):
        keys = np.empty((len(places), table.shape[1] + 1), np.uint32)
        keys[:, 0], keys[:, 1:] = run[places], table[places]
        if byteorder == "little":
            keys.byteswap(inplace=True)  # Big-endian bytes sort like the numbers.
        order[places] = places[np.argsort(keys.view(f"V{keys.itemsize * keys.shape[1]}").ravel(), kind="stable")]
    return order
