"""Simulates a prefix cache over an order, one request after another, to measure prefix sharing without the engine.

A cache holds prompts in whole blocks. Rows of a prefix tree share its nodes. A row's tokens after its last node are its
own and stay cached until they are evicted, as in an engine. Eviction removes blocks one at a time from the end of a
chain.
"""

import heapq
import math
from enum import StrEnum

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree


class Eviction(StrEnum):
    """Which blocks are evicted first."""

    LRU = "lru"
    """Least recently used."""
    REUSE = "reuse"
    """Wanted by the fewest future rows (Echo's reference count); the oldest among equals."""
    PLANNED = "planned"
    """Used again last according to the order: Belady's optimal choice."""


def cached_tokens(
    tree: PrefixTree, lengths: IntArray, order: IntArray, capacity_tokens: int, eviction: Eviction, unit_tokens: int
) -> IntArray:
    """[order] Cached tokens of each row's prompt when it is run, in whole units.

    Args:
        tree: cut to the unit.
        lengths: [rows of the pool] prompt tokens.
        order: rows of the pool, each once.
    """
    return _Cache(tree, lengths, order, capacity_tokens, eviction, unit_tokens).run()


class _Cache:
    """Tree nodes by number, followed by one part for each row's own tokens."""

    def __init__(
        self,
        tree: PrefixTree,
        lengths: IntArray,
        order: IntArray,
        capacity_tokens: int,
        eviction: Eviction,
        unit_tokens: int,
    ) -> None:
        self._unit, self._eviction, self._room = unit_tokens, eviction, capacity_tokens
        self._order = order
        num_nodes = len(tree.parent)
        node = np.full(int(lengths.size), NO_NODE)
        node[tree.rows] = tree.node
        depth = np.append(tree.depth_tokens, 0)  # the last entry is that of ``NO_NODE``
        own = lengths // unit_tokens * unit_tokens - depth[node]
        self._size: list[int] = [*(tree.depth_tokens - depth[tree.parent]).tolist(), *own.tolist()]
        self._above: list[int] = [*tree.parent.tolist(), *node.tolist()]
        self._num_nodes = num_nodes
        self._has = [0] * len(self._size)
        self._stamp = [0] * len(self._size)
        self._now = 0
        self._heap: list[tuple[float, int, int]] = []
        self._wanted: list[int] = [*tree.num_wanted.tolist(), *[1] * len(own)]
        self._uses: list[list[int]] = []
        """By node, its future uses with the next one last; only if the eviction needs it."""
        if eviction is Eviction.PLANNED:
            self._uses = [[] for _ in self._size]
            for at in range(len(order) - 1, -1, -1):
                for part in self._path(int(order[at])):
                    self._uses[part].append(at)

    def run(self) -> IntArray:
        found = np.zeros(len(self._order), np.int64)
        for at, row in enumerate(self._order.tolist()):
            path = self._path(row)
            hit, is_whole = 0, True
            for part in reversed(path):  # from the top
                hit += self._has[part] if is_whole else 0
                is_whole = is_whole and self._has[part] == self._size[part]
            found[at] = hit
            for part in path:  # deeper parts first, so that they are evicted first among equals
                self._use(part)
            self._evict()
        return found

    def _path(self, row: int) -> list[int]:
        """Parts from a row's own part upwards."""
        part, path = self._num_nodes + row, list[int]()
        while part != NO_NODE:
            path.append(part)
            part = self._above[part]
        return path

    def _use(self, part: int) -> None:
        self._room -= self._size[part] - self._has[part]
        self._has[part] = self._size[part]
        self._wanted[part] -= 1
        self._now += 1
        self._stamp[part] = self._now
        heapq.heappush(self._heap, (self._rank(part), self._now, part))

    def _evict(self) -> None:
        while self._room < 0 and self._heap:
            _, stamp, part = self._heap[0]
            if stamp != self._stamp[part] or not self._has[part]:
                heapq.heappop(self._heap)
                continue
            units = min(math.ceil(-self._room / self._unit), self._has[part] // self._unit)
            self._has[part] -= units * self._unit
            self._room += units * self._unit

    def _rank(self, part: int) -> float:
        if self._eviction is Eviction.LRU:
            return 0.0
        if self._eviction is Eviction.REUSE:
            return self._wanted[part]
        uses = self._uses[part]
        uses.pop()
        return -uses[-1] if uses else -math.inf


def sharing(lengths: IntArray, found: IntArray) -> float:
    """Fraction of all prompt tokens that need not be computed."""
    total = int(lengths.sum())
    return int(found.sum()) / total if total else 0.0


def windowed_density(compute_s: FloatArray, memory_s: FloatArray, num_windows: int) -> list[float]:
    """Densities of an order's consecutive windows of equal work."""
    work_s = np.cumsum(compute_s + memory_s)
    if not len(work_s):
        return []
    number = np.minimum((work_s - (compute_s + memory_s) / 2) / work_s[-1] * num_windows, num_windows - 1).astype(int)
    sums = [np.bincount(number, column, num_windows) for column in (compute_s, memory_s)]
    return [float(c / m) for c, m in zip(*sums, strict=True) if m > 0]
