"""The executor of a simulation: step times from a cost model, output lengths from a trace, dummy tokens.

Only the executor knows how long an answer will be. A request of n output tokens runs exactly n sampling steps. The n-th
token is the end-of-sequence token. It counts, because a client waits for it, although the engine does not keep it.
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
"""Below every prompt token (``neaptide.loadgen.workloads.traces.token_ids``)."""
PROMPT_VOCABULARY = 128_000
"""Prompt tokens are below this; output tokens are above, one value per request. So no two requests share output blocks,
and a preempted request finds its own blocks again."""

EPSILON = 1e-9
"""Tolerance in layers, because times are sums of floats."""

OutputTokens = Callable[[str], int]
"""The true output length of a request, at least 1."""
ReachedTokens = Callable[[str], int]
"""Tokens of a request that were in the KV cache of a lost engine; 0 for a new request."""


def nothing_reached(request_id: str) -> int:
    return 0


FACTS = ("prompt_tokens", "last_position", "token_id", "is_offline", "reached_tokens")
"""Columns of the facts about a request. ``last_position`` is the output position of the end token. ``reached_tokens``
counts the tokens whose KV was ever in the cache."""
REACHED = FACTS.index("reached_tokens")


@dataclass(slots=True, frozen=True)
class Layers:
    """The layers between which a step may be aborted, and the price of an abort."""

    count: int
    handover_s: float

    def until_aborted_s(self, seconds: float, arrival_s: float, share: float) -> float | None:
        """Time at which a step of ``seconds`` ends if it is aborted for a request that arrives ``arrival_s`` after its
        start.

        The running layer is finished first. None if the step ends before, or if at least ``share`` of its layers have
        begun.
        """
        if not 0.0 < arrival_s < seconds:
            return None
        begun = max(math.ceil(arrival_s * self.count / seconds - EPSILON), 1)
        return None if begun >= share * self.count else begun * seconds / self.count + self.handover_s


@dataclass(slots=True)
class StepTally:
    """Per-step counts that the engine does not keep."""

    offline_prompt_tokens: int = 0
    """Offline prompt tokens completed for the first time, by computing them or by a cache hit."""
    offline_output_tokens: int = 0
    offline_prefill_tokens: int = 0
    """Offline prefill tokens computed: prompt tokens, and recomputed output tokens.

    The engine counts the last prompt token as a decode if it is computed alone.
    """
    again_tokens: int = 0
    """Tokens recomputed after a preemption."""


class TraceExecutor:
    """Implements ``Executor`` for a simulation.

    Args:
        truth: the actual step times; its margin is ignored.
        output_tokens: called once per request, at its first step.
        is_online: called once per request, at its first step.
        step_noise: standard deviation of the log of a step's time relative to its mean; 0 for none.
        step_factors: factors applied to the true times of successive steps, instead of noise.
        layers: given if steps can be aborted.
        reached_tokens: called once per request; these tokens count as computed before.
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
        """Time of the next online arrival. The simulation's driver sets it before every step."""
        self._num_seen = 0
        self._device = DeviceTime()
        self._facts = np.zeros((0, len(FACTS)), np.int64)
        """[requests with a first step and no end, FACTS]."""
        self._index: dict[str, int] = {}
        """Row of each request in ``_facts``."""
        self._before = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """Rows of the last submitted step's requests, and their reached tokens before it."""
        self._free: list[int] = []
        self._index_of_slot = np.zeros(0, np.int64)
        """Row in ``_facts`` by the engine's slot, for requests scheduled at least once since they got the slot."""
        self.tallies: dict[int, StepTally] = {}
        """Tallies of the submitted steps, by step number. The reader removes them."""

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
            # The mean of the noise is 1: with a median of 1 the mean would be exp(sigma^2 / 2).
            seconds *= self._random.lognormvariate(-0.5 * self._step_noise**2, self._step_noise)
        result, now_s = StepResult(self._run(plan), model_s=seconds), self._clock.now()
        if self._layers is not None and plan.abortable_share > 0:
            given_up_s = self._layers.until_aborted_s(seconds, self.next_arrival_s - now_s, plan.abortable_share)
            if given_up_s is not None:
                result.is_aborted, result.model_s, seconds = True, given_up_s, given_up_s
                self._take_back(plan)
        return SimHandle(self._clock, self._device.add(now_s, seconds), result)

    def _take_back(self, plan: StepPlan) -> None:
        """Undoes the last submitted step, which was aborted."""
        rows, reached = self._before
        self._facts[rows, REACHED] = reached
        self.tallies[plan.step] = StepTally()

    def reached_tokens(self, request_id: str) -> int:
        """Reached tokens of a request between its first step and its end, or one that ended in the last step;
        else 0."""
        index = self._index.get(request_id, -1)
        return 0 if index < 0 else int(self._facts[index, REACHED])

    def lose(self) -> None:
        """Loses the engine's state. A step in flight has no effect."""
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
        if index < 0:  # otherwise the request is new again because its first step was aborted
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

    def _note_slots(self, plan: StepPlan) -> None:
        if len(self._index_of_slot) < plan.table.num_slots:
            self._index_of_slot = np.zeros(plan.table.num_slots, np.int64)
        self._index_of_slot[plan.rows] = [self._index[request_id] for request_id in plan.request_ids]

    def _run(self, plan: StepPlan) -> IntArray:
        """The sampled tokens [parts]. Records the tally."""
        if plan.new_requests or plan.resumed_ids:
            self._note_slots(plan)
        rows = self._index_of_slot[plan.rows]
        prompt, last_position, token_id, offline, reached = self._facts[rows].T
        self._before = rows, reached
        start, end, tally = plan.num_computed, plan.num_computed + plan.num_tokens, StepTally()
        tally.again_tokens = int(np.maximum(np.minimum(end, reached) - start, 0).sum())
        now_reached = np.maximum(reached, end)
        # Usually everything but the last sampled token is in the cache; that one token is no prefill.
        is_plain = (start == reached) & (reached >= prompt)
        of_prompts = (offline > 0) & ~is_plain
        prefilled = np.maximum(np.minimum(end, np.maximum(reached, prompt)) - start, 0)
        tally.offline_prefill_tokens = int(prefilled[of_prompts].sum())
        done = np.minimum(now_reached, prompt) - np.minimum(reached, prompt)
        tally.offline_prompt_tokens = int(done[of_prompts].sum())
        # A token after the end token is dropped if the next step was planned early. Tokens that a lost engine had
        # already produced do not count either.
        kept = plan.sample & (plan.output_position <= last_position) & (end > reached)
        tally.offline_output_tokens = int((kept & (offline > 0)).sum())
        self._facts[rows, REACHED] = now_reached
        self.tallies[plan.step] = tally
        return np.where(plan.output_position == last_position, END_TOKEN_ID, token_id)
