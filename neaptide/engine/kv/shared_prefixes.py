"""Prefixes that running requests share in memory, and the reads that a kernel saves by reading them once.

BatchLLM (section 5) computes the attention of all requests of a shared prefix together, so its keys and values are read
once for a tile of queries. Only requests with one and the same block share a read. Two requests that computed equal
text side by side have blocks of their own.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.config import SharedReads
from neaptide.engine.table import RequestTable

MAX_LEVELS = 4
"""Most prefixes of one request, each longer than the one before. Kernels limit the depth as well."""
NONE = 0
"""Number of no prefix. Its length is 0, so it saves nothing."""


class SharedPrefixes:
    """The prefixes that at least two running requests share. They change only with admissions and ends of requests.

    A prefix ends where the block tables of two requests begin to differ. So it is found when the second of them is
    admitted with a prefix hit. A step then costs two operations on arrays, whatever the length of the prefixes.

    Args:
        table: table of the running requests.
        kernel: what the executor's kernel shares.
    """

    def __init__(self, table: RequestTable, kernel: SharedReads) -> None:
        most = MAX_LEVELS * table.num_slots // 2 + 1
        self._blocks, self._kernel = table.blocks, kernel
        self._of_slot: IntArray = np.full((MAX_LEVELS, table.num_slots), NONE)
        """[levels, slots] the prefixes of each slot, shorter ones first, then ``NONE``."""
        self._read_tokens: IntArray = np.zeros(most, np.int64)
        """[prefixes] tokens that one read brings: those after the prefix's parent, or 0 if they are too few. Longer
        prefixes then bring them with their own."""
        self._num_blocks, self._covered_blocks, self._parent, self._num_readers = ([0] * most for _ in range(4))
        self._num_levels, self._num_used = 0, 1
        """Levels and numbers of prefixes that have been in use."""
        self._ending_at: dict[int, int] = {}
        """Prefix by its last block."""
        self._free = list(range(most - 1, NONE, -1))

    def __len__(self) -> int:
        return len(self._ending_at)

    # ---- admissions and ends ----

    @staticmethod
    def num_held(block_ids: Sequence[int], ref_counts: Sequence[int]) -> int:
        """Leading blocks of a prefix hit that running requests hold. To be asked before the hit is acquired."""
        return bisect_left(block_ids, True, key=lambda block: ref_counts[block] == 0)

    def join(self, slot: int, num_held: int) -> None:
        """Adds a request. Other requests have the first ``num_held`` blocks of its table as well."""
        if num_held * self._blocks.block_size < self._kernel.min_tokens:
            return
        last_block = int(self._blocks.ids[slot, num_held - 1])
        prefix = self._ending_at.get(last_block)
        if prefix is None:
            has_block = (self._blocks.ids[:, num_held - 1] == last_block) & (self._blocks.num_blocks >= num_held)
            others = np.flatnonzero(has_block)
            prefix = self._split(others[others != slot], num_held, last_block)
        path = self._path(prefix)
        self._of_slot[: len(path), slot] = path
        for each in path:
            self._num_readers[each] += 1

    def leave(self, slot: int, num_blocks: int = 0) -> None:
        """Removes a request that keeps only its first ``num_blocks`` blocks."""
        if not self._ending_at:
            return
        for level in reversed(range(MAX_LEVELS)):
            prefix = int(self._of_slot[level, slot])
            if self._num_blocks[prefix] > num_blocks:
                self._of_slot[level, slot] = NONE
                self._num_readers[prefix] -= 1
                if self._num_readers[prefix] == 1:
                    self._drop(prefix, level)

    def _split(self, others: IntArray, num_blocks: int, last_block: int) -> int:
        """Makes a prefix of these readers. Returns their longest one instead if they have too many."""
        path = [each for each in self._of_slot[:, others[0]].tolist() if each != NONE]
        level = sum(self._num_blocks[each] < num_blocks for each in path)
        parent = path[level - 1] if level else NONE
        if level == MAX_LEVELS:
            return parent
        for too_deep in set(self._of_slot[-1, others].tolist()) - {NONE}:
            self._drop(too_deep, MAX_LEVELS - 1)
        prefix = self._ending_at[last_block] = self._free.pop()
        for child in set(self._of_slot[level, others].tolist()) - {NONE}:
            self._parent[child] = prefix
        self._of_slot[level + 1 :, others] = self._of_slot[level:-1, others]
        self._of_slot[level, others] = prefix
        self._num_blocks[prefix], self._parent[prefix], self._num_readers[prefix] = num_blocks, parent, len(others)
        self._measure(prefix)
        self._num_levels = max(self._num_levels, level + 1 + len(path[level:]))
        self._num_used = max(self._num_used, prefix + 1)
        return prefix

    def _drop(self, prefix: int, level: int) -> None:
        """Drops a prefix without a longer one, which all its readers have at this level."""
        readers = np.flatnonzero(self._of_slot[level] == prefix)
        self._of_slot[level, readers] = NONE
        del self._ending_at[int(self._blocks.ids[readers[0], self._num_blocks[prefix] - 1])]
        self._num_blocks[prefix] = self._num_readers[prefix] = self._parent[prefix] = 0
        self._read_tokens[prefix] = 0
        self._free.append(prefix)

    def _measure(self, prefix: int) -> None:
        """Measures a prefix, and the longer ones from the shortest on."""
        covered = self._covered_blocks[self._parent[prefix]]
        num_tokens = (self._num_blocks[prefix] - covered) * self._blocks.block_size
        is_read_once = num_tokens >= self._kernel.min_tokens
        self._read_tokens[prefix] = num_tokens if is_read_once else 0
        self._covered_blocks[prefix] = self._num_blocks[prefix] if is_read_once else covered
        for longer in self._ending_at.values():
            if self._parent[longer] == prefix:
                self._measure(longer)

    def _path(self, prefix: int) -> list[int]:
        """The prefix and the shorter ones in it, shorter ones first."""
        path: list[int] = []
        while prefix != NONE:
            path.append(prefix)
            prefix = self._parent[prefix]
        return path[::-1]

    # ---- steps ----

    def readers(self, rows: IntArray) -> IntArray:
        """[prefixes] number of these slots that read each prefix."""
        prefixes = self._of_slot[: self._num_levels].take(rows, axis=1)
        return np.bincount(prefixes.reshape(-1), minlength=self._num_used)

    def saved_tokens(self, readers: IntArray) -> int:
        """Reads that a step of decodes with these numbers of ``readers`` saves, in KV tokens."""
        return int((readers - self._num_reads(readers)).dot(self._read_tokens[: len(readers)]))

    def saved_by_each(self, rows: IntArray) -> FloatArray:
        """[rows] equal shares of the reads that a step of these decodes saves, in KV tokens."""
        prefixes = self._of_slot[: self._num_levels].take(rows, axis=1)
        readers = np.bincount(prefixes.reshape(-1), minlength=self._num_used)
        saved = (1.0 - self._num_reads(readers) / np.maximum(readers, 1)) * self._read_tokens[: len(readers)]
        by_each: FloatArray = saved[prefixes].sum(axis=0)
        return by_each

    def _num_reads(self, readers: IntArray) -> IntArray:
        """[prefixes] reads for these numbers of ``readers``."""
        return -(-readers // self._kernel.decodes_per_read)


class SharedReadsDraft:
    """Reads that the decodes of a drafted step save.

    Args:
        prefixes: None if the kernel shares no reads.
    """

    def __init__(self, prefixes: SharedPrefixes | None) -> None:
        self._prefixes = prefixes if prefixes is not None and len(prefixes) else None
        self._readers: IntArray | None = None
        """[prefixes] decodes of the step that read each; None before the first."""
        self._saved_tokens = 0
        self._asked: IntArray | None = None
        """Slots that were asked about last, and the answer, as most are then added."""
        self._answer: tuple[IntArray, int] | None = None

    def alone(self, rows: IntArray) -> int:
        """KV tokens that a step of only these decodes need not read."""
        return 0 if self._prefixes is None else self._prefixes.saved_tokens(self._prefixes.readers(rows))

    def with_rows(self, rows: IntArray) -> int:
        """KV tokens that the step need not read if these slots also decode, in addition to those of the step so far."""
        return 0 if self._prefixes is None else self._with(self._prefixes, rows)[1] - self._saved_tokens

    def add(self, rows: IntArray) -> int:
        """Adds the decodes of these slots; returns ``with_rows``."""
        if self._prefixes is None:
            return 0
        before = self._saved_tokens
        self._readers, self._saved_tokens = self._with(self._prefixes, rows)
        self._asked = self._answer = None
        return self._saved_tokens - before

    def _with(self, prefixes: SharedPrefixes, rows: IntArray) -> tuple[IntArray, int]:
        """Readers and saved tokens of the step with these slots."""
        if self._answer is None or rows is not self._asked:
            readers = prefixes.readers(rows)
            if self._readers is not None:
                readers += self._readers
            self._asked, self._answer = rows, (readers, prefixes.saved_tokens(readers))
        return self._answer
