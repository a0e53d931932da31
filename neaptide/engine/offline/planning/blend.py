"""BlendServe's order of a pool (ASPLOS'26, section 5): compute-bound requests first, with prefixes still shared.

The resource-aware tree (section 5.1) is the prefix tree with a density for every node. Its layers are sorted (Algorithm
1). Parts whose density differs from their tree's are split off (Algorithm 2) while that costs little of the sharing.
The resulting pieces, each with prompts that share prefixes, are ranked by density. The dual scan (``dual_scan_order``)
takes them from both ends.
"""

import math
from dataclasses import dataclass

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree

KEPT_SHARING = 0.99
"""Least share of the tree's sharing that splits keep."""
REPEATED_SHARE = 0.01
"""Most tokens that our splits compute twice, as a share of all computed tokens. Where questions share documents, 1% of
the sharing is a sixth of the computed tokens, which costs more than blending saves."""
CRUMB_SHARE = 1e-4
"""Least size of a piece that is split off, as a share of the pool's work; a step would not notice a smaller one."""
MIN_DENSITY_RATIO = 1.05
"""Least ratio of the densities of two parts that are split."""
MAX_ROUNDS = 64


@dataclass(slots=True, frozen=True)
class PoolWork:
    """Lengths of every row of the pool, and the seconds of the device that it takes by itself."""

    prompt_tokens: IntArray
    output_tokens: FloatArray
    compute_s: FloatArray
    memory_s: FloatArray

    @classmethod
    def of(cls, model: DensityModel, prompt_tokens: IntArray, output_tokens: FloatArray) -> "PoolWork":
        inputs = prompt_tokens.astype(np.float64)
        compute_s, memory_s = model.compute_s(inputs, output_tokens), model.memory_s(inputs, output_tokens)
        return cls(prompt_tokens, output_tokens, compute_s, memory_s)


@dataclass(slots=True, frozen=True)
class Ranked:
    """A pool by density, compute-bound rows first. Columns are in this order."""

    rows: IntArray
    shared_tokens: IntArray
    """Tokens shared with the row before; 0 at the start of a piece."""
    compute_s: FloatArray
    """Compute time after sharing, in seconds."""
    memory_s: FloatArray
    piece: IntArray
    """Index of the piece that each row belongs to, ascending."""

    def with_first(self, rows: IntArray) -> "Ranked":
        """The ranking with these rows before all others, in their order, each as a piece of its own."""
        if not len(rows):
            return self
        place = np.empty(int(self.rows.max()) + 1, np.int64)
        place[self.rows] = np.arange(len(self.rows))
        order = np.concatenate((place[rows], np.flatnonzero(~np.isin(self.rows, rows))))
        piece = self.piece[order] + len(rows)
        piece[: len(rows)] = np.arange(len(rows))
        return Ranked(self.rows[order], self.shared_tokens[order], self.compute_s[order], self.memory_s[order], piece)

    @property
    def root_density(self) -> float:
        return float(self.compute_s.sum() / self.memory_s.sum()) if len(self.rows) else 0.0


def node_densities(tree: PrefixTree, work: PoolWork) -> FloatArray:
    """[nodes] ``(1 - s) T_comp / T_mem`` of the requests below each node (section 5.1).

    s is the share of their tokens that is not computed again. O(nodes) by running sums over the tree's order.
    """
    lengths = work.prompt_tokens[tree.rows]
    new_tokens = tree.new_tokens(lengths)
    outputs = work.output_tokens[tree.rows]

    def below(column: FloatArray) -> FloatArray:
        sums = np.concatenate(([0.0], np.cumsum(column)))
        return sums[tree.end] - sums[tree.first]

    if not len(tree.parent):
        return np.zeros(0)
    path_tokens = (lengths - new_tokens)[tree.first]  # Path of the first row, which other rows have computed.
    all_tokens = below(lengths + outputs)
    computed = below(new_tokens + outputs) + path_tokens
    densities: FloatArray = computed / all_tokens * below(work.compute_s[tree.rows]) / below(work.memory_s[tree.rows])
    return densities


def sort_layers(tree: PrefixTree, work: PoolWork) -> PrefixTree:
    """Algorithm 1: sorts the children of each node, and the requests that end there, by falling density."""
    row_density = work.compute_s[tree.rows] / work.memory_s[tree.rows]
    num_nodes = len(tree.parent)
    parent = np.concatenate((tree.parent, tree.node))
    size = np.concatenate((tree.num_wanted, np.ones(len(tree.rows), np.int64)))
    density = np.concatenate((node_densities(tree, work), row_density))
    place = np.concatenate((tree.first, np.arange(len(tree.rows))))
    by_parent = np.lexsort((place, -density, parent))
    begins = np.cumsum(size[by_parent]) - size[by_parent]
    sorted_parent = parent[by_parent]
    is_first = np.diff(sorted_parent, prepend=NO_NODE - 1) != 0
    offset = np.empty(len(parent), np.int64)
    offset[by_parent] = begins - begins[np.flatnonzero(is_first)][np.cumsum(is_first) - 1] if len(parent) else begins
    first = [*offset[:num_nodes].tolist(), 0]  # The last entry is for ``NO_NODE``.
    parents = tree.parent.tolist()
    for node in np.argsort(tree.depth_tokens, kind="stable").tolist():
        first[node] += first[parents[node]]
    starts = np.array(first)
    places = offset[num_nodes:] + starts[tree.node]
    rows, node = np.empty_like(tree.rows), np.empty_like(tree.node)
    rows[places], node[places] = tree.rows, tree.node
    starts = starts[:-1]
    return PrefixTree(rows, node, tree.parent, tree.depth_tokens, starts, starts + tree.num_wanted)


def rank(
    tree: PrefixTree, work: PoolWork, kept_sharing: float = KEPT_SHARING, repeated_share: float = math.inf
) -> Ranked:
    """Algorithms 1 and 2: ranks the whole pool by density, in pieces that share prefixes.

    Args:
        kept_sharing: least share of the tree's sharing that splits keep.
        repeated_share: most tokens that splits compute twice, as a share of those computed without splits.
    """
    tree = sort_layers(tree, work)
    lengths, outputs = work.prompt_tokens[tree.rows], work.output_tokens[tree.rows]
    shared_tokens = lengths - tree.new_tokens(lengths)
    compute_s = work.compute_s[tree.rows] * (1.0 - shared_tokens / (lengths + outputs))
    memory_s = work.memory_s[tree.rows]
    computed_tokens = float((lengths - shared_tokens + outputs).sum())
    spare_tokens = (1.0 - kept_sharing) * float(shared_tokens.sum())
    spare_tokens = min(spare_tokens, repeated_share * computed_tokens)
    # Counts sharing with any other row, so that the first row of a prefix does not look compute-bound.
    prefix_tokens = np.append(tree.depth_tokens, 0)[tree.node]
    with_prefix_s = work.compute_s[tree.rows] * (1.0 - prefix_tokens / (lengths + outputs))
    starts = split(shared_tokens, with_prefix_s, memory_s, spare_tokens)
    sums = [np.add.reduceat(column, starts) if len(starts) else column for column in (compute_s, memory_s)]
    ranking = np.argsort(-(sums[0] / sums[1]), kind="stable")
    sizes = np.diff(starts, append=len(tree.rows))[ranking]
    piece = np.repeat(np.arange(len(starts)), sizes)
    order = np.arange(len(tree.rows)) + np.repeat(starts[ranking] - (np.cumsum(sizes) - sizes), sizes)
    shared_tokens = np.where(np.diff(piece, prepend=-1) != 0, 0, shared_tokens[order])
    compute_s = work.compute_s[tree.rows[order]] * (1.0 - shared_tokens / (lengths + outputs)[order])
    return Ranked(tree.rows[order], shared_tokens, compute_s, memory_s[order], piece)


def split(shared_tokens: IntArray, compute_s: FloatArray, memory_s: FloatArray, spare_tokens: float) -> IntArray:
    """Algorithm 2 on the sorted layers: start indices of the pieces.

    Siblings are sorted by density, so the rows that differ from the others of a node are at its ends. A piece is split
    in two where the information gain about density, weighted by work, is largest per shared token that is then computed
    twice. This runs in rounds, as parts may be split again, until nothing differs or ``spare_tokens`` are used up.
    Pieces below ``CRUMB_SHARE`` are never split off. There are at most as many splits as rows.
    """
    starts = np.flatnonzero(shared_tokens == 0)
    sums = [np.concatenate(([0.0], np.cumsum(column))) for column in (compute_s, memory_s)]
    crumb_s = CRUMB_SHARE * float(sums[0][-1] + sums[1][-1])
    places = np.flatnonzero(shared_tokens > 0)
    for _ in range(MAX_ROUNDS):
        piece = np.searchsorted(starts, places, side="right") - 1
        bounds = np.append(starts, len(shared_tokens))
        left = [column[places] - column[bounds[piece]] for column in sums]
        right = [column[bounds[piece + 1]] - column[places] for column in sums]
        differs = np.abs(np.log(left[0] * right[1] / (left[1] * right[0])))
        is_worth = (differs > np.log(MIN_DENSITY_RATIO)) & (np.minimum(sum(left), sum(right)) >= crumb_s)
        whole = (left[0] + right[0], left[1] + right[1])
        told_s = _certainty_s(*left) + _certainty_s(*right) - _certainty_s(*whole)
        cost = shared_tokens[places]
        gain = np.where(is_worth, told_s / cost, 0.0)
        best = np.lexsort((-gain, piece))
        best = best[np.diff(piece[best], prepend=-1) != 0]
        best = best[gain[best] > 0]
        best = best[np.argsort(-gain[best], kind="stable")]
        chosen = best[np.cumsum(cost[best]) <= spare_tokens]
        if not len(chosen):
            break
        spare_tokens -= float(cost[chosen].sum())
        starts = np.sort(np.concatenate((starts, places[chosen])))
        places = np.delete(places, chosen)
    return starts


def _certainty_s(compute_s: FloatArray, memory_s: FloatArray) -> FloatArray:
    """Certainty about what the work needs, in seconds: minus its entropy."""
    work_s = compute_s + memory_s
    certainty: FloatArray = compute_s * np.log(compute_s / work_s) + memory_s * np.log(memory_s / work_s)
    return certainty
