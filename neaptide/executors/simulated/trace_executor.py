"""The executor of a simulation: step times from a cost model, output lengths from a trace, tokens that cost nothing.

It alone knows how long an answer will be. A request of n output tokens runs exactly n sampling steps: the n-th sampled
token is the end-of-sequence token, which the engine does not keep but which a client waits for, so it counts.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import NewRequest, StepPlan, StepResult
from neaptide.executors.simulated.hash_executor import DeviceTime, SimHandle

END_TOKEN_ID = 5
"""Below every token of a prompt (``neaptide.loadgen.workloads.traces.token_ids``)."""
PROMPT_VOCABULARY = 128_000
"""Prompt tokens lie below; output tokens above, one for each request: no two requests share a block of outputs, and
a preempted one finds its own again."""

EPSILON = 1e-9
"""Of a layer: times are sums of floats."""

OutputTokens = Callable[[str], int]
"""The true output length of a request, at least 1."""
ReachedTokens = Callable[[str], int]
"""How many tokens of a request had their KV in the cache of an engine that it was lost with; 0 for one that is new."""


def nothing_reached(request_id: str) -> int:
    return 0


FACTS = ("prompt_tokens", "last_position", "token_id", "is_offline", "reached_tokens")
"""Of a request: ``last_position`` of its output is where the end token comes, ``reached_tokens`` those whose KV was
in the cache at some time."""
REACHED = FACTS.index("reached_tokens")


@dataclass(slots=True, frozen=True)
class Layers:
    """Between which a step may be given up, and at what price."""

    count: int
    handover_s: float

    def until_given_up_s(self, seconds: float, arrival_s: float, share: float) -> float | None:
        """When a step that takes so long ends for somebody who comes after ``arrival_s`` of it: behind the layer that
        runs. None if it is over before, or so much of its layers."""
        if not 0.0 < arrival_s < seconds:
            return None
        begun = max(math.ceil(arrival_s * self.count / seconds - EPSILON), 1)
        return None if begun >= share * self.count else begun * seconds / self.count + self.handover_s


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
        step_noise: standard deviation of the logarithm of a step's time over what it takes on average; 0 for none.
        step_factors: what the steps take over the truth, one after the other, in place of noise.
        layers: for an executor that gives steps up.
        reached_tokens: asked once for each request: those count as done before.
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
        step_factors: Iterator[float] | None = None,
        layers: Layers | None = None,
        reached_tokens: ReachedTokens = nothing_reached,
    ) -> None:
        self._num_blocks = num_blocks
        self._truth = truth
        self._clock = clock
        self._output_tokens = output_tokens
        self._is_online = is_online
        self._step_noise = step_noise
        self._random = random.Random(seed)
        self._step_factors = step_factors
        self._layers = layers
        self._reached_before = reached_tokens
        self.next_arrival_s = math.inf
        """Of an online request; told by who drives before every step."""
        self._num_seen = 0
        self._device = DeviceTime()
        self._facts = np.zeros((0, len(FACTS)), np.int64)
        """[requests with a first step and no end, FACTS]."""
        self._index: dict[str, int] = {}
        """Row of each in ``_facts``."""
        self._before = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """Rows of the requests in the step submitted last, and what they had reached before it."""
        self._free: list[int] = []
        self._index_of_seat = np.zeros(0, np.int64)
        """The same by row of the engine's table, for requests that have taken part in a step since they took it."""
        self.tallies: dict[int, StepTally] = {}
        """Of the steps submitted, by number; to be taken by the reader."""

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, plan: StepPlan) -> SimHandle:
        for request_id in plan.finished_ids:
            index = self._index.pop(request_id, None)
            if index is not None:
                self._free.append(index)
        for new in plan.new_requests:
            self._take_in(new)
        seconds = self._truth.predict(plan.shape).seconds
        if self._step_factors is not None:
            seconds *= next(self._step_factors)
        elif self._step_noise:
            # With median 1 they would take exp(sigma^2 / 2) longer on average than the truth says.
            seconds *= self._random.lognormvariate(-0.5 * self._step_noise**2, self._step_noise)
        result, now_s = StepResult(self._run(plan), model_s=seconds), self._clock.now()
        if self._layers is not None and plan.give_up_share > 0:
            given_up_s = self._layers.until_given_up_s(seconds, self.next_arrival_s - now_s, plan.give_up_share)
            if given_up_s is not None:
                result.is_given_up, result.model_s, seconds = True, given_up_s, given_up_s
                self._take_back(plan)
        return SimHandle(self._clock, self._device.add(now_s, seconds), result)

    def _take_back(self, plan: StepPlan) -> None:
        """The step submitted last was given up: nothing came of it."""
        rows, reached = self._before
        self._facts[rows, REACHED] = reached
        self.tallies[plan.step] = StepTally()

    def reached_tokens(self, request_id: str) -> int:
        """Of a request with a first step and no end, and of one that ended with the last step; 0 of any other."""
        index = self._index.get(request_id, -1)
        return 0 if index < 0 else int(self._facts[index, REACHED])

    def lose(self) -> None:
        """The engine is lost: a step that is in flight comes to nothing."""
        if self.tallies:
            rows, reached = self._before
            self._facts[rows, REACHED] = reached
            self.tallies.clear()

    def close(self) -> None:
        self._index.clear()

    def _take_in(self, new: NewRequest) -> None:
        if new.request_id not in self._index and not self._free:
            count = len(self._facts)
            self._facts = np.concatenate((self._facts, np.zeros((max(count, 64), len(FACTS)), np.int64)))
            self._free = list(range(len(self._facts) - 1, count - 1, -1))
        index = self._index.get(new.request_id, -1)
        if index < 0:  # else it is told of again, for its first step was given up
            index = self._index[new.request_id] = self._free.pop()
        last_position = self._output_tokens(new.request_id) - 1
        is_offline = not self._is_online(new.request_id)
        self._facts[index] = (
            len(new.prompt_token_ids),
            last_position,
            PROMPT_VOCABULARY + self._num_seen,
            is_offline,
            self._reached_before(new.request_id),
        )
        self._num_seen += 1

    def _note_seats(self, plan: StepPlan) -> None:
        if len(self._index_of_seat) < plan.table.num_seats:
            self._index_of_seat = np.zeros(plan.table.num_seats, np.int64)
        self._index_of_seat[plan.rows] = [self._index[request_id] for request_id in plan.request_ids]

    def _run(self, plan: StepPlan) -> IntArray:
        """[parts] the sampled tokens; notes the tally."""
        if plan.new_requests or plan.resumed_ids:
            self._note_seats(plan)
        rows = self._index_of_seat[plan.rows]
        prompt, last_position, token_id, offline, reached = self._facts[rows].T
        self._before = rows, reached
        start, end, tally = plan.num_computed, plan.num_computed + plan.num_tokens, StepTally()
        tally.again_tokens = int(np.maximum(np.minimum(end, reached) - start, 0).sum())
        now_reached = np.maximum(reached, end)
        # All but the token sampled last is in the cache, as nearly always: one token that is no prefill.
        is_plain = (start == reached) & (reached >= prompt)
        of_prompts = (offline > 0) & ~is_plain
        prefilled = np.maximum(np.minimum(end, np.maximum(reached, prompt)) - start, 0)
        tally.offline_prefill_tokens = int(prefilled[of_prompts].sum())
        done = np.minimum(now_reached, prompt) - np.minimum(reached, prompt)
        tally.offline_prompt_tokens = int(done[of_prompts].sum())
        # Behind the end token comes one more that is dropped, if the next step was planned before it was known.
        # Nor does a token count that the request had in an engine that was lost.
        kept = plan.sample & (plan.output_position <= last_position) & (end > reached)
        tally.offline_output_tokens = int((kept & (offline > 0)).sum())
        self._facts[rows, REACHED] = now_reached
        self.tallies[plan.step] = tally
        return np.where(plan.output_position == last_position, END_TOKEN_ID, token_id)
