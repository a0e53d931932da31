"""Quotes: when a batch of a given size would end, as far as the record tells. Pure: time and chance are passed in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.durations import duration
from neaptide.engine.arrays import FloatArray
from neaptide.engine.messages import EngineReady
from neaptide.server.openai.stored_replies import OutlookName
from neaptide.server.quotes.fluid import (
    DAY_PERIODS,
    LoadPaths,
    PoolBatch,
    finish_times,
    load_paths,
    quantile,
    work_before,
)
from neaptide.server.quotes.periods import PERIOD_S, Period
from neaptide.server.quotes.work import (
    BatchSize,
    DeviceTime,
    Efficiency,
    KnownBatch,
    chat_loads,
    chats_lag_s,
    drawn_answers,
    drawn_other_s,
    learnt_efficiency,
)

SEED = 47
"""Equal questions in the same state get equal quotes."""
NUM_SIZES = 24
"""Number of answer lengths for which device time is computed; between them it is interpolated."""


@dataclass(frozen=True, slots=True)
class QuoteInputs:
    """Inputs of a quote besides the batch."""

    now_s: float
    """Unix time."""
    periods: Sequence[Period]
    """The record, oldest first; the last one may be unfinished."""
    info: EngineReady
    device: DeviceTime
    pool: Sequence[PoolBatch]
    key: str
    """Key that the batch is charged to."""
    known: Sequence[KnownBatch]
    """Batches that were completed, the last ones."""
    weights: Mapping[str, float]
    answer_tokens: float | None = None
    """Answer length, if the caller knows it."""


@dataclass(frozen=True, slots=True)
class WindowQuote:
    """A quote for one completion window."""

    window_s: float
    p50_s: float
    """Seconds until the end in half of the cases; infinite beyond two days."""
    p90_s: float
    """Seconds until the end in nine of ten cases; infinite beyond two days."""
    before_s: float
    """Device time of other batches that goes first, in the median case."""
    left_s: float
    """Device time that chats leave to batches in the window, in the median case."""
    most_left_s: float
    """The largest such time of all cases."""
    can_end: bool
    """Whether the batch ends in the window in any of the cases."""


@dataclass(frozen=True, slots=True)
class Quote:
    size: BatchSize
    answer_tokens: tuple[int, int]
    """Answer tokens of all rows: p50 and p90."""
    work_s: tuple[float, float]
    """Device time: p50 and p90."""
    shared_s: float
    """Device time that shared prefixes save, in the median case."""
    windows: tuple[WindowQuote, ...]
    recorded_s: float
    """Observed time of the record."""
    has_days: bool
    efficiency: Efficiency
    num_known: int
    """Number of ended batches from which answer lengths are known."""
    pool_s: float
    """Device time of all batches that are not done."""


def quote(size: BatchSize, question: QuoteInputs, windows_s: Sequence[float]) -> Quote:
    """The quote of a batch that would begin now, for each window."""
    rng = np.random.default_rng(SEED)
    efficiency = learnt_efficiency(question.periods, question.info, question.device)
    paths = _paths(question, efficiency.chat_factor, rng)
    num_paths = len(paths.loads)
    answers = np.sort(drawn_answers(question.known, rng, num_paths))
    if question.answer_tokens is not None:
        answers = np.full(num_paths, question.answer_tokens)
    own_s, tokens = _own(size, question.device, answers)
    order = rng.permutation(num_paths)  # Long answers do not go with busy hours.
    own_s, tokens = own_s[order], tokens[order]
    efficiencies = efficiency.drawn(rng, num_paths)
    other_s = drawn_other_s(question.known, size.num_lines, rng, num_paths)
    median = size.work(float(np.median(answers)))
    unshared_s = question.device(median._replace(new_tokens=median.prompt_tokens))
    return Quote(
        size=size,
        answer_tokens=(round(quantile(tokens, 0.5)), round(quantile(tokens, 0.9))),
        work_s=(quantile(own_s, 0.5), quantile(own_s, 0.9)),
        shared_s=max(unshared_s - question.device(median), 0.0),
        windows=tuple(_window(window_s, paths, own_s, other_s, efficiencies, question) for window_s in windows_s),
        recorded_s=sum(one.seconds for one in question.periods),
        has_days=paths.has_days,
        efficiency=efficiency,
        num_known=len(question.known),
        pool_s=sum(one.work_s for one in question.pool),
    )


def _paths(question: QuoteInputs, chat_factor: float, rng: np.random.Generator) -> LoadPaths:
    loads, first_s = chat_loads(question.periods, question.info)
    now = int(question.now_s) // PERIOD_S
    last = first_s // PERIOD_S + len(loads) - 1
    if len(loads) and now > last:
        loads = np.concatenate((loads, np.full(min(now - last, 14 * DAY_PERIODS), np.nan)))
        first_s = (now - len(loads) + 1) * PERIOD_S
    # The present period counts as recorded, and its rest is like the next one.
    rest_s = (now + 1) * PERIOD_S - question.now_s
    paths = load_paths(loads, first_s // PERIOD_S % DAY_PERIODS, rng)
    from_now = np.concatenate((paths.loads[:, :1], paths.loads), axis=1)
    # Beside other batches chats are behind already.
    lag_s = 0.0 if question.pool else chats_lag_s(question.periods, question.info)
    return LoadPaths(chat_factor * from_now, rest_s, PERIOD_S, paths.has_days, lag_s)


def _own(size: BatchSize, device: DeviceTime, answers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[paths] device time and answer tokens, for sorted answer lengths."""
    knots = np.unique(np.quantile(answers, np.linspace(0.0, 1.0, NUM_SIZES)))
    works = [size.work(float(knot)) for knot in knots]
    seconds = np.interp(answers, knots, [device(work) for work in works])
    return seconds, np.interp(answers, knots, [float(work.answer_tokens) for work in works])


def _window(
    window_s: float,
    paths: LoadPaths,
    own_s: FloatArray,
    other_s: FloatArray,
    efficiencies: FloatArray,
    question: QuoteInputs,
) -> WindowQuote:
    before_s = work_before(question.pool, question.key, own_s, window_s, dict(question.weights))
    finish_s = other_s + finish_times(paths, own_s + before_s, efficiencies)
    left_s = _left(paths, efficiencies, window_s)
    return WindowQuote(
        window_s=window_s,
        p50_s=quantile(finish_s, 0.5),
        p90_s=quantile(finish_s, 0.9),
        before_s=float(np.median(before_s)),
        left_s=quantile(left_s, 0.5),
        most_left_s=float(left_s.max()),
        can_end=bool((finish_s <= window_s).any()),
    )


def _left(paths: LoadPaths, efficiencies: FloatArray, window_s: float) -> FloatArray:
    """[paths] device time that batches get within the window, to be shown: never more than all of it."""
    num_periods = paths.loads.shape[1]
    starts = np.concatenate(([0.0], paths.first_s + paths.period_s * np.arange(num_periods - 1)))
    lengths = np.clip(window_s - starts, 0.0, np.where(np.arange(num_periods) == 0, paths.first_s, paths.period_s))
    return np.asarray((np.maximum(1.0 - paths.loads, 0.0) * lengths).sum(axis=1) * np.minimum(efficiencies, 1.0))


def outlook(window: WindowQuote) -> OutlookName:
    """The deadline status that the quote foresees, as the batch object names it."""
    if window.p90_s <= window.window_s:
        return "on_time"
    return "at_risk" if window.can_end else "infeasible"


def until_end(seconds: float) -> str:
    """Time until a batch ends, for people."""
    return "more than 2 days" if math.isinf(seconds) else duration(seconds)


def arithmetic(found: Quote, window: WindowQuote) -> str:
    """Why the batch does not end in the window, in numbers."""
    needs = f"It needs {duration(found.work_s[0])} of the device"
    before = f", and {duration(window.before_s)} of other batches go first" if window.before_s >= 1.0 else ""
    if window.can_end:
        left = f"chats leave {duration(window.left_s)} of {duration(window.window_s)} in the median case"
        return f"{needs}{before}; {left}, and it is done after {until_end(window.p90_s)} in nine of ten."
    return f"{needs}{before}; chats leave at most {duration(window.most_left_s)} in {duration(window.window_s)}."
