"""The judgement of a step: how many online requests it is expected to make late.

Everything is a probability from deadlines, the cost model with its error, recent arrivals and recent answers.
A prompt is late if its first token is. A stream is late if it is behind its pace at its last token, because users count
TPOT as a mean over the answer.
"""

import math
import os
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, smallest
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import PromptSteps, Reads
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.traffic import WINDOW_S, Traffic
from neaptide.engine.steps.plan import BatchShape

DELIVERY_SHARE = 0.1
"""Most of its TPOT target that a stream keeps for the delivery of its tokens."""
LEAST_GAIN = 0.02
"""Least part of its TPOT target that a stream is taken to gain with each token."""
MAX_GAP = 1.5
"""Most TPOT targets between two tokens of a stream because of offline work."""
MAX_STEP_S = 5.0
"""Longest step: whoever cancels a request waits for its end."""
BEST_OF = 1e-3
"""Lengths whose expected late requests differ by less are equal; the longest is taken."""


ERRORS = np.array([-0.7, -0.2, 0.2, 0.7])
"""Margins by which a time differs from its prediction, each as probable as the others."""
FLOOR = float(os.environ.get("NP_FLOOR", "0.75"))
FUTO = float(os.environ.get("NP_FUTO", "1"))
OGAP = float(os.environ.get("NP_OGAP", "1.5"))
PACE = float(os.environ.get("NP_PACE", "0.9"))
FUT = float(os.environ.get("NP_FUT", "1"))


class Prompt(NamedTuple):
    request: Request
    num_tokens: int
    """Tokens to compute."""
    context_tokens: int


class Choice(NamedTuple):
    """How long online prompts may make the step, and which of them can be in time so."""

    limit_s: float
    num_late: float
    in_time: list[Request]
    late: list[Request]


class Outlook:
    """What the next seconds look like from a draft without scheduled requests. Times are in seconds."""

    def __init__(self, draft: Draft, config: SchedulerConfig, model: CostModel, traffic: Traffic) -> None:
        self._config, self._model = config, model
        self._now_s = draft.now_s
        tokens, ttft_slo_s = traffic.prompts()
        self.ttft_slo_s = min(config.ttft_slo_s, smallest(ttft_slo_s)) if len(tokens) else config.ttft_slo_s
        self.longest_s = max(MAX_STEP_S, 0.5 * self.ttft_slo_s)
        streams, shape = draft.streams(), BatchShape()
        self.alone_s = self.alone_margin_s = 0.0
        self.gap_s = math.inf
        if len(streams.rows):
            shape.add_decodes(len(streams.rows), *draft.stream_reads())
            self.alone_s, self.alone_margin_s = model.predict(shape)
            tightest_s = smallest(streams.tpot_slo_s)
            self.gap_s = OGAP * max(tightest_s, self.alone_s)
            if self.alone_s >= tightest_s:
                # These do not keep their pace even alone: nothing that others give up makes them be in time.
                streams = streams.slower_than(self.alone_s)
        self.has_streams = len(streams.rows) > 0
        self.tpot_s = smallest(streams.tpot_slo_s) if self.has_streams else config.tpot_slo_s
        drain = max(1.0 - self.alone_s / self.tpot_s, LEAST_GAIN) if self.has_streams else 1.0
        # Prompts that are still to come: what each adds to a step beside the streams.
        self.rate = traffic.rate(draft.now_s) if len(tokens) else 0.0
        self.rho = self.theta = self.can_wait_s = 0.0
        self._waits_s: FloatArray = np.empty(0)
        self._late_sums_s: FloatArray = np.zeros(1)
        self._share = 0.0
        if len(tokens):
            most = float(tokens[tokens.argmax()])
            sizes = np.array([0.0, max(most / 4.0, 1.0), max(most, 2.0)])
            ends_s = [model.predict(shape.plus(int(size), 0)) for size in sizes[1:]]
            longest = ends_s[-1]
            added_s = np.array([0.0, *(max(end.seconds - self.alone_s, 1e-6) for end in ends_s)])
            own_s = np.interp(tokens, sizes, added_s)
            mean_s, square_s = float(own_s.mean()), float((own_s**2).mean())
            self.rho = self.rate * mean_s / drain
            self.theta = 2.0 * max(1.0 - self.rho, 0.33) * mean_s / square_s if square_s > 0.0 else math.inf
            spare_s = ttft_slo_s - config.delivery_latency_s - self.alone_s - own_s
            self.can_wait_s = max(drain * self.ttft_slo_s - float(own_s.max()), 0.0)
            # The step's error is for the prompt as well; half of the sample is taken as slow, half as fast.
            error_s = longest.margin_s / max(longest.seconds, 1e-9) * (own_s + self.alone_s)
            waits_s = np.sort((spare_s + ERRORS[:, None] * error_s).ravel())
            waits_s = waits_s[waits_s > 0.0] / (1.0 + self.rho)
            self._waits_s = waits_s
            self._late_sums_s = np.concatenate(([0.0], np.cumsum(waits_s)))
            self._share = self.rate / (len(ERRORS) * len(tokens))
        else:
            self._waits_s = np.array([0.5 * self.ttft_slo_s])
            self._late_sums_s = np.array([0.0, 0.5 * self.ttft_slo_s])
            self._share = 1.0 / WINDOW_S
        if not self.has_streams:
            return
        slo_s = streams.tpot_slo_s
        self._slo_s = slo_s
        self.in_hand_s: FloatArray = (
            streams.due_s - np.minimum(config.delivery_latency_s, DELIVERY_SHARE * slo_s) - draft.now_s
        )
        left_tokens = traffic.tokens_left(streams.num_output)
        self._ends = 1.0 / left_tokens
        load = self.rate * self.rho * drain / self.rate if self.rate else 0.0
        self._gain_s = np.maximum(slo_s * (1.0 - load) - self.alone_s, LEAST_GAIN * slo_s)
        # Requests that a busy period makes late, per stream's part of what streams have in hand.
        busy = FUT * self.rho / max(1.0 - self.rho, 0.33)
        self._future = busy * math.exp(-self.theta * self.can_wait_s) / len(slo_s)

    # ---- what is expected to be late ----

    def late_arrivals(self, seconds: float, ahead_s: float = 0.0) -> float:
        """Expected requests that arrive in the next ``seconds`` and are late because they wait for their end.

        ``ahead_s`` is what they wait for after it anyway.
        """
        first, last = self._waits_s.searchsorted((ahead_s, ahead_s + seconds)).tolist()
        waits_s = float(self._late_sums_s[last] - self._late_sums_s[first])
        return self._share * ((ahead_s + seconds) * (last - first) - waits_s)

    def late_streams(self, first_s: FloatArray, last_s: FloatArray, count: int, margin_s: float, futo: float = 1.0) -> float:
        """Expected streams that are behind at their last token.

        Args:
            first_s: [streams] what each has in hand when the first of ``count`` tokens comes, negative if it is late.
            last_s: the same for the last of them.
            margin_s: error of these times.
        """
        late = np.zeros(len(first_s))
        parts = (0.0,) if count == 1 else (0.0, 1 / 3, 2 / 3, 1.0)
        for part in parts:
            late += _beyond(first_s + part * (last_s - first_s), margin_s)
        num_late = late * (count / len(parts)) + np.maximum(-last_s, 0.0) / self._gain_s
        num_late *= self._ends
        if self.rho > 0.0:
            ahead_s = np.maximum(last_s + self._slo_s - self.alone_s, 0.0)
            return float(num_late.sum()) + futo * self._future * float(np.exp(-self.theta * ahead_s).sum())
        return float(num_late.sum())

    def late_streams_after(self, seconds: float, margin_s: float) -> float:
        if not self.has_streams:
            return 0.0
        left_s = self.in_hand_s - seconds
        return self.late_streams(left_s, left_s, 1, margin_s, FUTO)

    # ---- how long a step with offline work may be ----

    def offline_length_s(self, draft: Draft, due_s: FloatArray, ahead_s: float, price_s: float) -> float:
        """Step length with the most offline work for its time, less what it makes late.

        A step of L seconds brings ``(L - online - price * late(L)) / L``: what online work takes of it brings nothing,
        or what every step costs, if that is more.

        Args:
            due_s: seconds that the step may take for each prompt that must not be late by it.
            price_s: seconds of offline work that one late request is worth.
        """
        self._ahead_s = ahead_s
        budget, table = draft.budget, draft.table
        seconds, margin_s = budget.prediction
        relative = margin_s / seconds if seconds > 0.0 else self._relative_margin(draft)
        wait_s = float(self._waits_s[len(self._waits_s) // 4]) if len(self._waits_s) else 0.0
        most_s = min(self.gap_s / (1.0 + relative), max(wait_s, FLOOR * self._config.tpot_slo_s))
        rows = draft.due_decodes(online=False)[: budget.tokens_left]
        total = longest = 0
        if len(rows):
            total, longest = Reads.of(table.computed[rows])
        tokens, lengths_s = [0], [seconds]
        count = 1
        while tokens[-1] < budget.tokens_left:
            count = min(count, budget.tokens_left)
            decodes = min(count, len(rows))
            shape = budget.shape
            if decodes:
                shape = shape.plus_decodes(decodes, total * decodes // len(rows), longest)
            if count > decodes:
                shape = shape.plus(count - decodes, 0)
            tokens.append(count)
            lengths_s.append(self._model.predict(shape).seconds)
            count *= 2
        token_s = (lengths_s[-1] - seconds) / tokens[-1] if tokens[-1] else 0.0
        best_s, best = seconds, -math.inf
        least_late = self._late_after(draft, seconds, relative * seconds, due_s)
        for num_tokens, length_s in zip(tokens, lengths_s, strict=True):
            if length_s > most_s and num_tokens > 1:
                # Between two counts times are nearly a line.
                before, before_s = tokens[tokens.index(num_tokens) - 1], lengths_s[tokens.index(num_tokens) - 1]
                share = (most_s - before_s) / (length_s - before_s)
                if share <= 0.0:
                    break
                num_tokens, length_s = before + share * (num_tokens - before), most_s
            late = self._late_after(draft, length_s, relative * length_s, due_s)
            value = (num_tokens * token_s - price_s * (late - least_late)) / max(length_s, 1e-9)
            # An empty step brings nothing, and offline work must go on.
            if value >= best or not best_s:
                best_s, best = length_s, value
            if length_s >= most_s:
                break
        return best_s

    def _late_after(self, draft: Draft, length_s: float, margin_s: float, due_s: FloatArray) -> float:
        late = self.late_streams_after(length_s, margin_s)
        if len(due_s):
            late += float(_beyond(due_s - length_s, margin_s).sum())
        return late + self.late_arrivals(length_s, self._ahead_s)

    def _relative_margin(self, draft: Draft) -> float:
        seconds, margin_s = draft.budget.predict_with(draft.budget.tokens_left)
        return margin_s / seconds if seconds > 0.0 else 0.0

    # ---- how long prompts may make a step, and which of them ----

    def choose(self, draft: Draft, prompts: list[Prompt], late: Prompt | None) -> Choice:
        """The step length with the fewest late requests.

        ``late`` has no deadline any more and comes behind all the others.
        """
        budget, block_size = draft.budget, draft.kv.block_size
        every = prompts if late is None else [*prompts, late]
        longest = max(prompt.num_tokens for prompt in every)
        due_s = [prompt.request.next_deadline_s - self._config.delivery_latency_s - self._now_s for prompt in prompts]
        tokens = np.array([prompt.num_tokens for prompt in every], float)
        contexts = np.array([prompt.context_tokens for prompt in every], float)
        best: Choice | None = None
        for limit_s in self._lengths(draft, every):
            pace = PromptSteps.beside(budget, limit_s, block_size, longest)
            steps = (tokens * (pace.token_steps + pace.context_steps * (contexts + tokens / 2))).tolist()
            kept, num_late, total = self._sort_out(prompts, steps, due_s, pace)
            if late is not None:
                total += steps[-1]
            num_late += self._late_beside(total, pace)
            if best is None or num_late <= best.num_late + BEST_OF:
                in_time = [prompt.request for prompt, is_kept in zip(prompts, kept, strict=True) if is_kept]
                dropped = [prompt.request for prompt, is_kept in zip(prompts, kept, strict=True) if not is_kept]
                best = Choice(limit_s, num_late, in_time, dropped)
        assert best is not None
        return best

    def _sort_out(
        self, prompts: list[Prompt], steps: list[float], due_s: list[float], pace: PromptSteps
    ) -> tuple[list[bool], float, float]:
        """Moore and Hodgson's rule: in deadline order the longest so far is dropped when one cannot be in time.

        Returns which are kept, the expected late ones, and the steps that those kept take.
        """
        total, kept = 0.0, [True] * len(prompts)
        heap: list[tuple[float, int]] = []
        for index, prompt in enumerate(prompts):
            total += steps[index]
            if prompt.request.num_output_tokens:
                continue  # Somebody reads its answer.
            heappush(heap, (-steps[index], -index))
            if pace.seconds(total) - pace.most_late_s(total) > due_s[index]:
                dropped = -heappop(heap)[1]
                total -= steps[dropped]
                kept[dropped] = False
        num_late, total = 0.0, 0.0
        for index, is_kept in enumerate(kept):
            if not is_kept:
                num_late += 1.0
                continue
            total += steps[index]
            num_late += _share_beyond(due_s[index] - pace.seconds(total), pace.most_late_s(total))
        return kept, num_late, total

    def _late_beside(self, steps: float, pace: PromptSteps) -> float:
        """Expected late streams and arrivals if prompts take so many steps."""
        seconds = max(pace.seconds(steps), self.alone_s)
        own_s = self.late_arrivals(seconds)
        if not self.has_streams:
            return own_s
        count = max(math.ceil(steps), 1)
        first_s = self.in_hand_s - seconds / count
        last_s = self.in_hand_s - seconds + (count - 1) * self._slo_s
        return own_s + self.late_streams(first_s, last_s, count, pace.margin_s)

    def _lengths(self, draft: Draft, prompts: list[Prompt]) -> list[float]:
        """Step lengths that are compared, shortest first."""
        budget = draft.budget
        lengths: set[float] = set()
        least_s = 0.0
        if self.has_streams:
            least_s = max(PACE * self.tpot_s, self.alone_s)
            spare_s = min(smallest(self.in_hand_s), self.longest_s)
            lengths = {least_s, spare_s, MAX_GAP * self.tpot_s}
        first = prompts[0]
        for shape in (
            budget.shape.plus(min(first.num_tokens, budget.tokens_left), first.context_tokens),
            budget.shape.plus(min(sum(prompt.num_tokens for prompt in prompts), budget.tokens_left), 0),
        ):
            lengths.add(min(sum(self._model.predict(shape)) * 1.001, self.longest_s))
        return sorted(length for length in lengths if length >= least_s) or [least_s]


def _beyond(spare_s: FloatArray, margin_s: float) -> FloatArray:
    """Probability that times with this margin take more than ``spare_s`` longer: a line instead of a bell."""
    if margin_s <= 0.0:
        return (spare_s < 0.0).astype(float)
    shares: FloatArray = np.clip(0.5 - spare_s / (2.0 * margin_s), 0.0, 1.0)
    return shares


def _share_beyond(spare_s: float, margin_s: float) -> float:
    """The same for one time."""
    if margin_s <= 0.0:
        return float(spare_s < 0.0)
    return min(max(0.5 - spare_s / (2.0 * margin_s), 0.0), 1.0)
