"""Orders of the offline pool by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from neaptide.engine import extensions
from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.extensions import ExtensionError
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.dual_scan import dual_scan_order
from neaptide.engine.offline.planning.blend import PoolWork, Ranked, rank
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.partition import partition
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.prefix_tree import PrefixTree, groups_in_file_order


@dataclass(frozen=True)
class PromptPool:
    """A pool to plan. Rows are numbered as in ``Prompts``."""

    tree: PrefixTree
    """Prefix tree in the sorted order."""
    shared_tokens: IntArray
    """[rows] tokens that each shares with the one before it in that order, in whole units of the tree."""
    work: PoolWork
    kv_tokens: int
    """Tokens that the KV memory holds."""

    @classmethod
    def of(
        cls, prompts: Prompts, output_tokens: FloatArray, model: DensityModel, kv_tokens: int, unit_tokens: int
    ) -> "PromptPool":
        tree = PrefixTree.of_order(PromptOrder.of(prompts), unit_tokens)
        lengths = prompts.lengths[tree.rows]
        shared_tokens = lengths - tree.new_tokens(lengths)
        return cls(tree, shared_tokens, PoolWork.of(model, prompts.lengths, output_tokens), kv_tokens)

    @cached_property
    def ranked(self) -> Ranked:
        """The rows by compute density, the highest first."""
        return rank(self.tree, self.work)

    def num_runs(self, rows: IntArray) -> int:
        """Number of runs of consecutive rows that share a prefix; a single row counts as a run."""
        top = np.empty(len(self.tree.rows), np.int64)
        top[self.tree.rows] = np.cumsum(self.shared_tokens == 0)
        return int(np.count_nonzero(np.diff(top[rows], prepend=0)))


Order: TypeAlias = Callable[[PromptPool, IntArray], IntArray | Ranked]
"""Puts the given rows of a pool in order. One that returns the pool ``Ranked`` leaves it to the engine from which of
the two sides it takes the next row."""


def plan_pool(pool: PromptPool, order: str, num_replicas: int = 1) -> list[IntArray]:
    """The rows of each replica, in the order in which they should run.

    Replicas get parts of equal work and density (``partition``), whatever the order.

    Raises:
        ExtensionError: there is no such order, or it needs an engine to follow it.
    """
    if num_replicas == 1:
        return [_rows_in_order(pool, order, pool.tree.rows)]
    parts = partition(pool.ranked, num_replicas)
    return [_rows_in_order(pool, order, pool.ranked.rows[part]) for part in parts]


def _rows_in_order(pool: PromptPool, order: str, rows: IntArray) -> IntArray:
    found = find_order(order)(pool, rows)
    if isinstance(found, Ranked):
        raise ExtensionError(f"the order {order!r} is for an engine, which takes rows from both sides as it runs")
    return found


def dual_scanned(pool: PromptPool, ranked: Ranked, part: IntArray) -> IntArray:
    """The ranked rows at these places, in the order in which a dual scan takes them from both ends."""
    rows = ranked.rows[part]
    outputs = pool.work.output_tokens[rows]
    held_tokens = pool.work.prompt_tokens[rows] + outputs / 2.0
    order = dual_scan_order(ranked.compute_s[part], ranked.memory_s[part], held_tokens, outputs, pool.kv_tokens)
    return rows[order]


def _as_handed_in(pool: PromptPool, rows: IntArray) -> IntArray:
    return np.sort(rows)


def _groups_as_handed_in(pool: PromptPool, rows: IntArray) -> IntArray:
    by_file, _ = groups_in_file_order(pool.tree.rows, pool.shared_tokens)
    return by_file[np.isin(by_file, rows)]


ORDERS: dict[str, Order] = {"fcfs": _as_handed_in, "neaptide": _groups_as_handed_in}
"""Orders of this package."""
KIND = "order"


def find_order(name: str) -> Order:
    """The order with this name: one of ours, an entry point, or ``module:function``.

    Raises:
        ExtensionError: there is none, or it cannot be loaded.
    """
    if name in ORDERS:
        return ORDERS[name]
    found = extensions.load(extensions.ORDERS, KIND, name)
    if found is None:
        raise extensions.refusal(extensions.ORDERS, ORDERS, KIND, name)
    if not callable(found):
        raise ExtensionError(f"the order {name!r} is no function")
    order: Order = found
    return order
