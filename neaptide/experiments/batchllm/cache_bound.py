"""How much of the shared prefixes a cache of a given size keeps, under four evictions, in two orders."""

import logging
from typing import Any

import numpy as np

from neaptide.engine.offline.planning.plan import Pool, plan_pool
from neaptide.estimator.device_profile import load_profile
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide.simulation.pools.prefix_cache import Eviction, cached_tokens, sharing

NAME = "cache-bound"
ABOUT = "prefix hits against cache size: LRU, Echo's reference count, planned next use (Belady), and planned orders"

PROFILE = "a100-80g-llama-3.1-8b"
FULL = {"batchllm-industry": 8000, "loogle-qa-short": 1951, "blend-trace-1": 20_000}
QUICK = {"batchllm-industry": 1000, "loogle-qa-short": 600}
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of the cache, in the tokens that all prompts would take with every prefix once."""
SHOWN_SIZES = (0.02, 0.1)
CURVES = {
    "shuffled, LRU": ("balance", Eviction.LRU),
    "shuffled, reference count": ("balance", Eviction.REUSE),
    "shuffled, planned next use": ("balance", Eviction.PLANNED),
    "neaptide's order, LRU": ("neaptide", Eviction.LRU),
    "blendserve's order, LRU": ("blendserve", Eviction.LRU),
    "blendserve's order, planned next use": ("blendserve", Eviction.PLANNED),
}


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    profile = load_profile(PROFILE)
    curves: dict[str, dict[str, list[float]]] = {}
    rows: list[Row] = []
    for name, limit in (QUICK if quick else FULL).items():
        logger.info("%s", name)
        pool = pool_of(load_offline(name, seed=0, limit=limit).requests, profile)
        bound = float(pool.shared_tokens.sum() / pool.work.prompt_tokens.sum())
        curves[name] = {curve: _curve(pool, *each) for curve, each in CURVES.items()}
        rows += _rows(name, bound, curves[name])
    notes = [
        "A model of the cache alone: one request after another, prompts in whole blocks, what a prompt has for itself "
        "stands in the cache too. An engine runs many at once, and what they hold cannot be evicted.",
        "Planned next use is Belady's choice where the order is kept, so no eviction does better in that order; an "
        "order that was planned needs next to no cache.",
    ]
    data = {"sizes": list(SIZES), "curves": curves}
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, curves))


def _curve(pool: Pool, policy: str, eviction: Eviction) -> list[float]:
    (order,) = plan_pool(pool, policy)
    lengths = pool.work.prompt_tokens
    all_tokens = int(lengths.sum() - pool.shared_tokens.sum())
    sizes = (np.array(SIZES) * all_tokens).astype(np.int64) // 16 * 16
    return [
        sharing(lengths, cached_tokens(pool.tree, lengths, order, int(size), eviction, 16)) for size in sizes.tolist()
    ]


def _rows(name: str, bound: float, curves: dict[str, list[float]]) -> list[Row]:
    rows = [Row(f"{name}: bound", 100 * bound, None, "%")]
    for size in SHOWN_SIZES:
        at = SIZES.index(size)
        for curve, hits in curves.items():
            holds = None
            if curve == "shuffled, planned next use":
                holds = hits[at] >= max(curves[f"shuffled, {other}"][at] for other in ("LRU", "reference count"))
            rows.append(Row(f"{name}, {size:.0%}: {curve}", 100 * hits[at], None, "%", holds=holds))
    return rows


def _plot(figure: Any, curves: dict[str, dict[str, list[float]]]) -> None:
    for axes, (name, lines) in zip(np.atleast_1d(figure.subplots(1, len(curves))), curves.items(), strict=True):
        for curve, hits in lines.items():
            axes.plot([100 * size for size in SIZES], [100 * hit for hit in hits], marker="o", label=curve)
        axes.set_xscale("log")
        axes.set_title(name)
        axes.set_xlabel("cache, % of the distinct prompt tokens")
        axes.set_ylabel("prompt tokens found, %")
    axes.legend()
