"""Step times of another server, inferred from sums of its metrics.

The gap between two tokens of a stream is the time of one step. So the mean gap between two polls is the mean step
time, each step weighted by its streams. The time from a prompt's first step to its first token is the time of the
steps that compute it. Both are linear in the costs of a step: a fixed time for steps with and without prompts, a time
per token, per stream, per token of cached context and per pair of prefill attention. Costs are at least 0 and have the
least relative error, with large errors weighted less. Intervals come from fits to minutes drawn with replacement.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.least_squares import fit_relative
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.observation.exposition import (
    ANSWERS,
    CACHED_TOKENS,
    E2E,
    HITS,
    ITL,
    KV_USAGE,
    PREFILL,
    PROMPT_TOKENS,
    PROMPTS,
    QUEUE,
    RUNNING,
    STEP_TOKENS,
    TTFT,
)
from neaptide.observation.record import PollInterval, RecordError, ServerRecord

COSTS = ("fixed_s", "prompt_step_s", "token_s", "stream_s", "kv_token_s", "pair_s")
"""The fitted costs: a step without prompts, one with prompts, each token, each stream, each token of the context read,
each pair of prefill attention."""
LEAST_STEPS = 20
"""Polls are joined until they hold this many steps. Fewer scatter."""
LEAST_ROWS = 12
BLOCK_S = 60.0
LEAST_BLOCKS = 10
"""Fewest blocks that a bootstrap draws from. A short record has shorter blocks."""
FOLDS = 5
PRIOR_ROWS = 1.0
"""Weight, in rows, of the guess that steps with prompts have the fixed time of steps without."""


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """Known limits and memory of the engine."""

    max_num_batched_tokens: int
    kv_tokens: int | None
    """Capacity of the KV cache; None if unknown."""


@dataclass(slots=True, frozen=True)
class InferredStepTimes:
    """A fit."""

    costs: dict[str, float]
    """By name of ``COSTS``."""
    spread: dict[str, tuple[float, float]]
    """90% intervals."""
    draws: list[dict[str, float]]
    """Costs fitted to minutes drawn with replacement."""
    error: float
    """Median relative error of mean step times in parts of the record that the fit has not seen."""
    rows: int
    most_streams: float
    """Largest mean number of streams in a step. Beyond it, costs are extrapolated."""
    most_tokens: float
    """Upper limit of the tokens in the largest step."""

    def step_costs(self, costs: dict[str, float] | None = None) -> dict[str, StepCost]:
        """The costs as those of a device profile; ``costs`` are a draw's."""
        c = costs or self.costs
        return {
            regime.value: StepCost(
                fixed_s=c["fixed_s"] if regime is Regime.DECODE else c["prompt_step_s"],
                gemm_curve_s=(c["token_s"], 2 * c["token_s"]),
                pair_s=c["pair_s"],
                kv_token_s=c["kv_token_s"],
                decode_request_s=c["stream_s"],
            )
            for regime in Regime
        }


@dataclass(slots=True, frozen=True)
class _FitRow:
    at_s: float
    features: tuple[float, ...]
    seconds: float
    is_gap: bool


def fit_step_times(record: ServerRecord, shape: EngineLimits, num_draws: int, seed: int) -> InferredStepTimes:
    """Fits the costs of a step.

    Raises:
        RecordError: the record holds too few steps.
    """
    groups = list(_joined(record.intervals))
    rows = [row for k, group in enumerate(groups) for row in _rows(groups, k, group, shape)]
    if sum(row.is_gap for row in rows) < LEAST_ROWS:
        raise RecordError("too few steps with streams were recorded: record for longer, or at a busier time")
    costs = _fit(rows)
    blocks = _blocks(rows, record.seconds)
    rng = np.random.default_rng([0x0B5, seed])
    draws = []
    for _ in range(num_draws):
        picked = [row for k in rng.integers(len(blocks), size=len(blocks)) for row in blocks[k]]
        draws.append(_fit(picked) if any(row.is_gap for row in picked) else costs)
    spread = {name: _interval([draw[name] for draw in draws], costs[name]) for name in COSTS}
    limits = [
        limit for each in record.intervals for limit, n in each.buckets(STEP_TOKENS) if n and math.isfinite(limit)
    ]
    return InferredStepTimes(
        costs=costs,
        spread=spread,
        draws=draws,
        error=_held_out_error(blocks),
        rows=len(rows),
        most_streams=max(_streams(group) for group in groups),
        most_tokens=max(limits, default=0.0),
    )


def computed_prompt_tokens(interval: PollInterval) -> float:
    """Prompt tokens that were computed, not found in the cache."""
    cached = interval.rise(CACHED_TOKENS) or interval.rise(HITS)
    return max(interval.rise(PROMPT_TOKENS) - cached, 0.0)


def _joined(intervals: Sequence[PollInterval]) -> list[PollInterval]:
    """The intervals, joined until each holds ``LEAST_STEPS`` steps. Those of a restart are left out."""
    joined: list[PollInterval] = []
    parts: list[PollInterval] = []
    for each in intervals:
        if each.restarted:
            parts = []
            continue
        parts.append(each)
        if sum(part.count(STEP_TOKENS) for part in parts) >= LEAST_STEPS:
            rises: dict[str, float] = {}
            for part in parts:
                for key, value in part.rises.items():
                    rises[key] = rises.get(key, 0.0) + value
            names = {name for part in parts for name in part.after}
            mean = {
                name: sum(p.gauge(name) * p.seconds for p in parts) / sum(p.seconds for p in parts) for name in names
            }
            joined.append(PollInterval(parts[0].start_s, parts[-1].end_s, rises, mean, mean))
            parts = []
    return joined


def _streams(each: PollInterval) -> float:
    """Mean number of streams in a step without prompts, at least 1."""
    steps, prompts = each.count(STEP_TOKENS), _prompt_steps(each)
    beside = prompts * min(each.sum(ITL) / each.seconds, each.count(ITL) / max(steps, 1.0))
    return max((each.count(ITL) - beside) / max(steps - prompts, 1.0), 1.0)


def _prompt_steps(each: PollInterval) -> float:
    """Steps in which a prompt ended: those with more tokens than there are streams, at most one for each prompt."""
    prompts = each.count(TTFT)
    if not prompts:
        return 0.0
    streams = max(each.before.get(RUNNING, 0.0), each.after.get(RUNNING, 0.0), 1.0)
    larger = sum(number for limit, number in each.buckets(STEP_TOKENS) if limit > streams * 2)
    return min(max(larger, 1.0), prompts, each.count(STEP_TOKENS))


def _rows(groups: Sequence[PollInterval], k: int, each: PollInterval, shape: EngineLimits) -> list[_FitRow]:
    rows = []
    gaps, prompts = each.count(ITL), each.count(TTFT)
    streams = _streams(each)
    beside = each.sum(ITL) / each.seconds
    """Streams that run at a random moment, which is what a prompt that arrives finds."""
    context = _context_tokens(groups, each, shape) / max(each.gauge(RUNNING), 1.0)
    if gaps >= LEAST_STEPS / 2:
        steps = _prompt_steps(each)
        tokens = computed_prompt_tokens(each) / steps if steps else 0.0
        chunks = _chunks(tokens, streams, shape)
        share = min(steps * chunks * beside / gaps, 1.0)
        rows.append(
            _FitRow(
                each.start_s,
                (
                    1.0 - share,
                    share,
                    streams + share * tokens / chunks,
                    streams,
                    streams * context,
                    share * _pairs(tokens) / chunks,
                ),
                each.sum(ITL) / gaps,
                is_gap=True,
            )
        )
    ended = each.count(PREFILL)
    if ended and each.sum(PREFILL) > 0 and prompts:
        at_s = each.end_s - (each.sum(E2E) - each.sum(QUEUE)) / max(each.count(E2E), 1.0)
        then = next((group for group in reversed(groups[: k + 1]) if group.start_s <= at_s), groups[0])
        total = each.sum(PROMPTS)
        computed = computed_prompt_tokens(each) / max(each.rise(PROMPT_TOKENS), 1.0)
        together = max(then.count(TTFT) / max(_prompt_steps(then), 1.0), 1.0)
        tokens = together * total * computed / ended
        beside = then.sum(ITL) / then.seconds
        chunks = _chunks(tokens, beside, shape)
        rows.append(
            _FitRow(
                each.start_s,
                (
                    0.0,
                    chunks,
                    tokens + chunks * beside,
                    chunks * beside,
                    chunks * beside * context,
                    _pairs(tokens / together) * together,
                ),
                each.sum(PREFILL) / ended,
                is_gap=False,
            )
        )
    return rows


def _chunks(tokens: float, streams: float, shape: EngineLimits) -> float:
    """Steps that compute a step's prompt tokens."""
    return float(max(math.ceil(tokens / max(shape.max_num_batched_tokens - streams, 1.0)), 1))


def _pairs(tokens: float) -> float:
    return tokens * (tokens + 1) / 2


def _context_tokens(groups: Sequence[PollInterval], each: PollInterval, shape: EngineLimits) -> float:
    """KV tokens that all streams hold together."""
    if shape.kv_tokens is not None and each.gauge(KV_USAGE) > 0:
        return each.gauge(KV_USAGE) * shape.kv_tokens
    ended = sum(group.count(PROMPTS) for group in groups)
    tokens = sum(group.sum(PROMPTS) + group.sum(ANSWERS) / 2 for group in groups)
    return each.gauge(RUNNING) * tokens / ended if ended else 0.0


def _fit(rows: Sequence[_FitRow]) -> dict[str, float]:
    features = np.array([row.features for row in rows])
    seconds = np.array([row.seconds for row in rows])
    pull = np.zeros((1, len(COSTS)))
    pull[0, :2] = np.array([-1.0, 1.0]) * math.sqrt(PRIOR_ROWS) / float(np.median(seconds))
    fitted = fit_relative(features, seconds, pull, np.zeros(1))
    return dict(zip(COSTS, fitted.tolist(), strict=True))


def _blocks(rows: Sequence[_FitRow], length_s: float) -> list[list[_FitRow]]:
    """The rows by minute, or by shorter parts of a short record."""
    block_s = min(BLOCK_S, max(length_s / LEAST_BLOCKS, 1e-3))
    blocks: dict[int, list[_FitRow]] = {}
    for row in rows:
        blocks.setdefault(int(row.at_s // block_s), []).append(row)
    return list(blocks.values())


def _held_out_error(blocks: Sequence[Sequence[_FitRow]]) -> float:
    errors: list[float] = []
    for fold in range(min(FOLDS, len(blocks))):
        seen = [row for k, block in enumerate(blocks) if k % FOLDS != fold for row in block]
        left_out = [row for k, block in enumerate(blocks) if k % FOLDS == fold for row in block if row.is_gap]
        if seen and left_out:
            fitted = _fit(seen)
            errors += [abs(_predicted(fitted, row) / row.seconds - 1.0) for row in left_out]
    return float(np.median(errors)) if errors else math.nan


def _predicted(costs: dict[str, float], row: _FitRow) -> float:
    return sum(costs[name] * feature for name, feature in zip(COSTS, row.features, strict=True))


def _interval(values: Sequence[float], value: float) -> tuple[float, float]:
    if not values:
        return value, value
    low, high = np.percentile(np.asarray(values), (5, 95)).tolist()
    return min(low, value), max(high, value)
