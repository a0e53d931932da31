"""Order of a pool's rows under each planned policy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.dual_scan import dual_scan_order
from neaptide.engine.offline.planning.blend import PoolWork, Ranked, rank
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.partition import partition
from neaptide.engine.offline.planning.prefix_groups import Grouping, Prefixes, enlarged_first_level
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree, groups_in_file_order
from neaptide.engine.scheduler.baselines.orders import mix


@dataclass(slots=True, frozen=True)
class Pool:
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
    ) -> "Pool":
        tree = PrefixTree.of_order(PromptOrder.of(prompts), unit_tokens)
        lengths = prompts.lengths[tree.rows]
        shared_tokens = lengths - tree.new_tokens(lengths)
        return cls(tree, shared_tokens, PoolWork.of(model, prompts.lengths, output_tokens), kv_tokens)

    def num_runs(self, rows: IntArray) -> int:
        """Number of runs of consecutive rows that share a prefix; a single row counts as a run."""
        top = np.empty(len(self.tree.rows), np.int64)
        top[self.tree.rows] = np.cumsum(self.shared_tokens == 0)
        return int(np.count_nonzero(np.diff(top[rows], prepend=0)))


def plan_pool(pool: Pool, policy: str, num_replicas: int = 1) -> list[IntArray]:
    """The rows of each replica, in the order in which they should run.

    Replicas get parts of equal work and density (``partition``), whatever the policy.

    Raises:
        KeyError: ``policy`` is none of ``PLANNED_POLICIES``.
    """
    if num_replicas == 1 and policy != "blendserve":
        return [_ORDERS[policy](pool, pool.tree.rows)]
    ranked = rank(pool.tree, pool.work)
    parts = partition(ranked, num_replicas)
    if policy == "blendserve":
        return [dual_scanned(pool, ranked, part) for part in parts]
    return [_ORDERS[policy](pool, ranked.rows[part]) for part in parts]


def dual_scanned(pool: Pool, ranked: Ranked, part: IntArray) -> IntArray:
    """``blendserve``: the ranked rows at these places, taken from both ends."""
    rows = ranked.rows[part]
    outputs = pool.work.output_tokens[rows]
    held_tokens = pool.work.prompt_tokens[rows] + outputs / 2.0
    order = dual_scan_order(ranked.compute_s[part], ranked.memory_s[part], held_tokens, outputs, pool.kv_tokens)
    return rows[order]


def in_groups(tree: PrefixTree, prompt_tokens: IntArray, grouping: Grouping) -> IntArray:
    """``batchllm`` (section 4): rows by group, the largest ``R_group = 1 / (L_prefix + sum L_distinct)`` first.

    Such groups decode the most for their prefill. A row without a group is a group of its own.
    """
    prefixes = grouping.prefixes
    owner_of_node = np.full(len(prefixes.nodes) + 1, NO_NODE)  # The last entry is for ``NO_NODE``.
    owner_of_node[prefixes.nodes] = grouping.owner
    owner = owner_of_node[tree.node]
    is_grouped = owner != NO_NODE
    group = np.where(is_grouped, owner, len(prefixes.nodes) + np.arange(len(owner)))
    prefix_tokens = np.zeros(len(prefixes.nodes) + len(owner), np.int64)
    prefix_tokens[owner[is_grouped]] = prefixes.depth_tokens[owner[is_grouped]]
    own_tokens = prompt_tokens[tree.rows] - prefix_tokens[group]
    prefill_tokens = prefix_tokens + np.bincount(group, own_tokens, len(prefix_tokens)).astype(np.int64)
    return tree.rows[np.lexsort((group, prefill_tokens[group]))]


def _as_handed_in(pool: Pool, rows: IntArray) -> IntArray:
    return np.sort(rows)


def _shuffled(pool: Pool, rows: IntArray) -> IntArray:
    seed = mix(0)
    return np.array(sorted(rows.tolist(), key=lambda row: mix(row ^ seed)), np.int64)


def _along_the_tree(pool: Pool, rows: IntArray) -> IntArray:
    return pool.tree.restricted(rows).rows


def _groups_as_handed_in(pool: Pool, rows: IntArray) -> IntArray:
    by_file, _ = groups_in_file_order(pool.tree.rows, pool.shared_tokens)
    return by_file[np.isin(by_file, rows)]


def _batchllm(pool: Pool, rows: IntArray) -> IntArray:
    tree = pool.tree.restricted(rows)
    return in_groups(tree, pool.work.prompt_tokens, enlarged_first_level(Prefixes.of(tree)))


_ORDERS: dict[str, Callable[[Pool, IntArray], IntArray]] = {
    "fcfs": _as_handed_in,
    "balance": _shuffled,
    "dfs": _along_the_tree,
    "neaptide": _groups_as_handed_in,
    "batchllm": _batchllm,
}
PLANNED_POLICIES = (*_ORDERS, "blendserve")
