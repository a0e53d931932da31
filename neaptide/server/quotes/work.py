"""Work of a batch in device time, and what is known of its size and of its answers."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from neaptide.durations import DAY_S
from neaptide.engine.arrays import FloatArray
from neaptide.engine.messages import EngineReady
from neaptide.server.quotes.periods import PERIOD_S, Period, Saturated, length_sums

PRIOR_ANSWER_TOKENS = 256
"""Expected answer length before any batch has ended; the scheduler uses the same value."""
PRIOR_SIGMA = 0.7
"""Standard deviation of the logarithm of that length: nine of ten answers are expected below 2.5 times of it."""
FEWEST_BATCHES = 3
"""With fewer ended batches of a key, those of other keys count too."""
PRIOR_EFFICIENCY = 1.0
"""Device time that batch work gets done per second that chats leave, before anything is learnt."""
PRIOR_CHAT_FACTOR = 1.12
"""Time that chats take of the device over the least time of their tokens, before anything is learnt: their steps are
short, to be in time."""
PRIOR_S = 600.0
"""Time for which each prior counts."""
EFFICIENCY_SIGMA = 0.015
"""Standard deviation of its logarithm between batches, however long the record is."""
PRIOR_EFFICIENCY_SIGMA = 0.1
"""Added to ``EFFICIENCY_SIGMA`` before anything is learnt."""
LEAST_EFFICIENCY, MOST_EFFICIENCY, LEAST_CHAT_FACTOR = 0.01, 10.0, 0.1
"""Bounds of what is learnt, whatever a record says."""
FIRST_CHECK_S = 2.0
"""Expected time to check a file and to write its results, before any batch has ended, without its lines."""
LINE_CHECK_S = 1e-3
"""Expected time to check a line, before any batch has ended."""


class KnownBatch(NamedTuple):
    """A batch that was completed."""

    answer_tokens: float
    """Mean length of its answers."""
    num_lines: int
    other_s: float
    """Time in which its file was checked and its results were written."""


class BatchWork(NamedTuple):
    """Size of a batch, or of a part of it."""

    num_rows: int
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens without those of prefixes that an earlier row has."""
    answer_tokens: int
    longest_answer: int | None = None
    """Limit of an answer, if the work includes the last answers of a batch, which run when no line waits. None: the
    work goes on."""


DeviceTime = Callable[[BatchWork], float]
"""Seconds of the device that the work takes beside chats."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Size of a batch whose answers are not known."""

    num_lines: int
    num_rows: int
    """Choices of all lines."""
    prompt_tokens: int
    new_tokens: int
    limits: tuple[int, ...]
    """``max_tokens`` of some rows, which stand for all."""

    def work(self, answer_tokens: float) -> BatchWork:
        """The work if every row's answer has this length, or its limit."""
        mean = sum(min(limit, answer_tokens) for limit in self.limits) / max(len(self.limits), 1)
        longest = max(self.limits, default=1)
        return BatchWork(self.num_rows, self.prompt_tokens, self.new_tokens, round(mean * self.num_rows), longest)


def drawn_answers(known: Sequence[KnownBatch], rng: np.random.Generator, num_paths: int) -> FloatArray:
    """[paths] mean answer length of the batch: of one of the known batches, or of the prior; less certain with few."""
    sigma = PRIOR_SIGMA / (1 + len(known))
    center = np.full(num_paths, float(PRIOR_ANSWER_TOKENS))
    if known:
        center = rng.choice(np.array([one.answer_tokens for one in known], np.float64), size=num_paths)
    return np.asarray(center * np.exp(sigma * rng.standard_normal(num_paths)))


def drawn_other_s(known: Sequence[KnownBatch], num_lines: int, rng: np.random.Generator, num_paths: int) -> FloatArray:
    """[paths] time to check the file and to write the results, as it was for one of the known batches.

    It is taken to grow with the number of lines.
    """
    if not known:
        return np.full(num_paths, FIRST_CHECK_S + LINE_CHECK_S * num_lines)
    each = np.array([one.other_s * max(num_lines / max(one.num_lines, 1), 1.0) for one in known])
    return np.asarray(rng.choice(each, size=num_paths))


def chat_loads(periods: Sequence[Period], info: EngineReady, least_s: float = 60.0) -> tuple[FloatArray, int]:
    """Share of the device that chats took in every period from the first recorded one on, and the first one's start.

    NaN where less than ``least_s`` were observed.
    """
    if not periods:
        return np.zeros(0), 0
    first_s = periods[0].start_s
    loads = np.full((periods[-1].start_s - first_s) // PERIOD_S + 1, np.nan)
    for one in periods:
        if one.seconds >= least_s:
            taken_s = info.token_s * one.online_tokens + info.kv_token_s * one.online_kv_tokens
            loads[(one.start_s - first_s) // PERIOD_S] = taken_s / one.seconds
    return loads, first_s


def chats_lag_s(periods: Sequence[Period], info: EngineReady) -> float:
    """Seconds of their load by which chats fall behind while batch work runs; 0 if the record does not show it.

    A stream gets a token from each step. Steps with batch work are longer, so all streams take longer, and what they
    have left to decode is there later. Their prompts are computed as soon as before.
    """
    beside, whole_s, steps = Saturated(), 0.0, 0
    prompts: Counter[int] = Counter()
    answers: Counter[int] = Counter()
    for one in periods:
        beside.add(one.saturated)
        whole_s, steps = whole_s + one.step_s, steps + one.steps
        prompts.update(one.prompt_tokens)
        answers.update(one.answer_tokens)
    num_answers, answer_tokens, answer_squares = length_sums(answers)
    num_prompts, prompt_tokens, _ = length_sums(prompts)
    if not beside.steps or steps <= beside.steps or not num_answers or not num_prompts:
        return 0.0
    # ``seconds`` are the clock's, with what lies between steps. They may exceed the device's time of all steps.
    alone_s = max(whole_s - beside.seconds, 0.0)
    longer_s = beside.seconds / beside.steps - alone_s / (steps - beside.steps)
    prompt, answer = prompt_tokens / num_prompts, answer_tokens / num_answers
    prefill_s = info.token_s * prompt
    decode_s = answer * (info.token_s + info.kv_token_s * (prompt + answer / 2))
    left_tokens = answer_squares / (2.0 * answer_tokens)
    return max(longer_s, 0.0) * left_tokens * decode_s / max(prefill_s + decode_s, 1e-12)


class Efficiency(NamedTuple):
    """How fast batch work goes beside chats, and what chats take of the device, as learnt."""

    mean: float
    """Device time that batch work gets done per second that chats leave."""
    chat_factor: float
    """Device time that chats take, over the least time of their tokens."""
    seconds: float
    """Recorded time in which batch lines waited."""

    def drawn(self, rng: np.random.Generator, num_paths: int) -> FloatArray:
        """[paths] possible values of ``mean``."""
        sigma = EFFICIENCY_SIGMA + PRIOR_EFFICIENCY_SIGMA * PRIOR_S / (PRIOR_S + self.seconds)
        return np.asarray(self.mean * np.exp(sigma * rng.standard_normal(num_paths)))


def learnt_efficiency(periods: Sequence[Period], info: EngineReady, device: DeviceTime) -> Efficiency:
    """Both factors, by least squares over the periods in which batch lines waited for the device.

    The batch work of a period is ``mean`` times the seconds that chats left: all of them, less ``chat_factor`` times
    the least time of the chats. It is the least exact of the three, so its errors are the ones to be made small.
    """
    normal = PRIOR_S * np.eye(2)
    wanted = PRIOR_S * PRIOR_EFFICIENCY * np.array([1.0, PRIOR_CHAT_FACTOR])
    seconds = 0.0
    for _, day in groupby(periods, lambda one: one.start_s // DAY_S):
        found = [one.saturated for one in day if one.saturated.prefill_tokens + one.saturated.decode_tokens]
        whole = Saturated()
        for one in found:
            whole.add(one)
        seconds += whole.seconds
        if not whole.row_steps or not whole.seconds:
            continue
        # The work of a day is taken as of one kind, so that the cost model is asked once for it.
        done = _done(whole.prefill_tokens, whole.decode_tokens, whole.kv_tokens / whole.row_steps)
        token_s = device(done) / (whole.prefill_tokens + whole.decode_tokens)
        for one in found:
            if one.seconds > 0.0:
                chats_s = info.token_s * one.online_tokens + info.kv_token_s * one.online_kv_tokens
                done_s = token_s * (one.prefill_tokens + one.decode_tokens)
                parts_s = np.array([one.seconds, -chats_s])
                normal += np.outer(parts_s, parts_s) / one.seconds
                wanted += done_s / one.seconds * parts_s
    alone, lost = np.linalg.solve(normal, wanted).tolist()
    mean = min(max(alone, LEAST_EFFICIENCY), MOST_EFFICIENCY)
    return Efficiency(mean, max(lost / mean, LEAST_CHAT_FACTOR), seconds)


def _done(prefill_tokens: int, decode_tokens: int, held_tokens: float) -> BatchWork:
    """Work that was done, as rows of equal length.

    Args:
        held_tokens: mean tokens of a running row: its prompt and half of its answer.
    """
    num_tokens = prefill_tokens + decode_tokens
    row_tokens = held_tokens * num_tokens / max(prefill_tokens + decode_tokens / 2, 1.0)
    num_rows = max(round(num_tokens / max(row_tokens, 1.0)), 1)
    return BatchWork(num_rows, prefill_tokens, prefill_tokens, decode_tokens + num_rows)
