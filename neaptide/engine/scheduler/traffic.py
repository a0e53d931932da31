"""Recent online traffic: how often requests arrive, what their prompts cost, and how long their answers are."""

from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray, largest, smallest
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.judged import OnlineRequest
from neaptide.engine.steps.plan import BatchShape

RECENT = 100
"""Requests that are remembered."""
WINDOW_S = 20.0
"""Seconds in which arrivals are counted."""
FIRST_ANSWER_TOKENS = 32
"""Length of the answers before the first has ended."""


class RecentPrompts(NamedTuple):
    """Prompts of recent requests, at least one."""

    tokens: FloatArray
    """[recent] uncomputed tokens of each."""
    ttft_slo_s: FloatArray
    """[recent] TTFT target of each."""
    mean_tokens: float
    spread: float
    """Mean square of the tokens over their squared mean."""
    longest_tokens: int
    tightest_ttft_s: float

    @classmethod
    def of(cls, tokens: FloatArray, ttft_slo_s: FloatArray) -> "RecentPrompts":
        count = len(tokens)
        mean_tokens = max(float(np.add.reduce(tokens)) / count, 1.0)
        spread = float(np.add.reduce(tokens * tokens)) / count / mean_tokens**2
        return cls(tokens, ttft_slo_s, mean_tokens, spread, max(largest(tokens), 1), smallest(ttft_slo_s))


class RecentTraffic:
    """The last ``RECENT`` online requests.

    A prompt counts with the tokens that the cache did not have, once that is known.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel) -> None:
        self.config, self._cost_model = config, cost_model
        self._arrivals_s: list[float] = []
        """In order; more than ``RECENT``, because a crowd's rate is counted over less than the window."""
        self._prompts: FloatArray = np.zeros((2, RECENT))
        """Uncomputed tokens and TTFT targets in seconds, the youngest last."""
        self._num_arrived = 0
        self.prompts: RecentPrompts | None = None
        """Sums of the recent prompts at the last ``begin``; None before the first."""
        self._have_changed = False
        self._waiting: dict[OnlineRequest, int] = {}
        """How many had arrived with each that was not admitted."""
        self._answers: deque[int] = deque([FIRST_ANSWER_TOKENS], maxlen=RECENT)
        self._sum_answers()

    def observe_arrival(self, request: OnlineRequest) -> None:
        insort(self._arrivals_s, request.arrival_s)
        del self._arrivals_s[: -4 * RECENT]
        self._prompts[:, :-1] = self._prompts[:, 1:]
        self._prompts[:, -1] = request.num_prompt_tokens, self._possible_ttft_s(request.ttft_slo_s)
        self._num_arrived += 1
        self._waiting[request] = self._num_arrived
        self._have_changed = True

    def _possible_ttft_s(self, ttft_slo_s: float) -> float:
        """The target, or the default if no step is so short: none shortens steps by asking for what cannot be."""
        if ttft_slo_s >= self.config.ttft_slo_s:
            return ttft_slo_s
        least = BatchShape()
        least.add(1, 0)
        is_possible = ttft_slo_s > sum(self._cost_model.predict(least))
        return ttft_slo_s if is_possible else self.config.ttft_slo_s

    def observe_admission(self, request: OnlineRequest, num_tokens: int) -> None:
        """The request was admitted with ``num_tokens`` tokens to compute."""
        number = self._waiting.pop(request, -RECENT)
        if (num_younger := self._num_arrived - number) < RECENT:
            self._prompts[0, -1 - num_younger] = num_tokens
            self._have_changed = True

    def observe_end(self, request: OnlineRequest) -> None:
        self._waiting.pop(request, None)
        if request.num_output_tokens > 1:
            self._answers.append(request.num_output_tokens)
            self._sum_answers()

    def rate(self, now_s: float) -> float:
        """Arrivals per second."""
        if not self._arrivals_s:
            return 0.0
        count = len(self._arrivals_s) - bisect_left(self._arrivals_s, now_s - WINDOW_S)
        # One more: none in the window does not mean that none will come.
        return (count + 1) / min(WINDOW_S, max(now_s - self._arrivals_s[0], 1.0))

    def begin(self) -> None:
        """A step is about to be planned. Sums that several arrivals have changed are made once."""
        if self._have_changed:
            self.prompts = RecentPrompts.of(*self._prompts[:, -self._num_arrived :].copy())
            self._have_changed = False

    def _sum_answers(self) -> None:
        self._sorted: IntArray = np.sort(np.array(self._answers))
        num_longer = np.arange(len(self._sorted), 0, -1)
        self._means: FloatArray = np.append(np.cumsum(self._sorted[::-1])[::-1] / num_longer, 0.0)
        """[answers + 1] mean length of each and all longer answers; of no answers at the end."""

    def tokens_left(self, num_output: IntArray) -> FloatArray:
        """Expected further tokens of streams with so many, at least 1."""
        first = self._first_longer(num_output)
        longer: FloatArray = self._means[first] - num_output
        # A stream longer than any answer says that answers may be longer still.
        return np.maximum(np.where(first < len(self._sorted), longer, num_output), 1.0)

    def chance_of_more(self, num_output: IntArray, num_more: FloatArray) -> FloatArray:
        """Probability that streams with so many tokens get at least ``num_more`` further ones."""
        first = self._first_longer(num_output)
        last = self._sorted.searchsorted(num_output + np.maximum(num_more, 1.0))
        num_longer = len(self._sorted) - first
        doubled: FloatArray = num_output / (num_output + num_more)
        return np.where(num_longer > 0, (len(self._sorted) - last) / np.maximum(num_longer, 1), doubled)

    def _first_longer(self, num_output: IntArray) -> IntArray:
        """Index of the shortest longer answer; the number of answers if none is longer."""
        return self._sorted.searchsorted(num_output, side="right")
