"""How long answers will be: a few rows are run first, and tell of those that begin alike."""

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree

SAMPLED_SHARE = 0.01
"""Of a job's rows (BlendServe, section 5.1) ..."""
MIN_SAMPLED = 8
"""... but so many at least."""
PRIOR_OUTPUT_TOKENS = 256
"""Where nothing was sampled."""


def sampled_rows(tree: PrefixTree, job: IntArray, share: float = SAMPLED_SHARE) -> IntArray:
    """The rows to run first: of every job, spread evenly over its part of the tree, so that large groups have some.

    Groups are what stands below a prefix at the top. Those that are left without a sample get one, the largest first,
    until as many rows are sampled again: a few dozen long answers among thousands of others are most of the memory.

    Args:
        job: [rows of the pool] a number for the job of each.
    """
    none = np.zeros(len(tree.rows), np.int64)
    group = np.cumsum(tree.new_tokens(none) == 0)  # a row that shares nothing with the one before it begins one
    by_job = np.argsort(job[tree.rows], kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(job[tree.rows]))))
    found = [np.zeros(0, np.int64)]
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        count = min(max(MIN_SAMPLED, int(np.ceil(share * (end - first)))), end - first)
        if count:
            places = by_job[first:end]
            even = places[((np.arange(count) + 0.5) * ((end - first) / count)).astype(np.int64)]
            groups, begins, sizes = np.unique(group[places], return_index=True, return_counts=True)
            missed = np.flatnonzero(~np.isin(groups, group[even]) & (sizes > 1))
            missed = missed[np.argsort(-sizes[missed], kind="stable")][:count]
            found += [tree.rows[even], tree.rows[places[begins[missed] + sizes[missed] // 2]]]
    return np.concatenate(found)


def estimated_outputs(tree: PrefixTree, known: FloatArray, limits: IntArray) -> FloatArray:
    """[rows of the pool] tokens of every answer.

    What is known is taken; another row gets the mean of the known ones below the deepest prefix of its own that has
    any, so a subtree without samples goes by its siblings; then the mean of all, then the prior. Never above the limit.

    Args:
        tree: of all rows of the pool.
        known: [rows of the pool] NaN where it is not.
        limits: [rows of the pool] ``max_tokens``.
    """
    in_order = known[tree.rows]
    is_known = ~np.isnan(in_order)
    counts = np.concatenate(([0], np.cumsum(is_known)))
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_known, in_order, 0.0))))
    of_all = sums[-1] / counts[-1] if counts[-1] else float(PRIOR_OUTPUT_TOKENS)
    num_known, total = counts[tree.end] - counts[tree.first], sums[tree.end] - sums[tree.first]
    means = np.where(num_known > 0, total / np.maximum(num_known, 1), np.nan)
    inherited: list[float] = [*means.tolist(), of_all]  # its last place is that of ``NO_NODE``
    parents = tree.parent.tolist()
    for node in np.flatnonzero(num_known == 0)[np.argsort(tree.depth_tokens[num_known == 0])].tolist():
        inherited[node] = inherited[parents[node]]  # parents are less deep, so they come first
    assert NO_NODE == -1
    expected = np.array(inherited)[tree.node]
    estimates = np.ones(len(known))  # of rows that the tree does not have as well
    estimates[tree.rows] = np.where(is_known, in_order, expected)
    return np.maximum(np.minimum(estimates, limits), 1.0)
