"""Step times of another server, inferred from sums of its metrics.

The gap between two tokens of a stream is the time of one step. So the mean gap between two polls is the mean step
time, each step weighted by its streams. The time from a prompt's first step to its first token is the time of the
steps that compute it. Both are linear in the costs of a step. Costs are at least 0 and have the least relative error,
with large errors weighted less. Intervals come from fits to minutes drawn with replacement.

Chats alone show few streams, or a prompt with hundreds of tokens. Batch work fills the steps between. A step waits
either for the memory, which holds the weights, or for the arithmetic. So steps without prompts and steps with prompts
have a line each, and where neither was seen a step takes the greater of both.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.least_squares import fit_relative
from neaptide.estimator.cost.step_cost import StepCost, gemm_knot
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
from neaptide.observation.record import PollInterval, RecordError, ServerRecord, buckets_of

COSTS = ("fixed_s", "prompt_step_s", "token_s", "stream_s", "kv_token_s", "pair_s")
"""The fitted costs: a step without prompts and each stream of it; a step with prompts and each token of it, those of
streams too; each token of the context read; each pair of prefill attention."""
LEAST_STEPS = 20
"""Polls are joined until they hold this many steps. Fewer scatter."""
LEAST_ROWS = 12
SEEN_SHARE = 0.9
"""Share of the rows whose streams count as seen. Single rows with more say little about their cost."""
KNOTS = 30
"""Points of the curve that both lines make; the last is at 32,768 tokens, and beyond it a curve is straight."""
BLOCK_S = 60.0
LEAST_BLOCKS = 10
"""Fewest blocks that a bootstrap draws from. A short record has shorter blocks."""
FOLDS = 5
MOST_SCATTER = 0.3
"""Largest scatter of simulated steps. More error is one of the fit, and of no step."""
PRIOR_ROWS = 1.0
"""Weight, in rows, of two guesses. Prompts of one length tell the fixed time of their steps from neither tokens nor
pairs. The guess for pairs is none, as attention is a small part of a short prompt."""
CONTEXT_SHARES = (0.2, 1.0)
"""Least and largest share that contexts have in what more streams cost, where a record cannot tell.

With few streams, their number and the length of their contexts grow together. Steps may then grow with the contexts,
which goes on with more streams, or because kernels are slow for few rows, which does not. The guess is the middle of
these shares; draws take any between. Contexts never cost nothing.
"""
AS_GOOD = 1.05
"""Largest ratio of the errors of both fits, without contexts and with them, at which a record cannot tell."""
PRIOR_SHARE = 0.5
"""Guess of the fixed time of a step with prompts, as a share of that of a step without. It is 1 if reading the weights
delays both, and near 0 if arithmetic hides that. Draws take any share between."""


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
    """Most streams of steps without prompts in ``SEEN_SHARE`` of the rows. Beyond it, costs are extrapolated."""
    most_tokens: float
    """Upper limit of the tokens in the largest step."""

    @property
    def scatter(self) -> float:
        """Standard deviation of the logarithm of a simulated step's time: the error, which is partly the fit's own."""
        return min(self.error, MOST_SCATTER) if math.isfinite(self.error) else 0.0

    def step_costs(self, costs: dict[str, float] | None = None) -> dict[str, StepCost]:
        """The costs as those of a device profile, by regime; ``costs`` are a draw's."""
        c = costs or self.costs
        fixed_s = min(c["fixed_s"], c["prompt_step_s"])
        found = {}
        for regime in Regime:
            line_s = self._streams_s if regime is Regime.DECODE else self._prompts_s
            found[regime.value] = StepCost(
                fixed_s=fixed_s,
                gemm_curve_s=tuple(line_s(c, gemm_knot(k)) - fixed_s for k in range(KNOTS)),
                pair_s=c["pair_s"],
                kv_token_s=c["kv_token_s"],
            )
        return found

    def _streams_s(self, costs: dict[str, float], num_tokens: int) -> float:
        """Time of a step of so many streams without prompts, without attention."""
        seen = min(num_tokens, self.most_streams)
        seen_s = costs["fixed_s"] + costs["stream_s"] * seen
        if num_tokens <= self.most_streams:
            return seen_s
        # A kernel that is slow for few streams does not stay so: a stream's token costs no more than a prompt's.
        further_s = min(costs["stream_s"], costs["token_s"]) * (num_tokens - seen)
        # If steps with prompts have the longer fixed time, the difference is work for prompts.
        arithmetic_s = min(costs["prompt_step_s"], costs["fixed_s"]) + costs["token_s"] * num_tokens
        return max(seen_s + further_s, arithmetic_s)

    def _prompts_s(self, costs: dict[str, float], num_tokens: int) -> float:
        """Time of a step with prompts of so many tokens, those of streams too, without attention."""
        return max(self._streams_s(costs, num_tokens), costs["prompt_step_s"] + costs["token_s"] * num_tokens)


@dataclass(slots=True, frozen=True)
class _FitRow:
    at_s: float
    features: tuple[float, ...]
    seconds: float
    streams: float | None = None
    """Streams of the steps without prompts; None for the time of prompts."""

    @property
    def is_gap(self) -> bool:
        return self.streams is not None


@dataclass(slots=True, frozen=True)
class _Group:
    """Polls in a row, all with prompts or all without."""

    polls: PollInterval
    """Their sum; a gauge is its mean."""
    found: float
    """Mean number of streams that a prompt's step had."""
    has_prompts: bool


def fit_step_times(record: ServerRecord, shape: EngineLimits, num_draws: int, seed: int) -> InferredStepTimes:
    """Fits the costs of a step.

    Raises:
        RecordError: the record holds too few steps.
    """
    groups = list(_joined(record, shape))
    rows = [*_gap_rows(groups, shape), *_prompt_rows(record, shape)]
    streams = sorted(row.streams for row in rows if row.streams is not None)
    if len(streams) < LEAST_ROWS:
        raise RecordError("too few steps with streams were recorded: record for longer, or at a busier time")
    costs = _fit(rows)
    blocks = _blocks(rows, record.seconds)
    rng = np.random.default_rng([0x0B5, seed])
    draws = []
    for _ in range(num_draws):
        picked = [row for k in rng.integers(len(blocks), size=len(blocks)) for row in blocks[k]]
        shares = float(rng.uniform()), float(rng.uniform(*CONTEXT_SHARES))
        draws.append(_fit(picked, *shares) if any(row.is_gap for row in picked) else costs)
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
        most_streams=streams[int(SEEN_SHARE * len(streams))],
        most_tokens=max(limits, default=0.0),
    )


def computed_prompt_tokens(interval: PollInterval) -> float:
    """Prompt tokens that were computed, not found in the cache."""
    cached = interval.rise(CACHED_TOKENS) or interval.rise(HITS)
    return max(interval.rise(PROMPT_TOKENS) - cached, 0.0)


def _joined(record: ServerRecord, shape: EngineLimits) -> Iterator[_Group]:
    """Polls in a row with prompts, and those without, until each group holds ``LEAST_STEPS`` steps."""
    parts: list[PollInterval] = []
    last = False
    for each, has_prompts in zip(record.intervals, _have_prompts(record, shape), strict=True):
        enough = sum(part.count(STEP_TOKENS) for part in parts) >= LEAST_STEPS
        if parts and (enough or each.restarted or has_prompts != last):
            yield _group(parts, last)
            parts = []
        if not each.restarted:
            parts.append(each)
        last = has_prompts
    if parts:
        yield _group(parts, last)


def _have_prompts(record: ServerRecord, shape: EngineLimits) -> list[bool]:
    """Whether each poll had prompts: one that ended in it or, if prompts have several steps, soon after it."""
    totals = record.totals()
    long = any(n and low >= shape.max_num_batched_tokens for low, n in _lower_limits(buckets_of(totals, PROMPTS)))
    ahead_s = totals.get(f"{PREFILL}_sum", 0.0) / max(totals.get(f"{PREFILL}_count", 0.0), 1.0) if long else 0.0
    found, first_s = [], math.inf
    for each in reversed(record.intervals):
        if each.count(TTFT):
            first_s = each.start_s
        found.append(bool(each.count(TTFT)) or first_s - each.end_s < ahead_s)
    return found[::-1]


def _lower_limits(buckets: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    low = 0.0
    for high, number in buckets:
        yield low, number
        low = high


def _group(parts: Sequence[PollInterval], has_prompts: bool) -> _Group:
    rises: dict[str, float] = {}
    for part in parts:
        for key, value in part.rises.items():
            rises[key] = rises.get(key, 0.0) + value
    names = {name for part in parts for name in part.after}
    seconds = sum(part.seconds for part in parts)
    mean = {name: sum(part.gauge(name) * part.seconds for part in parts) / seconds for name in names}
    whole = PollInterval(parts[0].start_s, parts[-1].end_s, rises, mean, mean)
    return _Group(whole, _found(parts), has_prompts)


def _found(polls: Sequence[PollInterval]) -> float:
    """Mean number of streams that prompts found: the mean of a poll's ends, without the prompt itself at the second."""
    prompts = sum(each.count(TTFT) for each in polls)
    streams = sum(each.count(TTFT) * max(each.gauge(RUNNING) - 0.5, 0.0) for each in polls)
    return streams / prompts if prompts else 0.0


def _prompt_steps(each: PollInterval, streams: float) -> float:
    """Steps in which a prompt ended: those with more tokens than there are streams, at most one for each prompt."""
    prompts = each.count(TTFT)
    if not prompts:
        return 0.0
    larger = sum(number for limit, number in each.buckets(STEP_TOKENS) if limit > 2 * max(streams, 1.0))
    return min(max(larger, 1.0), prompts, each.count(STEP_TOKENS))


def _gap_rows(groups: Sequence[_Group], shape: EngineLimits) -> Iterator[_FitRow]:
    """The mean gap of each group."""
    polls = [group.polls for group in groups]
    for group in groups:
        each = group.polls
        gaps, steps = each.count(ITL), each.count(STEP_TOKENS)
        # Chunks of a prompt that ends later are steps of unknown tokens.
        if gaps < LEAST_STEPS / 2 or group.has_prompts > bool(each.count(TTFT)):
            continue
        prompt_steps = _prompt_steps(each, each.gauge(RUNNING))
        tokens = computed_prompt_tokens(each) / prompt_steps if prompt_steps else 0.0
        chunks = _chunks(tokens, group.found, shape)
        beside = min(prompt_steps * chunks * group.found, gaps)
        share = beside / gaps
        streams = max((gaps - beside) / max(steps - prompt_steps * chunks, 1.0), 1.0)
        context = _context_tokens(polls, each, shape) / max(each.gauge(RUNNING), 1.0)
        read = ((1.0 - share) * streams + share * group.found) * context
        token_share, alone = share * (tokens / chunks + group.found), (1.0 - share) * streams
        features = (1.0 - share, share, token_share, alone, read, share * _pairs(tokens) / chunks)
        yield _FitRow(each.start_s, features, each.sum(ITL) / gaps, streams)


def _prompt_rows(record: ServerRecord, shape: EngineLimits) -> Iterator[_FitRow]:
    """The mean prefill time of the requests that ended in each poll."""
    polls = [each for each in record.intervals if not each.restarted]
    ends_s = [each.end_s for each in polls]
    for k, each in enumerate(polls):
        ended = each.count(PREFILL)
        if not ended or each.sum(PREFILL) <= 0:
            continue
        decode_s = (each.sum(E2E) - each.sum(QUEUE) - each.sum(PREFILL)) / ended
        near = polls[bisect_left(ends_s, each.start_s - decode_s) : k + 1]
        near = [one for one in near if one.count(TTFT) and one.start_s <= each.end_s - decode_s]
        if not near:
            continue
        found = _found(near)
        together = sum(one.count(TTFT) for one in near) / max(sum(_prompt_steps(one, found) for one in near), 1.0)
        computed = sum(map(computed_prompt_tokens, near)) / max(sum(one.rise(PROMPT_TOKENS) for one in near), 1.0)
        tokens = together * each.sum(PROMPTS) * computed / ended
        chunks = _chunks(tokens, found, shape)
        context = _context_tokens(polls, each, shape) / max(each.gauge(RUNNING), 1.0)
        pairs = _pairs(tokens / together) * together
        features = (0.0, chunks, tokens + chunks * found, 0.0, chunks * found * context, pairs)
        yield _FitRow(each.start_s, features, each.sum(PREFILL) / ended)


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


def _fit(
    rows: Sequence[_FitRow], prior_share: float = PRIOR_SHARE, context_share: float = sum(CONTEXT_SHARES) / 2
) -> dict[str, float]:
    """The costs. ``context_share`` counts only if the rows cannot tell contexts from streams."""
    by_context, by_streams = (_solved(rows, prior_share, of_streams=each) for each in (False, True))
    if _error(by_streams, rows) > AS_GOOD * _error(by_context, rows):
        return by_context
    return {name: context_share * by_context[name] + (1.0 - context_share) * by_streams[name] for name in COSTS}


def _solved(rows: Sequence[_FitRow], prior_share: float, *, of_streams: bool) -> dict[str, float]:
    """The costs if more streams take more time for their number, or else for their contexts.

    In the latter case a stream's token costs no more than a prompt's, and all beyond it is its context.
    """
    features = np.array([row.features for row in rows])
    seconds = np.array([row.seconds for row in rows])
    token, stream, context = (COSTS.index(name) for name in ("token_s", "stream_s", "kv_token_s"))
    if of_streams:
        features[:, context] = 0.0
    else:
        features[:, stream] += features[:, token]  # then a prompt's token costs what is fitted for it more
    with_prompts = features[:, 1] > 0.0
    guesses = np.zeros((2, len(COSTS)))
    if with_prompts.any():
        mean, mean_s = features[with_prompts].mean(axis=0), seconds[with_prompts].mean()
        guesses[0, :2] = -prior_share * mean[1] / mean_s, mean[1] / mean_s
        guesses[1, -1] = mean[-1] / mean_s
    fitted = fit_relative(features, seconds, math.sqrt(PRIOR_ROWS) * guesses, np.zeros(len(guesses)))
    fitted[token] += 0.0 if of_streams else fitted[stream]
    return dict(zip(COSTS, fitted.tolist(), strict=True))


def _error(costs: dict[str, float], rows: Sequence[_FitRow]) -> float:
    """Median relative error."""
    return float(np.median([abs(_predicted(costs, row) / row.seconds - 1.0) for row in rows]))


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
