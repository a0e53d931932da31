"""BlendServe's sampling of lengths (section 5.1): how well 1% of the answers give the order that all would give."""

import logging
from typing import Any

import numpy as np

from neaptide.engine.arrays import BoolArray, FloatArray
from neaptide.engine.offline.planning.blend import rank
from neaptide.engine.offline.planning.lengths import estimated_outputs, sampled_rows
from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.blend.setting import PROFILE, TRACES, pool_with_true_lengths, profile, trace
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-sampling"
ABOUT = "what the lengths of 1% of the answers tell of a pool's order, against all (BlendServe, section 5.1)"

FULL_REQUESTS, QUICK_REQUESTS = 40_000, 4000
SHARES = (0.0, 0.01, 0.1, 1.0)


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for number in TRACES[:1] if quick else TRACES:
        logger.info("trace %d", number)
        set_ = trace(number, QUICK_REQUESTS if quick else FULL_REQUESTS)
        found[f"trace {number}"] = _by_share(set_, pool_with_true_lengths(set_))
    rows = [
        Row(
            f"{name}, {share:.0%} sampled: work at the end where all lengths put it",
            100 * on_side,
            None,
            "%",
            1,
        )
        for name, shares in found.items()
        for share, (on_side, _) in shares.items()
    ]
    rows += [
        Row(f"{name}, {share:.0%} sampled: root density, of the true one", 100 * root, None, "%", 1)
        for name, shares in found.items()
        for share, (_, root) in shares.items()
    ]
    notes = [
        f"{QUICK_REQUESTS if quick else FULL_REQUESTS:,} requests of the traces on {PROFILE}. The dual scan parts a "
        "pool at its root's density: what counts is which end a request is taken from, weighted by its work (compute "
        "and memory time). The paper says of throughput with 1% only that it is comparable; that is not measured here.",
        "0% takes the prior, 256 tokens, for every answer. A sample tells the mean of those that share a prefix: a "
        "long answer among short ones is not foreseen. Groups that the even sample misses get one more each, at most "
        "as many again: without that a 1% sample often has none of the few long answers that are most of the memory.",
    ]
    data = {name: {str(share): list(pair) for share, pair in shares.items()} for name, shares in found.items()}
    return ExperimentResult(NAME, rows, notes, {"found": data}, lambda figure: _plot(figure, found))


def _by_share(set_: OfflineSet, known: PromptPool) -> dict[float, tuple[float, float]]:
    """By share: the work that stands at its right end, and the root's density; both of what all lengths give."""
    work_s, truth = known.work.compute_s + known.work.memory_s, _Ends.of(known)
    found = {}
    for share in SHARES:
        ends = _Ends.of(pool_of(set_.requests, profile(), _estimated(known, share)))
        on_side = float(work_s[ends.is_left == truth.is_left].sum() / work_s.sum())
        found[share] = on_side, ends.root_density / truth.root_density
    return found


class _Ends:
    def __init__(self, is_left: BoolArray, root_density: float) -> None:
        self.is_left = is_left
        """[rows of the pool] denser than the root."""
        self.root_density = root_density

    @classmethod
    def of(cls, pool: PromptPool) -> "_Ends":
        ranked = rank(pool.tree, pool.work)
        is_left = np.zeros(len(ranked.rows), np.bool_)
        is_left[ranked.rows] = ranked.compute_s > ranked.root_density * ranked.memory_s
        return cls(is_left, ranked.root_density)


def _estimated(pool: PromptPool, share: float) -> FloatArray:
    truth = pool.work.output_tokens
    known = np.full(len(truth), np.nan)
    if share:
        rows = sampled_rows(pool.tree, np.zeros(len(truth), np.int64), share)
        known[rows] = truth[rows]
    return estimated_outputs(pool.tree, known, np.full(len(truth), 1 << 40))


def _plot(figure: Any, found: dict[str, dict[float, tuple[float, float]]]) -> None:
    axes = figure.subplots()
    for name, shares in found.items():
        axes.plot(
            [100 * share for share in shares], [100 * on_side for on_side, _ in shares.values()], "o-", label=name
        )
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("sampled, %")
    axes.set_ylabel("work at the end where all lengths put it, %")
    axes.legend()
