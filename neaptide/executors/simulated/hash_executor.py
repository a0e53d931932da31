"""An executor without a model: step times from a cost model, tokens from a hash.

On a ``VirtualClock`` a step takes no real time; on the monotonic clock it sleeps. A token depends only on the request's
prompt and the output position. So any schedule, preemption or restart gives the same text. Input tokens are not read,
so placeholders work too.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import StepPlan, StepResult


def simulated_token(prompt_crc: int, output_position: int, vocab_size: int, first_token_id: int) -> int:
    """The token at ``output_position`` of a request, in ``first_token_id .. vocab_size - 1``."""
    digest = zlib.crc32(output_position.to_bytes(4, "little"), prompt_crc)
    return first_token_id + digest % (vocab_size - first_token_id)


@dataclass(slots=True)
class DeviceTime:
    """The time when a device that runs one step after the other has finished its queue."""

    free_s: float = 0.0

    def add(self, now_s: float, seconds: float) -> float:
        """Adds a step submitted now; returns its end."""
        self.free_s = max(now_s, self.free_s) + seconds
        return self.free_s


@dataclass(slots=True, frozen=True)
class SimHandle:
    clock: Clock
    end_s: float
    result: StepResult

    def wait(self) -> StepResult:
        self.clock.sleep_until(self.end_s)
        return self.result


class SimExecutor:
    """Implements ``Executor`` without a model.

    Args:
        cost_model: predicts step times; its margin is ignored.
        first_token_id: smallest token that is generated. Special tokens are below it.
    """

    def __init__(
        self, num_blocks: int, cost_model: CostModel, clock: Clock, vocab_size: int, first_token_id: int = 6
    ) -> None:
        self._num_blocks = num_blocks
        self._cost_model = cost_model
        self._clock = clock
        self._vocab_size = vocab_size
        self._first_token_id = first_token_id
        self._prompts: dict[str, int] = {}
        self._device = DeviceTime()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def known_requests(self) -> frozenset[str]:
        """Requests whose state is kept."""
        return frozenset(self._prompts)

    def submit(self, plan: StepPlan) -> SimHandle:
        for request_id in plan.finished_ids:
            self._prompts.pop(request_id, None)
        for new in plan.new_requests:
            self._prompts[new.request_id] = self.remember(new.prompt_token_ids)
        seconds = self._cost_model.predict(plan.shape).seconds if len(plan) else 0.0
        result = StepResult.of(plan)
        result.model_s = seconds
        for index in np.flatnonzero(plan.sample).tolist():
            prompt, position = self._prompts[plan.request_ids[index]], int(plan.output_position[index])
            result.token_ids[index] = self.token(prompt, position)
        return SimHandle(self._clock, self._device.add(self._clock.now(), seconds), result)

    def remember(self, prompt_token_ids: Sequence[int]) -> int:
        """A number for the prompt that is all that its output depends on."""
        return zlib.crc32(array("i", prompt_token_ids).tobytes())

    def token(self, prompt: int, output_position: int) -> int:
        """The token at a position of the output, for a prompt's number."""
        return simulated_token(prompt, output_position, self._vocab_size, self._first_token_id)

    def close(self) -> None:
        self._prompts.clear()
