"""Recent online traffic: how often requests arrive, what their prompts cost, and how long their answers are."""

from bisect import bisect_left, insort
from collections import deque

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.request import Request
from neaptide.engine.steps.plan import BatchShape

RECENT = 100
"""Requests that are remembered."""
WINDOW_S = 20.0
"""Seconds in which arrivals are counted."""
FIRST_ANSWER_TOKENS = 32
"""Length of the answers before the first has ended."""


class RecentTraffic:
    """The last ``RECENT`` online requests.

    A prompt counts with the tokens that the cache did not have, once that is known.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel) -> None:
        self._config, self._cost_model = config, cost_model
        self._arrivals_s: list[float] = []
        """In order; more than ``RECENT``, because a crowd's rate is counted over less than the window."""
        self._prompts: deque[list[float]] = deque(maxlen=RECENT)
        """Uncomputed tokens and TTFT target of each, in seconds."""
        self._waiting: dict[Request, list[float]] = {}
        self._answers: deque[int] = deque([FIRST_ANSWER_TOKENS], maxlen=RECENT)
        self._sample: FloatArray = np.zeros((0, 2))
        self._sorted: IntArray
        self._sums: FloatArray
        self._sum_answers()
        self.mean_tokens = self.spread = self.tightest_ttft_s = 0.0
        """Mean of the prompts' tokens, mean square over squared mean, and shortest TTFT target."""
        self.longest_tokens = 1

    def observe_arrival(self, request: Request) -> None:
        insort(self._arrivals_s, request.arrival_s)
        del self._arrivals_s[: -4 * RECENT]
        entry = [float(request.num_prompt_tokens), self._possible_ttft_s(request.ttft_slo_s)]
        self._prompts.append(entry)
        self._waiting[request] = entry
        self._sum_prompts()

    def _possible_ttft_s(self, ttft_slo_s: float) -> float:
        """The target, or the default if no step is so short: none shortens steps by asking for what cannot be."""
        if ttft_slo_s >= self._config.ttft_slo_s:
            return ttft_slo_s
        least = BatchShape()
        least.add(1, 0)
        is_possible = ttft_slo_s > sum(self._cost_model.predict(least))
        return ttft_slo_s if is_possible else self._config.ttft_slo_s

    def observe_admission(self, request: Request, num_tokens: int) -> None:
        """The request was admitted with ``num_tokens`` tokens to compute."""
        if (entry := self._waiting.pop(request, None)) is not None:
            entry[0] = float(num_tokens)
            self._sum_prompts()

    def observe_end(self, request: Request) -> None:
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

    def prompts(self) -> tuple[FloatArray, FloatArray]:
        """[recent] uncomputed tokens of each prompt, and its TTFT target in seconds."""
        return self._sample[:, 0], self._sample[:, 1]

    def _sum_prompts(self) -> None:
        self._sample = np.array(self._prompts)
        tokens, ttft_slo_s = self.prompts()
        self.mean_tokens = max(float(tokens.mean()), 1.0)
        self.spread = float((tokens * tokens).mean()) / self.mean_tokens**2
        self.tightest_ttft_s, self.longest_tokens = float(ttft_slo_s.min()), max(int(tokens.max()), 1)

    def _sum_answers(self) -> None:
        self._sorted = np.sort(np.array(self._answers))
        self._sums = np.concatenate((np.cumsum(self._sorted[::-1])[::-1], [0.0]))

    def tokens_left(self, num_output: IntArray) -> FloatArray:
        """Expected further tokens of streams with so many, at least 1."""
        first = np.searchsorted(self._sorted, num_output, side="right")
        count = len(self._sorted) - first
        longer: FloatArray = self._sums[first] / np.maximum(count, 1) - num_output
        # A stream longer than any answer says that answers may be longer still.
        return np.maximum(np.where(count > 0, longer, num_output), 1.0)
