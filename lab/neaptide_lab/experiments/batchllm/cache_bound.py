"""How much of the shared prefixes a cache of a given size keeps, under four evictions, in two orders."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from neaptide.engine.offline.planning.plan import PromptPool, plan_pool
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.pools.planned import pool_of
from neaptide.simulation.pools.prefix_cache import Eviction, cached_tokens, sharing
from neaptide_lab.experiments.batchllm.engine_cache import found_tokens
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "cache-bound"
ABOUT = "prefix hits against cache size: LRU, Echo's reference count, ours, Belady, and planned orders"

PROFILE = "a100-80g-llama-3.1-8b"
FULL = {"batchllm-industry": 8000, "loogle-qa-short": 1951, "blend-trace-1": 20_000}
QUICK = {"batchllm-industry": 1000, "loogle-qa-short": 600}
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Cache sizes, relative to the tokens of all prompts with every prefix once."""
SHOWN_SIZES = (0.02, 0.1)
BLOCK_SIZE = 16
OURS = "ours"
BELADY = "Belady"
LEFT = "Belady beside the longest prompt"
"""In what the longest prompt leaves of the cache: a request that runs holds its own, which no model of a cache does."""
CURVES: dict[str, tuple[str, Eviction | None]] = {
    "shuffled, LRU": ("balance", Eviction.LRU),
    "shuffled, reference count": ("balance", Eviction.REUSE),
    f"shuffled, {OURS}": ("balance", None),
    f"shuffled, {BELADY}": ("balance", Eviction.PLANNED),
    f"shuffled, {LEFT}": ("balance", Eviction.PLANNED),
    "neaptide's order, LRU": ("neaptide", Eviction.LRU),
    "blendserve's order, LRU": ("blendserve", Eviction.LRU),
    "blendserve's order, reference count": ("blendserve", Eviction.REUSE),
    f"blendserve's order, {OURS}": ("blendserve", None),
    f"blendserve's order, {BELADY}": ("blendserve", Eviction.PLANNED),
    f"blendserve's order, {LEFT}": ("blendserve", Eviction.PLANNED),
}
"""The policy that planned the order, and the eviction of the model; None is the engine's own cache under that plan."""
Curve = list[float | None]
"""Share of the prompt tokens found, for every size; None where the longest prompt does not fit."""
NEAR = 0.01
"""Largest distance of the engine's cache to Belady's choice at request granularity, as a fraction of all prompt
tokens."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    profile = load_profile(PROFILE)
    curves: dict[str, dict[str, Curve]] = {}
    rows: list[Row] = []
    for name, limit in (QUICK if quick else FULL).items():
        logger.info("%s", name)
        requests = load_offline(name, seed=0, limit=limit).requests
        pool = pool_of(requests, profile)
        bound = float(pool.shared_tokens.sum() / pool.work.prompt_tokens.sum())
        longest = int(pool.work.prompt_tokens.max())
        curves[name] = {
            curve: _curve(requests, pool, *each, longest * curve.endswith(LEFT)) for curve, each in CURVES.items()
        }
        rows += _rows(name, bound, curves[name])
    notes = [
        "A model of the cache alone: one request after another, prompts in whole blocks, what a prompt has for itself "
        "stands in the cache too. An engine runs many at once, and what they hold cannot be evicted.",
        "Ours is the engine's own pool and cache, which follow the plan; the other curves are a model's. Belady's "
        "choice is the eviction by the order itself, so none does better in that order; an order that was planned "
        "needs next to no cache.",
    ]
    data = {"sizes": list(SIZES), "curves": curves}
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, curves))


def _curve(
    requests: Sequence[TraceRequest], pool: PromptPool, policy: str, eviction: Eviction | None, held_tokens: int
) -> Curve:
    """
    Args:
        held_tokens: of every cache, that are not there for it.
    """
    (order,) = plan_pool(pool, policy)
    lengths = pool.work.prompt_tokens
    all_tokens = int(lengths.sum() - pool.shared_tokens.sum())
    sizes = [int(size * all_tokens - held_tokens) // BLOCK_SIZE * BLOCK_SIZE for size in SIZES]
    if eviction is None:
        all_found = found_tokens(requests, order, sizes, BLOCK_SIZE)
        return [None if found is None else found / int(lengths.sum()) for found in all_found]
    return [
        sharing(lengths, cached_tokens(pool.tree, lengths, order, size, eviction, BLOCK_SIZE)) if size >= 0 else None
        for size in sizes
    ]


def _rows(name: str, bound: float, curves: dict[str, Curve]) -> list[Row]:
    rows = [Row(f"{name}: bound", 100 * bound, None, "%")]
    for size in SHOWN_SIZES:
        found = {curve: hit for curve, hits in curves.items() if (hit := hits[SIZES.index(size)]) is not None}
        for curve, hit in found.items():
            holds, (order, _, eviction) = None, curve.rpartition(", ")
            if eviction == BELADY:
                holds = hit >= max(other_hit for other, other_hit in found.items() if other.startswith(order))
            elif eviction == OURS:
                holds = hit >= found[f"{order}, {LEFT}"] - NEAR
            rows.append(Row(f"{name}, {size:.0%}: {curve}", 100 * hit, None, "%", holds=holds))
    return rows


def _plot(figure: Any, curves: dict[str, dict[str, Curve]]) -> None:
    for axes, (name, lines) in zip(np.atleast_1d(figure.subplots(1, len(curves))), curves.items(), strict=True):
        for curve, hits in lines.items():
            points = [(100 * size, 100 * hit) for size, hit in zip(SIZES, hits, strict=True) if hit is not None]
            axes.plot(*np.array(points).T, marker="o", label=curve)
        axes.set_xscale("log")
        axes.set_title(name)
        axes.set_xlabel("cache, % of the distinct prompt tokens")
        axes.set_ylabel("prompt tokens found, %")
    axes.legend()
