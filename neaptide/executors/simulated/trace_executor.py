"""The executor of a simulation: step times from a cost model, output lengths from a trace, tokens that cost nothing.

It alone knows how long an answer will be. A request of n output tokens runs exactly n sampling steps: the n-th sampled
token is the end-of-sequence token, which the engine does not keep but which a client waits for, so it counts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from neaptide.engine.batch import StepPlan, StepResult
from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import CostModel
from neaptide.executors.simulated.hash_executor import DeviceTime, SimHandle

END_TOKEN_ID = 5
"""Below every token of a prompt (``neaptide.loadgen.workloads.traces.token_ids``)."""
PROMPT_VOCABULARY = 128_000
"""Prompt tokens lie below; output tokens above, one for each request: no two requests share a block of outputs, and
a preempted one finds its own again."""

OutputTokens = Callable[[str], int]
"""The true output length of a request, at least 1."""


@dataclass(slots=True)
class _Request:
    prompt_tokens: int
    last_position: int
    """Of its output: where the end token comes."""
    token_id: int
    is_offline: bool
    reached_tokens: int = 0
    """Tokens whose KV was in the cache at some time."""


@dataclass(slots=True)
class StepTally:
    """What one step brought that the engine does not count."""

    offline_prompt_tokens: int = 0
    """Prompt tokens of offline requests that are done for the first time, found in the cache or computed."""
    offline_output_tokens: int = 0
    offline_prefill_tokens: int = 0
    """Computed for offline requests: prompt tokens, and tokens after the prompt that were computed before. The engine
    counts the last token of a prompt as a decode if it is computed alone."""
    again_tokens: int = 0
    """Computed before, lost by a preemption, and computed once more."""


class TraceExecutor:
    """Implements ``Executor``.

    Args:
        truth: how long a step takes (its margin is ignored).
        output_tokens: asked once for each request, at its first step.
        is_online: the same.
        step_noise: standard deviation of the logarithm of a step's time; 0 for none.
    """

    def __init__(
        self,
        num_blocks: int,
        truth: CostModel,
        clock: Clock,
        output_tokens: OutputTokens,
        is_online: Callable[[str], bool],
        step_noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._num_blocks = num_blocks
        self._truth = truth
        self._clock = clock
        self._output_tokens = output_tokens
        self._is_online = is_online
        self._step_noise = step_noise
        self._random = random.Random(seed)
        self._requests: dict[str, _Request] = {}
        self._num_seen = 0
        self._device = DeviceTime()
        self.tally = StepTally()
        """Of the last step."""

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, plan: StepPlan) -> SimHandle:
        for request_id in plan.finished_ids:
            self._requests.pop(request_id, None)
        for new in plan.new_requests:
            self._requests[new.request_id] = _Request(
                len(new.prompt_token_ids),
                self._output_tokens(new.request_id) - 1,
                PROMPT_VOCABULARY + self._num_seen,
                not self._is_online(new.request_id),
            )
            self._num_seen += 1
        seconds = self._truth.predict(plan.shape).seconds
        if self._step_noise:
            seconds *= self._random.lognormvariate(0.0, self._step_noise)
        result = StepResult(model_s=seconds)
        self._run(plan, result.token_ids)
        return SimHandle(self._clock, self._device.add(self._clock.now(), seconds), result)

    def close(self) -> None:
        self._requests.clear()

    def _run(self, plan: StepPlan, token_ids: dict[str, int]) -> None:
        """Fills in the sampled tokens and the tally. Runs once per request and step: the one hot loop here."""
        requests, tally = self._requests, StepTally()
        offline_output_tokens = 0
        for part in plan.scheduled:
            request = requests[part.request_id]
            start = part.num_computed_tokens
            if start == request.reached_tokens >= request.prompt_tokens:
                # All but the token sampled last is in the cache, as nearly always: one token, and it samples.
                request.reached_tokens = start + 1
            else:
                self._count_chunk(request, start, start + len(part.token_ids), tally)
                if not part.sample:
                    continue
            is_last = part.output_position == request.last_position
            token_ids[part.request_id] = END_TOKEN_ID if is_last else request.token_id
            offline_output_tokens += request.is_offline
        tally.offline_output_tokens = offline_output_tokens
        self.tally = tally

    @staticmethod
    def _count_chunk(request: _Request, start: int, end: int, tally: StepTally) -> None:
        reached = request.reached_tokens
        tally.again_tokens += max(min(end, reached) - start, 0)
        request.reached_tokens = max(reached, end)
        if request.is_offline:
            tally.offline_prefill_tokens += max(min(end, max(reached, request.prompt_tokens)) - start, 0)
            done_before = min(reached, request.prompt_tokens)
            tally.offline_prompt_tokens += min(request.reached_tokens, request.prompt_tokens) - done_before
