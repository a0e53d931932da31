"""The judgement of a step: how many online requests it is expected to make late, and what it brings.

Everything is computed from deadlines, the cost model with its error, recent arrivals and recent answers. A prompt is
late if its first token is. A stream is late if it is behind its pace at its last token, because users count TPOT as a
mean over the answer. Times are in seconds.

Sources: Moore and Hodgson's rule (fewest late jobs on one machine), Pollaczek and Khinchine's mean wait (M/G/1).
"""

import math
from collections.abc import Container, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from neaptide.engine.arrays import FloatArray, smallest
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.scheduler.budget import PromptSteps, Reads
from neaptide.engine.scheduler.judged import Candidate, JudgedStep, OnlineRequest
from neaptide.engine.scheduler.prompts import PACE, Company
from neaptide.engine.scheduler.traffic import WINDOW_S, RecentTraffic
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.table import Streams

STALL = 1.5
"""A longer step that online prompts may take, in TPOT targets."""
SHORTEST = 0.75
"""Length that a step with offline work may always have, as a fraction of the TPOT target, so that it goes on."""
DELIVERY_SHARE = 0.1
"""Most of its TPOT target that a stream keeps for the delivery of its tokens."""
LEAST_GAIN = 0.02
"""Least slack that a stream is taken to gain with a token, as a fraction of its TPOT target."""
LEAST_IDLE = 0.33
"""Least part of the time that prompts are taken to leave: near capacity a busy period has no end."""
MAX_STEP_S = 5.0
"""Longest step: whoever cancels a request waits for its end."""
NEXT_TO_NOTHING = 0.03
"""Part of what a step brings for which none beside streams is made longer: shorter steps are smoother."""
EQUAL = 1e-3
"""Step lengths whose late requests differ by less are equal; the longest one is taken."""
ERRORS: FloatArray = np.array([[-0.7], [-0.2], [0.2], [0.7]])
"""Four equally probable errors of a predicted time, in margins."""
NUM_LENGTHS, GROWTH = 8, 8
"""Step lengths that are compared for offline work; factor between the token counts whose times are predicted."""
UNKNOWN_WAIT = 0.5
"""Wait that a request stands before any has come, as a fraction of its TTFT target."""
LEAST_MARGIN_S = 1e-9
MAX_STREAMS = 64
"""Streams that are looked at one by one; more are looked at in as many groups with similar slack."""


R = TypeVar("R", bound=OnlineRequest)


class PendingPrompt(NamedTuple, Generic[R]):
    """An online request with prompt left to compute."""

    request: R
    num_tokens: int
    """Tokens to compute."""
    context_tokens: int


class Choice(NamedTuple, Generic[R]):
    """Longest step for online prompts in seconds, which of them can be in time, and which are given up."""

    limit_s: float
    in_time: list[R]
    late: list[R]


class OfflineSteps(NamedTuple):
    """Steps with more and more offline work, the first without any."""

    tokens: list[float]
    """[lengths] offline tokens."""
    lengths_s: list[float]
    """[lengths] times."""
    token_s: float
    """Time of a token in the fullest step."""
    saved_s: float
    """By how much their predictions are shorter than ``lengths_s``.

    A step of another kind has a fit of its own, by which the first offline tokens may save time. They cannot.
    """


class Judgement:
    """Expected late requests for a draft that schedules nothing yet."""

    def __init__(
        self,
        draft: JudgedStep,
        config: SchedulerConfig,
        model: CostModel,
        traffic: RecentTraffic,
        left_out: Container[str] = (),
    ) -> None:
        self._config, self._model, self._left_out = config, model, left_out
        self._now_s = draft.now_s
        self.tpot_slo_s = config.tpot_slo_s
        self.longest_s = max(MAX_STEP_S, 0.5 * config.ttft_slo_s)
        streams, decodes = draft.streams(), BatchShape()
        self._streams_shape = decodes
        """A step of the streams alone."""
        self.alone_s, margin_s, self.gap_s = 0.0, 0.0, math.inf
        if len(streams.rows):
            decodes.add_decodes(len(streams.rows), *draft.stream_reads())
            self.alone_s, margin_s = model.predict(decodes)
            self.gap_s = max(smallest(streams.tpot_slo_s), self.alone_s)
            if self.gap_s == self.alone_s:
                # These do not keep their pace even alone: nothing that others give up makes them be in time.
                streams = streams.slower_than(self.alone_s)
        self.has_streams = len(streams.rows) > 0
        if self.has_streams:
            self.tpot_slo_s = smallest(streams.tpot_slo_s)
        self._expect_arrivals(draft.now_s, decodes, traffic)
        if self.has_streams:
            self._expect_tokens(streams, traffic, self.alone_s - margin_s)

    def _expect_arrivals(self, now_s: float, decodes: BatchShape, traffic: RecentTraffic) -> None:
        """Expects the prompts to come to be like the recent ones, at the recent rate."""
        config, model = self._config, self._model
        prompts = traffic.prompts
        if prompts is None:
            # Nothing is known: one request may come, and half of its target is for its prompt.
            wait_s = UNKNOWN_WAIT * max(config.ttft_slo_s - config.delivery_latency_s, 0.0) / (1 + config.overlap_depth)
            self._set_waits(np.array([wait_s]), 1.0 / WINDOW_S)
            self._rate, self._busy, self._load, self._decay = 1.0 / WINDOW_S, 0.0, 0.0, 0.0
            return
        self._rate, most = traffic.rate(now_s), prompts.longest_tokens
        whole = model.predict(decodes.plus(most, 0))
        token_s = max(whole.seconds - self.alone_s, 0.0) / most
        own_s, mean_s = prompts.tokens * token_s, prompts.mean_tokens * token_s
        drain = max(1.0 - self.alone_s / self.tpot_slo_s, LEAST_GAIN) if self.has_streams else 1.0
        self._load = self._rate * mean_s
        rho = self._load / drain
        # The work that arrivals find has an exponential tail. In a busy period one late prompt is followed by others.
        idle = max(1.0 - rho, LEAST_IDLE)
        self._decay = 2.0 * idle / (prompts.spread * mean_s) if mean_s else 0.0
        can_wait_s = max(drain * prompts.tightest_ttft_s - most * token_s, 0.0)
        self._busy = rho / idle * math.exp(-self._decay * can_wait_s) if "slack-reserve" not in self._left_out else 0.0
        # A request that arrives in the middle of a step waits for its end, for the steps planned behind it, and for
        # those that came before it.
        spare_s = prompts.ttft_slo_s - config.delivery_latency_s - self.alone_s - own_s
        error_s = _relative_error(whole) * (own_s + self.alone_s)
        waits_s = (spare_s + ERRORS * error_s).ravel()
        waits_s.sort()
        waits_s /= (1.0 + rho) * (1 + config.overlap_depth)
        share = self._rate / len(waits_s) if "arrivals" not in self._left_out else 0.0
        least_wait_s = max(float(waits_s[0]), 0.0)
        self._set_waits(waits_s[waits_s.searchsorted(0.0) :], share)
        self.least_wait_s = least_wait_s

    def _set_waits(self, waits_s: FloatArray, share: float) -> None:
        """Sets how long arrivals can wait, in order, and how many arrive in a second for each."""
        self._waits_s, self._arrivals = waits_s, share
        self._sums_s = np.concatenate(([0.0], waits_s.cumsum()))
        self.wait_s = float(waits_s[len(waits_s) // 4]) if len(waits_s) else 0.0
        """Wait that three quarters of the arrivals that can be in time stand."""
        self.least_wait_s = float(waits_s[0]) if len(waits_s) else 0.0
        """Wait that all arrivals stand, for a step that is aborted for whoever cannot wait; perhaps none."""

    def _expect_tokens(self, streams: Streams, traffic: RecentTraffic, least_step_s: float) -> None:
        """Adds what later tokens of the streams cost.

        Args:
            least_step_s: shortest time of a step with decodes alone.
        """
        slo_s = streams.tpot_slo_s
        slack_s = streams.due_s - np.minimum(self._config.delivery_latency_s, DELIVERY_SHARE * slo_s) - self._now_s
        ends = 1.0 / traffic.tokens_left(streams.num_output)
        if smallest(slack_s) < least_step_s:
            # A stream that would be late even if it ran alone to its end costs nothing more.
            num_needed = (slo_s - slack_s) / (slo_s - least_step_s)
            ends *= traffic.chance_of_more(streams.num_output, num_needed)
        count = np.ones(min(len(slo_s), MAX_STREAMS))
        if len(slo_s) > MAX_STREAMS:
            order = slack_s.argsort()
            bounds = np.arange(MAX_STREAMS + 1) * len(order) // MAX_STREAMS
            firsts = bounds[:-1]
            count *= bounds[1:] - firsts
            slack_s, slo_s = (np.add.reduceat(values[order], firsts) / count for values in (slack_s, slo_s))
            ends = np.add.reduceat(ends[order], firsts)
        self._slack_s, self._slo_s, self._ends = slack_s, slo_s, ends
        """[groups] time until the next token is due, TPOT target, and expected number of last tokens."""
        self._gain_s: FloatArray = np.maximum(slo_s * (1.0 - self._load) - self.alone_s, LEAST_GAIN * slo_s)
        self._reserve = self._busy / len(streams.rows) * count

    # ---- what is expected to be late ----

    def late_arrivals(self, lengths_s: FloatArray, ahead_s: float = 0.0) -> FloatArray:
        """[lengths] requests that arrive during a step and are late because they wait for its end.

        ``ahead_s`` is what they wait for after it anyway.
        """
        ends_s = lengths_s + ahead_s
        first, last = self._waits_s.searchsorted(ahead_s), self._waits_s.searchsorted(ends_s)
        late_s: FloatArray = ends_s * (last - first) - (self._sums_s[last] - self._sums_s[first])
        return self._arrivals * late_s

    def late_streams(self, first_s: FloatArray, last_s: FloatArray, count: float, margin_s: FloatArray) -> FloatArray:
        """[lengths] streams that are behind at their last token.

        Args:
            first_s: [lengths, streams] slack of each stream at the first of ``count`` tokens.
            last_s: [lengths, streams] the same at the last of them.
            margin_s: [lengths, 1] error of these times.
        """
        after_s = np.maximum(last_s + (self._slo_s - self.alone_s), 0.0)
        num_late: FloatArray = np.exp(-self._decay * after_s) @ self._reserve
        if min(smallest(first_s), smallest(last_s)) >= max(LEAST_MARGIN_S, *margin_s.flat):
            return num_late  # None can be behind.
        late = _share_beyond(first_s, margin_s)
        if count > 1.0:
            for part in (1 / 3, 2 / 3, 1.0):
                late += _share_beyond(first_s + part * (last_s - first_s), margin_s)
            late *= count / 4.0
        late += np.maximum(-last_s, 0.0) / self._gain_s
        num_late += late @ self._ends
        return num_late

    # ---- how many streams can keep their pace together ----

    def company(self) -> Company:
        """The streams, and who may join them."""
        tightest_s = self.tpot_slo_s if self.has_streams else math.inf
        return Company(self._model, self._streams_shape, tightest_s, self._config.tpot_slo_s)

    # ---- how long online prompts may make a step, and which of them ----

    def choose(
        self, draft: JudgedStep, prompts: Sequence[PendingPrompt[R]], late: PendingPrompt[R] | None
    ) -> Choice[R]:
        """The step length with the fewest late requests; of equal ones the longest.

        ``prompts`` are in deadline order. ``late`` has no deadline any more and comes behind all of them.
        """
        every = [*prompts, late] if late is not None else prompts
        longest = max(prompt.num_tokens for prompt in every)
        start_s = self._now_s + self._config.delivery_latency_s
        due_s = [prompt.request.next_deadline_s - start_s for prompt in prompts]
        tokens = np.array([prompt.num_tokens for prompt in every], float)
        contexts = np.array([prompt.context_tokens for prompt in every], float)
        drops_longest = "longest-late" not in self._left_out
        best, best_late, best_kept = Candidate("prompts", 0.0, 0.0), math.inf, [True] * len(prompts)
        terms, best_terms, best_at = (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0
        limits_s = self._lengths(draft, every)
        paces = PromptSteps.beside(draft.budget, limits_s, draft.block_size, longest)
        before: PromptSteps | None = None
        for limit_s, pace in zip(limits_s, paces, strict=True):
            if pace != before:  # Limits above a step full of prompts are alike.
                steps = pace.of(tokens, contexts).tolist()
                kept, late_prompts, total = _fewest_late(prompts, steps, due_s, pace, drops_longest)
                streams, arrivals = self._late_beside(total + (steps[-1] if late is not None else 0.0), pace)
                num_late, terms = late_prompts + (arrivals + streams), (late_prompts, streams, arrivals)
                before = pace
            candidate = Candidate("prompts", limit_s, num_late)
            draft.candidates.append(candidate)
            if num_late <= best_late + EQUAL:
                best, best_late, best_kept, best_terms = candidate, num_late, kept, terms
                best_at = len(draft.candidates) - 1
        in_time = [prompt.request for prompt, is_kept in zip(prompts, best_kept, strict=True) if is_kept]
        dropped = [prompt.request for prompt, is_kept in zip(prompts, best_kept, strict=True) if not is_kept]
        draft.candidates[best_at] = best = best._replace(term=_largest_term(*best_terms))
        draft.chosen.append(best)
        return Choice(best.length_s, in_time, dropped)

    def _late_beside(self, steps: float, pace: PromptSteps) -> tuple[float, float]:
        """Expected late streams and arrivals if prompts take so many steps."""
        seconds = max(pace.seconds(steps), self.alone_s)
        arrivals, streams = float(self.late_arrivals(np.array([seconds]))[0]), 0.0
        if self.has_streams:
            count = max(math.ceil(steps), 1)
            first_s = self._slack_s - seconds / count
            last_s = self._slack_s - seconds + (count - 1) * self._slo_s
            margin_s = np.array([[pace.margin_s]])
            streams = float(self.late_streams(first_s[None], last_s[None], count, margin_s)[0])
        return streams, arrivals

    def _lengths(self, draft: JudgedStep, prompts: Sequence[PendingPrompt[R]]) -> list[float]:
        """Step lengths that are compared, shortest first."""
        budget, first = draft.budget, prompts[0]
        total = sum(prompt.num_tokens for prompt in prompts)
        lengths_s: list[float] = []
        for num_tokens, context_tokens in {(first.num_tokens, first.context_tokens), (total, 0)}:
            shape = budget.shape.plus(min(num_tokens, budget.tokens_left), context_tokens)
            # A little more than predicted, or rounding leaves one token for another step.
            lengths_s.append(min(sum(self._model.predict(shape)) * (1.0 + EQUAL), self.longest_s))
        if not self.has_streams:
            return sorted(set(lengths_s))
        least_s = max(PACE * self.tpot_slo_s, self.alone_s)
        lengths_s += (least_s, min(smallest(self._slack_s), self.longest_s), STALL * self.tpot_slo_s)
        return sorted({length_s for length_s in lengths_s if length_s >= least_s})

    # ---- how long a step with offline work may be ----

    def offline_length_s(self, draft: JudgedStep, due_s: Sequence[float], ahead_s: float) -> float:
        """The step length that brings the most for its time.

        A step brings its offline work, counted at the rate of the fullest step, less the price of those that it makes
        late. Its length is between that of its online work and the TPOT target, or what an arrival can wait.

        Args:
            due_s: longest step with which each online prompt is in time.
            ahead_s: time that these prompts take after the step.
        """
        budget = draft.budget
        error = _relative_error(budget.prediction if draft.num_parts else budget.predict_with(budget.tokens_left))
        wait_s = self.wait_s
        if draft.is_abortable:
            draft.arrival_waits_s, wait_s = self.least_wait_s, self.longest_s
        most_s = min(self.gap_s, max(wait_s, SHORTEST * self._config.tpot_slo_s)) / (1.0 + error)
        tokens, lengths_s, token_s, saved_s = self._offline_steps(draft, most_s)
        at_s = np.array(lengths_s)
        late = self.late_arrivals(np.minimum(at_s, draft.arrival_waits_s) if draft.is_abortable else at_s, ahead_s)
        terms = [np.zeros(len(at_s)), np.zeros(len(at_s)), late.copy()]
        margins_s = (error * at_s)[:, None]
        if self.has_streams:
            left_s = self._slack_s - at_s[:, None]
            terms[1] = self.late_streams(left_s, left_s, 1.0, margins_s)
            late += terms[1]
        if len(due_s):
            terms[0] = _share_beyond(np.array(due_s) - at_s[:, None], margins_s).sum(1)
            late += terms[0]
        values: list[float] = []
        least_late, *_ = num_lates = late.tolist()
        for count, length_s, num_late in zip(tokens, lengths_s, num_lates, strict=True):
            lost_s = max(length_s - draft.arrival_waits_s, 0.0)
            work_s = count * token_s - self._rate * lost_s * lost_s / 2.0
            values.append((work_s - self._config.late_price_s * (num_late - least_late)) / max(length_s, 1e-9))
        candidates = [Candidate("offline", *each) for each in zip(lengths_s, num_lates, values, strict=True)]
        # An empty step brings nothing, and offline work must go on.
        first = 0 if draft.num_parts else 1
        index = first + self._index_of_best(values[first:])
        best = candidates[index]._replace(term=_largest_term(*(float(term[index]) for term in terms)))
        candidates[index] = best
        draft.candidates += candidates
        draft.chosen.append(best)
        return best.length_s - saved_s

    def _index_of_best(self, values: Sequence[float]) -> int:
        """Index of the length that is taken, from the values of all, shortest length first."""
        if self.has_streams:
            least = (1.0 - NEXT_TO_NOTHING) * max(values)
            return next((index for index, value in enumerate(values) if value >= least), 0)
        return max(range(len(values)), key=lambda index: (round(values[index], 9), index))

    def _offline_steps(self, draft: JudgedStep, most_s: float) -> OfflineSteps:
        budget = draft.budget
        most, online_s = budget.tokens_left, budget.prediction.seconds
        contexts = draft.offline_contexts()[:most]
        reads = Reads.of(contexts) if len(contexts) else Reads(0, 0)
        tokens, predicted_s, count = [0], [online_s], 1
        while tokens[-1] < most:
            count = min(count, most)
            shape, num_decodes = budget.shape.copy(), min(count, len(contexts))
            if num_decodes:
                shape.add_decodes(num_decodes, reads.total_tokens * num_decodes // len(contexts), reads.longest_tokens)
            if count > num_decodes:
                shape.add(count - num_decodes, 0)
            tokens.append(count)
            predicted_s.append(budget.expected_s(shape))
            count *= GROWTH
        first_s = (predicted_s[2] - predicted_s[1]) / (tokens[2] - tokens[1]) if len(tokens) > 2 else 0.0
        saved_s = max(online_s + first_s - predicted_s[1], 0.0) if draft.num_parts else 0.0
        # A longer step never does less, whatever a fit says.
        lengths_s = list(accumulate((online_s, *(seconds + saved_s for seconds in predicted_s[1:])), max))
        token_s = (lengths_s[-1] - online_s) / most
        # A length beyond that of the fullest step brings nothing.
        least_s = lengths_s[1]
        most_s = max(min(most_s, lengths_s[-1]), least_s)
        apart_s = (most_s - least_s) / (NUM_LENGTHS - 1)
        compared_s = [*(least_s + number * apart_s for number in range(NUM_LENGTHS - 1)), most_s]
        # Between two counts times are nearly a line.
        compared = np.interp(compared_s, lengths_s, tokens).tolist()
        return OfflineSteps([0.0, *compared], [online_s, *compared_s], token_s, saved_s)


def _largest_term(prompts: float, streams: float, arrivals: float) -> str:
    """Name of the largest of three expected numbers of late requests; empty if all are next to nothing."""
    largest, name = max((prompts, "prompts"), (streams, "streams"), (arrivals, "arrivals"), key=lambda term: term[0])
    return name if largest > EQUAL else ""


def _fewest_late(
    prompts: Sequence[PendingPrompt[R]],
    steps: Sequence[float],
    due_s: Sequence[float],
    pace: PromptSteps,
    drops_longest: bool = True,
) -> tuple[list[bool], float, float]:
    """Drops the longest prompt so far whenever one certainly cannot be in time behind those kept.

    Returns which prompts are kept, the expected late ones, and the steps of those kept. A prompt with output is kept:
    somebody reads its answer.
    """
    total, kept = 0.0, [True] * len(prompts)
    longest: list[tuple[float, int]] = []
    for index, prompt in enumerate(prompts):
        total += steps[index]
        if prompt.request.num_output_tokens:
            continue
        heappush(longest, (-steps[index], -index))
        if pace.seconds(total) - pace.most_late_s(total) > due_s[index]:
            dropped = -heappop(longest)[1] if drops_longest else index
            total -= steps[dropped]
            kept[dropped] = False
    num_late, total = float(kept.count(False)), 0.0
    for index, is_kept in enumerate(kept):
        if is_kept:
            total += steps[index]
            margin_s, spare_s = pace.most_late_s(total), due_s[index] - pace.seconds(total)
            num_late += min(max(0.5 - spare_s / (2.0 * margin_s), 0.0), 1.0) if margin_s > 0.0 else spare_s < 0.0
    return kept, num_late, total


def _relative_error(prediction: Prediction) -> float:
    """Margin of a predicted time as a fraction of it."""
    return prediction.margin_s / prediction.seconds if prediction.seconds else 0.0


def _share_beyond(spare_s: FloatArray, margin_s: FloatArray) -> FloatArray:
    """Probability that a time with such a margin is longer by more than ``spare_s``: a line in place of a bell."""
    shares: FloatArray = (0.5 - spare_s / np.maximum(2.0 * margin_s, LEAST_MARGIN_S)).clip(0.0, 1.0)
    return shares
