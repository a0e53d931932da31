"""Estimated answer lengths: a few lines run first, and predict the lines that begin alike."""

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree

SAMPLED_SHARE = 0.01
"""Share of a job's lines that is sampled (BlendServe, section 5.1)."""
MIN_SAMPLED = 8
"""Least number of sampled lines per job."""
PRIOR_OUTPUT_TOKENS = 256
"""Expected answer length without samples, in tokens."""
BEGUN_TOKENS = 2048
"""Expected length of answers whose samples run and have not ended yet, in tokens."""


def sampled_rows(tree: PrefixTree, job: IntArray, share: float = SAMPLED_SHARE) -> IntArray:
    """Lines to run first: spread evenly over each job's part of the tree, so that large groups have some.

    A group is the part of the tree below a top node. Groups without a sample get one, the largest first, at most as
    many as the even samples: a few dozen long answers among thousands of others take most of the memory.

    Args:
        job: [rows of the pool] number of each row's job.
    """
    none = np.zeros(len(tree.rows), np.int64)
    group = np.cumsum(tree.new_tokens(none) == 0)  # A row that shares nothing with the one before it begins a group.
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
    """[rows of the pool] expected tokens of every answer.

    Known lengths are kept. Another row gets the mean below its deepest prefix with a known length, else the mean of
    all, else the prior. Estimates never exceed the limit.

    Running answers count as well (``_grown``): the short answers of a kind end first, and their mean alone would be too
    short. A kind with running answers and no ended ones is taken to be long. Too high an estimate leaves memory unused
    until the next plan, too low a one overfills it. A running answer is expected to go on for as long as a new one of
    its kind.

    Args:
        tree: of all rows of the pool.
        known: [rows of the pool] known lengths; NaN elsewhere.
        limits: [rows of the pool] ``max_tokens``.
        so_far: [rows of the pool] output tokens of running answers, 0 elsewhere; None if none runs.
    """
    running = np.zeros(len(known)) if so_far is None else so_far
    in_order, runs = known[tree.rows], running[tree.rows]
    is_known = ~np.isnan(in_order)
    ended = np.where(is_known, in_order, 0.0)
    columns = np.stack((is_known, ended, ended**2, runs, runs**2)).astype(np.float64)
    of_all = _grown(columns.sum(axis=1)) if is_known.any() else np.array(float(PRIOR_OUTPUT_TOKENS))
    sums = np.concatenate((np.zeros((len(columns), 1)), np.cumsum(columns, axis=1)), axis=1)
    below = sums[:, tree.end] - sums[:, tree.first]
    inherited: list[float] = [*_grown(below).tolist(), float(of_all)]  # The last entry is for ``NO_NODE``.
    parents, without = tree.parent.tolist(), np.flatnonzero(below[0] == 0)
    for node in without[np.argsort(tree.depth_tokens[without])].tolist():  # Parents are less deep, so they come first.
        is_begun = inherited[node] > 0.0 and parents[node] == NO_NODE
        inherited[node] = max(inherited[node], BEGUN_TOKENS if is_begun else inherited[parents[node]])
    assert NO_NODE == -1
    expected = np.array(inherited)[tree.node]
    estimates = np.ones(len(known))  # Also covers rows that are not in the tree.
    estimates[tree.rows] = np.where(is_known, in_order, runs + expected)
    return np.maximum(np.minimum(estimates, limits), 1.0)


def _grown(sums: FloatArray) -> FloatArray:
    """Expected mean of answers, corrected for those that still run.

    It is the mean of the ended answers, times the root of the ratio of all squares to the squares of the ended ones.
    That is the likeliest factor if the chance of an end grows with an answer's length (a Weibull distribution of shape
    2). Without ended answers it is the output so far.

    Args:
        sums: number, tokens and squares of tokens of ended answers; tokens and squares of running ones.
    """
    count, ended, ended_squares, running, running_squares = sums
    mean = ended / np.maximum(count, 1.0)
    grown: FloatArray = mean * np.sqrt(1.0 + running_squares / np.maximum(ended_squares, 1.0))
    return np.where(count > 0.0, grown, running)
