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


class Traffic:
    """The last ``RECENT`` online requests.

    A prompt counts with the tokens that the cache did not have, once that is known.
    """

    def __init__(self, config: SchedulerConfig, cost_model: CostModel) -> None:
        self._config, self._cost_model = config, cost_model
        self._arrivals_s: list[float] = []
        """In order, a few times ``RECENT``: the rate of a crowd is counted in less than the window."""
        self._prompts: deque[list[float]] = deque(maxlen=RECENT)
        """Uncomputed tokens and TTFT target of each, in seconds."""
        self._waiting: dict[Request, list[float]] = {}
        self._answers: deque[int] = deque([FIRST_ANSWER_TOKENS], maxlen=RECENT)
        self._has_changed = True
        self._lengths: IntArray = np.empty(0, np.int64)
        """Lengths of the recent answers, in order."""
        self._sums: FloatArray = np.zeros(1)
        """Sum of each and all longer ones."""
        self.tokens: FloatArray = np.empty(0)
        """[recent] tokens to compute of each prompt."""
        self.ttft_slo_s: FloatArray = np.empty(0)
        """[recent] TTFT targets."""
        self.mean_tokens = self.spread = self.tightest_ttft_s = 0.0
        """Mean of ``tokens``, mean square over squared mean, and the shortest TTFT target."""
        self.longest_tokens = 1

    def observe_arrival(self, request: Request) -> None:
        insort(self._arrivals_s, request.arrival_s)
        if len(self._arrivals_s) > 4 * RECENT:
            del self._arrivals_s[0]
        ttft_slo_s, default_s = request.ttft_slo_s, self._config.ttft_slo_s
        if ttft_slo_s < default_s and ttft_slo_s <= self._least_step_s():
            ttft_slo_s = default_s  # No step is so short: what it asks for shortens none.
        entry = [float(request.num_prompt_tokens), ttft_slo_s]
        self._prompts.append(entry)
        self._waiting[request] = entry
        self._has_changed = True

    def observe_admission(self, request: Request, num_tokens: int) -> None:
        """The request was admitted with ``num_tokens`` tokens to compute."""
        if (entry := self._waiting.pop(request, None)) is not None:
            entry[0] = float(num_tokens)
            self._has_changed = True

    def observe_end(self, request: Request) -> None:
        self._waiting.pop(request, None)
        if request.num_output_tokens > 1:
            self._answers.append(request.num_output_tokens)
            self._has_changed = True

    def refresh(self) -> None:
        """Takes in what was observed; before a step is planned."""
        if not self._has_changed:
            return
        self._has_changed = False
        self._lengths = np.sort(np.array(self._answers))
        self._sums = np.concatenate((np.cumsum(self._lengths[::-1])[::-1], [0.0]))
        if self._prompts:
            entries = np.array(self._prompts)
            self.tokens, self.ttft_slo_s = entries[:, 0].copy(), entries[:, 1].copy()
            self.mean_tokens = max(float(self.tokens.mean()), 1.0)
            self.spread = float((self.tokens * self.tokens).mean()) / self.mean_tokens**2
            self.tightest_ttft_s = float(self.ttft_slo_s.min())
            self.longest_tokens = max(int(self.tokens.max()), 1)

    def rate(self, now_s: float) -> float:
        """Arrivals per second."""
        if not self._arrivals_s:
            return 0.0
        count = len(self._arrivals_s) - bisect_left(self._arrivals_s, now_s - WINDOW_S)
        # One more: none in the window does not mean that none will come.
        return (count + 1) / min(WINDOW_S, max(now_s - self._arrivals_s[0], 1.0))

    def tokens_left(self, num_output: IntArray) -> FloatArray:
        """Expected further tokens of streams with so many, at least 1."""
        first = self._lengths.searchsorted(num_output, side="right")
        count = len(self._lengths) - first
        longer: FloatArray = self._sums[first] / np.maximum(count, 1) - num_output
        # A stream longer than any answer says that answers may be longer still.
        return np.maximum(np.where(count > 0, longer, num_output), 1.0)

    def _least_step_s(self) -> float:
        shape = BatchShape()
        shape.add(1, 0)
        return sum(self._cost_model.predict(shape))
