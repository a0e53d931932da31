"""Orders of the offline pool, as papers plan them: what ``neaptide.orders`` names.

``dfs``, ``balance`` and ``blendserve`` are those of BlendServe (ASPLOS'26), section 6.1; ``density`` is the latter for
an engine that takes rows from both sides itself. ``batchllm`` is BatchLLM's, section 4.
"""

import numpy as np

from neaptide.policy import NO_NODE, IntArray, PrefixTree, PromptPool, Ranked, dual_scanned
from neaptide_lab.policies.orders import mix
from neaptide_lab.policies.prefix_groups import Grouping, Prefixes, enlarged_first_level


def depth_first(pool: PromptPool, rows: IntArray) -> IntArray:
    """``dfs``: along the prefix tree."""
    return pool.tree.restricted(rows).rows


def shuffled(pool: PromptPool, rows: IntArray) -> IntArray:
    """``balance``: at random, the same each time."""
    seed = mix(0)
    return np.array(sorted(rows.tolist(), key=lambda row: mix(row ^ seed)), np.int64)


def blendserve(pool: PromptPool, rows: IntArray) -> IntArray:
    """By compute density, from both ends."""
    return dual_scanned(pool, pool.ranked, np.flatnonzero(np.isin(pool.ranked.rows, rows)))


def density(pool: PromptPool, rows: IntArray) -> Ranked:
    """By compute density, for an engine that chooses the end itself. ``rows`` are all of the pool."""
    return pool.ranked


def batchllm(pool: PromptPool, rows: IntArray) -> IntArray:
    """Prefix group by prefix group."""
    tree = pool.tree.restricted(rows)
    return in_groups(tree, pool.work.prompt_tokens, enlarged_first_level(Prefixes.of(tree)))


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
