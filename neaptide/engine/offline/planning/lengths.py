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
BEGUN_TOKENS = 2048
"""Of a kind whose samples run and have not ended yet."""


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


def estimated_outputs(
    tree: PrefixTree, known: FloatArray, limits: IntArray, so_far: FloatArray | None = None
) -> FloatArray:
    """[rows of the pool] tokens of every answer.

    What is known is taken; another row gets the mean below the deepest prefix of its own that has any known one, so a
    subtree without samples goes by its siblings; then the mean of all, then the prior. Never above the limit.

    Answers that run tell as well: when the short ones of a kind have ended the long ones run, and if only those counted
    that have ended all would look short (``_grown``). Of a kind that has begun and of which none has ended nothing is
    known but that it is longer than others, and it is taken to be long: to expect too much of answers leaves memory
    open until the next plan, to expect too little fills it beyond what it holds. What runs goes on for as long as one
    of its kind that begins.

    Args:
        tree: of all rows of the pool.
        known: [rows of the pool] NaN where it is not.
        limits: [rows of the pool] ``max_tokens``.
        so_far: [rows of the pool] what answers have put out that run, 0 of the others; None where none does.
    """
    running = np.zeros(len(known)) if so_far is None else so_far
    in_order, runs = known[tree.rows], running[tree.rows]
    is_known = ~np.isnan(in_order)
    ended = np.where(is_known, in_order, 0.0)
    columns = np.stack((is_known, ended, ended**2, runs, runs**2)).astype(np.float64)
    of_all = _grown(columns.sum(axis=1)) if is_known.any() else np.array(float(PRIOR_OUTPUT_TOKENS))
    sums = np.concatenate((np.zeros((len(columns), 1)), np.cumsum(columns, axis=1)), axis=1)
    below = sums[:, tree.end] - sums[:, tree.first]
    inherited: list[float] = [*_grown(below).tolist(), float(of_all)]  # its last place is that of ``NO_NODE``
    parents, without = tree.parent.tolist(), np.flatnonzero(below[0] == 0)
    for node in without[np.argsort(tree.depth_tokens[without])].tolist():  # parents are less deep, so they come first
        is_begun = inherited[node] > 0.0 and parents[node] == NO_NODE
        inherited[node] = max(inherited[node], BEGUN_TOKENS if is_begun else inherited[parents[node]])
    assert NO_NODE == -1
    expected = np.array(inherited)[tree.node]
    estimates = np.ones(len(known))  # of rows that the tree does not have as well
    estimates[tree.rows] = np.where(is_known, in_order, runs + expected)
    return np.maximum(np.minimum(estimates, limits), 1.0)


def _grown(sums: FloatArray) -> FloatArray:
    """The mean of answers: of those that have ended, times the root of all squares over theirs. That is the likeliest
    factor if an end is the likelier the longer an answer is (a Weibull distribution of shape 2). Where none has ended,
    what has been put out.

    Args:
        sums: of answers that have ended their number, tokens and squares of tokens; of those that run the latter two.
    """
    count, ended, ended_squares, running, running_squares = sums
    mean = ended / np.maximum(count, 1.0)
    grown: FloatArray = mean * np.sqrt(1.0 + running_squares / np.maximum(ended_squares, 1.0))
    return np.where(count > 0.0, grown, running)
