"""Savings of shared prompt prefixes, in tokens that need not be computed again, and the choice of prefixes to share.

With *single-level* sharing, as BatchLLM (arXiv 2412.03594) schedules it, each prompt belongs to at most one group,
which computes one prefix once. With *multi-level* sharing every prefix of the tree is computed once.
"""

from dataclasses import dataclass, field

import numpy as np

from neaptide.policy import NO_NODE, BoolArray, IntArray, PrefixTree


@dataclass(slots=True, frozen=True)
class Prefixes:
    """Shared prefixes of a tree, in preorder."""

    parent: IntArray
    """[prefixes] index of the parent; ``NO_NODE`` at the top."""
    depth_tokens: IntArray
    """[prefixes] length from the prompt's start."""
    num_prompts: IntArray
    """[prefixes] prompts whose longest shared prefix it is."""
    nodes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[prefixes] their nodes in the tree."""

    @classmethod
    def of(cls, tree: PrefixTree) -> "Prefixes":
        nodes = np.lexsort((tree.depth_tokens, tree.first))
        number = np.full(len(nodes) + 1, NO_NODE)  # The last entry is for ``NO_NODE``.
        number[nodes] = np.arange(len(nodes))
        num_prompts = np.bincount(tree.node + 1, minlength=len(nodes) + 1)[1:]
        return cls(number[tree.parent[nodes]], tree.depth_tokens[nodes], num_prompts[nodes], nodes)

    @property
    def own_tokens(self) -> IntArray:
        """[prefixes] tokens beyond the parent's."""
        return self.depth_tokens - np.where(self.parent == NO_NODE, 0, self.depth_tokens[self.parent])

    @property
    def num_levels(self) -> int:
        """Number of nested shared prefixes."""
        return max(_levels(self.parent.tolist()), default=-1) + 1

    @property
    def num_below(self) -> IntArray:
        """[prefixes] prompts that begin with it."""
        below = [*self.num_prompts.tolist(), 0]
        for prefix, parent in zip(range(len(self.parent) - 1, -1, -1), reversed(self.parent.tolist()), strict=True):
            below[parent] += below[prefix]
        return np.array(below[:-1], np.int64)


def saving_ratio(prefix_tokens: int, own_tokens: int, sharing_degree: int, block_size: int = 1) -> float:
    """Share of prompt tokens that need not be computed when groups of ``sharing_degree`` share a prefix.

    BatchLLM, equation 2, for equal groups: ``(k - 1)/k * P/(P + O)``. A cache of whole blocks shares only
    ``floor(P / block_size) * block_size`` tokens of the prefix.
    """
    shared_tokens = prefix_tokens // block_size * block_size
    return (sharing_degree - 1) * shared_tokens / (sharing_degree * (prefix_tokens + own_tokens))


def multi_level_saving(prefixes: Prefixes) -> int:
    """Tokens saved when every prefix is computed once, whatever its level."""
    return int(((prefixes.num_below - 1) * prefixes.own_tokens).sum())


@dataclass(slots=True, frozen=True)
class Grouping:
    """The prefix that each prompt shares, single-level."""

    prefixes: Prefixes
    owner: IntArray
    """[prefixes] the prefix that its prompts share; ``NO_NODE`` if they share none."""

    @property
    def num_members(self) -> IntArray:
        """[prefixes] prompts of its group."""
        grouped = self.owner != NO_NODE
        weights = self.prefixes.num_prompts[grouped]
        return np.bincount(self.owner[grouped], weights, len(self.owner)).astype(np.int64)

    @property
    def saving(self) -> int:
        """Saved tokens: all members of a group but one need not compute its prefix."""
        return int((np.maximum(self.num_members - 1, 0) * self.prefixes.depth_tokens).sum())


def enlarged_first_level(prefixes: Prefixes) -> Grouping:
    """BatchLLM, Algorithm 1: moves deeper levels into the first one where that gains more than it costs.

    Bottom up, a grandchild is forked off with a copy of the child's text if ``(leaves - 1) * tokens`` of the grandchild
    exceeds the child's tokens. Otherwise its prompts become the child's. As published, the last fork out of a child is
    charged too, although the empty child then costs nothing. O(prefixes x depth).
    """
    parents, own_tokens = prefixes.parent.tolist(), prefixes.own_tokens.tolist()
    num_members = prefixes.num_prompts.copy()
    merged_into = np.full(len(parents), NO_NODE)
    forked: dict[int, list[tuple[IntArray, IntArray]]] = {}
    """Groups of deeper levels that were forked to below each prefix, and their tokens beyond it."""
    children: dict[int, list[int]] = {}
    """Groups of the level below each prefix."""
    for child in range(len(parents) - 1, -1, -1):
        parent, tokens = parents[child], own_tokens[child]
        if (below := children.pop(child, None)) is not None or child in forked:
            near = np.array(below or (), np.int64)
            pairs = [(near, prefixes.own_tokens[near]), *forked.pop(child, ())]
            groups, group_tokens = (np.concatenate(column) for column in zip(*pairs, strict=True))
            is_forked = (num_members[groups] - 1) * group_tokens > tokens
            kept = groups[~is_forked]
            merged_into[kept] = child
            num_members[child] += num_members[kept].sum()
            if is_forked.any():
                forked.setdefault(parent, []).append((groups[is_forked], group_tokens[is_forked] + tokens))
        if num_members[child]:
            children.setdefault(parent, []).append(child)
    return Grouping(prefixes, _followed(merged_into))


def best_single_level(prefixes: Prefixes) -> Grouping:
    """The grouping that saves the most. O(prefixes x depth) in array operations, one pass up and one down.

    Some prefixes are opened. Each prompt uses u, the deepest open prefix that it begins with, and an open prefix is
    computed once: ``sum over prompts of depth(u) - sum over open prefixes of depth``. The optimum is exact, by ``F(v,
    d) = max(sum_c F(c, d), sum_c F(c, depth(v)) - depth(v))`` and ``F(prompt, d) = d``, with d the depth of the deepest
    open prefix above, or 0.
    """
    parents, num_prompts = prefixes.parent.tolist(), prefixes.num_prompts.tolist()
    levels = _levels(parents)
    below: dict[int, IntArray] = {}
    """Sum of F over the children of each prefix, for each prefix that may be the deepest open one above them. Entries:
    none, those above from the top on, itself."""
    num_opening = [0] * len(parents)
    """Number of them for which opening the prefix is better: it pays as long as little is open above."""
    path = _Path(parents, levels, prefixes.depth_tokens)
    for prefix in range(len(parents) - 1, -1, -1):
        depths = path.to(prefix)
        values = num_prompts[prefix] * depths
        if (found := below.pop(prefix, None)) is not None:
            values += found
        opened = values[-1] - depths[-1]
        num_opening[prefix] = int(np.count_nonzero(opened > values[:-1]))
        best = np.maximum(values[:-1], opened)
        if parents[prefix] != NO_NODE:
            others = below.get(parents[prefix])
            below[parents[prefix]] = best if others is None else others + best
    is_open, open_above = np.zeros(len(parents), np.bool_), [0] * (len(parents) + 1)
    for prefix, parent in enumerate(parents):
        above = open_above[parent] if parent != NO_NODE else 0
        is_open[prefix] = above < num_opening[prefix]
        open_above[prefix] = levels[prefix] + 1 if is_open[prefix] else above
    return Grouping(prefixes, _inherited(prefixes.parent, is_open))


class _Path:
    """Depths of the prefixes from the top down to one prefix, updated along a walk in reverse preorder."""

    def __init__(self, parents: list[int], levels: list[int], depth_tokens: IntArray) -> None:
        self._parents, self._levels, self._depth_tokens = parents, levels, depth_tokens
        self._prefixes = [NO_NODE] * (max(levels, default=0) + 2)
        self._depths = np.zeros(len(self._prefixes), np.int64)

    def to(self, prefix: int) -> IntArray:
        """[level + 2] 0, then the depths of the prefixes above, then its own."""
        at, place = prefix, self._levels[prefix] + 1
        end = place + 1
        while at != NO_NODE and self._prefixes[place] != at:
            self._prefixes[place], self._depths[place] = at, self._depth_tokens[at]
            at, place = self._parents[at], place - 1
        return self._depths[:end]


def _levels(parents: list[int]) -> list[int]:
    """Number of prefixes above each."""
    levels = [0] * len(parents)
    for prefix, parent in enumerate(parents):
        if parent != NO_NODE:
            levels[prefix] = levels[parent] + 1
    return levels


def _inherited(parent: IntArray, is_open: BoolArray) -> IntArray:
    """The deepest open prefix at or above each."""
    owner = [NO_NODE] * len(parent)
    for prefix, (above, opened) in enumerate(zip(parent.tolist(), is_open.tolist(), strict=True)):
        if opened:
            owner[prefix] = prefix
        elif above != NO_NODE:
            owner[prefix] = owner[above]
    return np.array(owner, np.int64)


def _followed(merged_into: IntArray) -> IntArray:
    """Final group of each; a merged one follows the one that absorbed it."""
    owner = list(range(len(merged_into)))
    for prefix, taker in enumerate(merged_into.tolist()):
        if taker != NO_NODE:
            owner[prefix] = owner[taker]
    return np.array(owner, np.int64)
