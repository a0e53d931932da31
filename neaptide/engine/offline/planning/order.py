"""A pool's prompts sorted by their tokens: what its prefix tree is made of.

Two prompts that share a prefix stand within the run of all that share it, so the sorted order together with what each
prompt shares with the one before it says everything of a prefix tree.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from sys import byteorder
from typing import Self

import numpy as np

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.offline.planning.prompts import Prompts

WINDOW_BYTES = 64 << 20
"""Of tokens that are compared at a time; the memory that sorting takes is some times this, however long prompts are."""
MIN_WINDOW_TOKENS, MAX_WINDOW_TOKENS = 16, 4096


@dataclass(slots=True, frozen=True)
class PromptOrder:
    rows: IntArray
    """[rows] in the order of their salts and tokens; a prompt stands before those that it is a prefix of."""
    shared_tokens: IntArray
    """[rows] what each begins with in common with the one before it; 0 for the first."""

    @classmethod
    def of(cls, prompts: Prompts, rows: IntArray | None = None) -> Self:
        """Sorts by a window of tokens at a time; only rows that are alike so far look at the next one, so that prompts
        that share nothing drop out after the first."""
        rows = np.arange(len(prompts)) if rows is None else rows
        rows = rows[np.argsort(prompts.salt[rows], kind="stable")]
        shared_tokens = np.zeros(len(rows), np.int64)
        salts = prompts.salt[rows]
        alike, start = _in_runs(salts[1:] == salts[:-1]), 0
        while len(alike.places):
            places, width = alike.places, _window_tokens(len(alike.places))
            keys = np.empty((len(places), width + 1), np.uint32)
            keys[:, 0] = alike.run
            keys[:, 1:] = prompts.windows(rows[places], start, width)
            if byteorder == "little":
                keys.byteswap(inplace=True)  # then bytes are ordered as numbers are
            order = np.argsort(keys.view(f"V{4 * (width + 1)}").ravel(), kind="stable")
            rows[places], keys = rows[places][order], keys[order]
            differs = keys[1:] != keys[:-1]
            is_equal = ~differs.any(axis=1)
            num_equal = np.where(is_equal, width, differs.argmax(axis=1) - 1)
            lengths = prompts.lengths[rows[places]]
            same_run = ~differs[:, 0]
            shorter, longer = np.minimum(lengths[1:], lengths[:-1]), np.maximum(lengths[1:], lengths[:-1])
            shared_tokens[places[1:][same_run]] = np.minimum(start + num_equal, shorter)[same_run]
            start += width
            alike = _in_runs(is_equal & (longer >= start)).within(places)
        return cls(rows, shared_tokens)

    def added(self, prompts: Prompts, rows: IntArray) -> "PromptOrder":
        """With these rows as well; ``prompts`` has the others under the same numbers. A few comparisons for each."""
        new = PromptOrder.of(prompts, rows)
        standing, key = self.rows.tolist(), cache(prompts.sort_key)  # the first probes are the same for all
        before = np.array([bisect_right(standing, key(row), key=key) for row in new.rows.tolist()], np.int64)
        merged = np.insert(self.rows, before, new.rows)
        shared_tokens = np.insert(self.shared_tokens, before, new.shared_tokens)
        at = before + np.arange(len(before))
        is_new = np.zeros(len(merged) + 1, np.bool_)
        is_new[at] = True
        # What a new row shares with a new one before it is known.
        changed = np.flatnonzero(is_new != np.roll(is_new, 1))
        for place in changed[(changed > 0) & (changed < len(merged))].tolist():
            shared_tokens[place] = prompts.num_shared(int(merged[place - 1]), int(merged[place]))
        if len(merged):
            shared_tokens[0] = 0
        return PromptOrder(merged, shared_tokens)

    def without(self, rows: IntArray) -> "PromptOrder":
        """What is left once these have ended: neighbours share the least of what stood between them."""
        kept = np.flatnonzero(~np.isin(self.rows, rows))
        if not len(kept):
            return PromptOrder(self.rows[:0], self.shared_tokens[:0])
        starts = np.concatenate(([0], kept[:-1] + 1))
        shared_tokens = np.minimum.reduceat(self.shared_tokens[: kept[-1] + 1], starts)
        shared_tokens[0] = 0
        return PromptOrder(self.rows[kept], shared_tokens)


@dataclass(slots=True, frozen=True)
class _Runs:
    """Places that stand in a run with another one."""

    places: IntArray
    run: IntArray
    """[places] the number of each one's run, ascending."""

    def within(self, places: IntArray) -> "_Runs":
        """The same among other places: those here are numbers of them."""
        return _Runs(places[self.places], self.run)


def _in_runs(is_alike: BoolArray) -> _Runs:
    """From whether each place but the first is in one run with the one before it."""
    joined = np.concatenate(([False], is_alike, [False]))
    in_run = joined[1:] | joined[:-1] if len(is_alike) else np.zeros(0, np.bool_)
    places = np.flatnonzero(in_run)
    return _Runs(places, np.cumsum(~joined[places]))


def _window_tokens(num_rows: int) -> int:
    return min(max(WINDOW_BYTES // (4 * num_rows), MIN_WINDOW_TOKENS), MAX_WINDOW_TOKENS)
