"""Recent online traffic: how often requests arrive, what their prompts cost, and how long their answers are."""

from collections import deque

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.request import Request

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

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._arrivals_s: deque[float] = deque(maxlen=4 * RECENT)
        self._prompts: deque[list[float]] = deque(maxlen=RECENT)
        """Uncomputed tokens and TTFT target of each, in seconds."""
        self._waiting: dict[Request, list[float]] = {}
        self._answers: deque[int] = deque([FIRST_ANSWER_TOKENS], maxlen=RECENT)
        self._sorted: IntArray | None = None
        self._sums: FloatArray = np.zeros(1)
        self._sample: tuple[FloatArray, FloatArray] | None = None
        self.mean_tokens = self.spread = self.tightest_ttft_s = 0.0
        """Mean of the prompts' tokens, mean square over squared mean, and shortest TTFT target."""
        self.longest_tokens = 1

    def observe_arrival(self, request: Request) -> None:
        self._arrivals_s.append(request.arrival_s)
        entry = [float(request.num_prompt_tokens), request.ttft_slo_s]
        self._prompts.append(entry)
        self._waiting[request] = entry
        self._sample = None

    def observe_admission(self, request: Request, num_tokens: int) -> None:
        """The request was admitted with ``num_tokens`` tokens to compute."""
        if (entry := self._waiting.pop(request, None)) is not None:
            entry[0] = float(num_tokens)
            self._sample = None

    def observe_end(self, request: Request) -> None:
        self._waiting.pop(request, None)
        if request.num_output_tokens > 1:
            self._answers.append(request.num_output_tokens)
            self._sorted = None

    def rate(self, now_s: float) -> float:
        """Arrivals per second."""
        if not self._arrivals_s:
            return 0.0
        count = 0
        for arrival_s in reversed(self._arrivals_s):
            if arrival_s < now_s - WINDOW_S:
                break
            count += 1
        return (count + 1) / min(WINDOW_S, max(now_s - self._arrivals_s[0], 1.0))

    def prompts(self) -> tuple[FloatArray, FloatArray]:
        """[recent] uncomputed tokens of each prompt, and its TTFT target in seconds."""
        if self._sample is None:
            entries = np.array(self._prompts, float).reshape(-1, 2)
            tokens, ttft_slo_s = self._sample = entries[:, 0], entries[:, 1]
            if len(tokens):
                self.mean_tokens = max(float(tokens.mean()), 1.0)
                self.spread = float((tokens * tokens).mean()) / self.mean_tokens**2
                self.tightest_ttft_s, self.longest_tokens = float(ttft_slo_s.min()), max(int(tokens.max()), 1)
        return self._sample

    def tokens_left(self, num_output: IntArray) -> FloatArray:
        """Expected further tokens of streams with so many, at least 1."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._answers))
            self._sums = np.concatenate((np.cumsum(self._sorted[::-1])[::-1], [0.0]))
        first = np.searchsorted(self._sorted, num_output, side="right")
        count = len(self._sorted) - first
        longer: FloatArray = self._sums[first] / np.maximum(count, 1) - num_output
        # A stream longer than any answer says that answers may be longer still.
        return np.maximum(np.where(count > 0, longer, num_output), 1.0)
