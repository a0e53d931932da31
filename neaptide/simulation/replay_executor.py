"""Replaces the device and the clock in a replay by recorded results and readings."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.params import INTERNAL_ERROR, FinishReason
from neaptide.engine.record.step_log import StepLine
from neaptide.engine.steps.isolation import PROBE
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.simulation.logged_requests import LoggedRequests

END_TOKEN_ID = 1


class ReplayClock:
    """Implements ``Clock``: returns the recorded readings in turn, then keeps the last one."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._readings: deque[float] = deque()

    def script(self, readings_s: Sequence[float]) -> None:
        self._readings = deque(readings_s)

    @property
    def is_exhausted(self) -> bool:
        return not self._readings

    def now(self) -> float:
        if self._readings:
            self._now_s = self._readings.popleft()
        return self._now_s

    def sleep_until(self, t_s: float) -> None:
        """Does nothing: the log determines the time."""


@dataclass(slots=True)
class Answer:
    """What the log knows of a request's answer; nothing if the request has no end in the log."""

    prompt_tokens: int
    filler_id: int
    """Token outside of recorded blocks; unique to the request."""
    tail_start: int
    """End of the prompt's full blocks."""
    tail: list[int] = field(default_factory=list)
    """Tokens of the full blocks from there on."""
    num_tokens: int = -1
    reason: FinishReason | None = None

    def token(self, position: int) -> int:
        """The token at a position of prompt and output."""
        index = position - self.tail_start
        return self.tail[index] if 0 <= index < len(self.tail) else self.filler_id


class RecordedError(Exception):
    """Stands for the recorded step's exception."""


class ReplayExecutor:
    """Implements ``Executor`` with recorded results.

    Args:
        answers: by handle, like the requests.
        handles: of the requests that the engine knows. An id may be reused after its request has ended.
    """

    def __init__(
        self, num_blocks: int, requests: LoggedRequests, answers: Sequence[Answer], handles: Mapping[str, int]
    ) -> None:
        self._num_blocks = num_blocks
        self._requests = requests
        self._answers = answers
        self._handles = handles
        self._errors: dict[str, str] = {}
        self._late: dict[str, float] = {}
        self._mask_s = 0.0
        self._in_parts = False
        self._has_raised = False
        self._is_given_up = False

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def expect(self, line: StepLine) -> None:
        """Sets the step whose result is requested next."""
        self._errors = {self._requests[int(handle)].request_id: error for handle, error in line.errors.items()}
        self._late = {self._requests[int(handle)].request_id: late_s for handle, late_s in line.late.items()}
        self._mask_s = line.mask_s
        self._in_parts, self._has_raised = line.in_parts, False
        self._is_given_up = line.given_up

    def submit(self, plan: StepPlan) -> "ReplayHandle":
        return ReplayHandle(self, plan)

    def result(self, plan: StepPlan) -> StepResult:
        """The recorded result of a plan.

        Raises:
            RecordedError: the first time for a step that was retried in parts, then for parts with the faulty request.
        """
        result = StepResult.of(plan)
        if self._is_given_up:
            result.is_aborted = True
            return result
        result.errors = {id_: self._errors[id_] for id_ in plan.request_ids if id_ in self._errors}
        result.late = {id_: self._late[id_] for id_ in plan.request_ids if id_ in self._late}
        result.mask_s = self._mask_s
        if self._in_parts and (not self._has_raised or INTERNAL_ERROR in result.errors.values()):
            self._has_raised = True
            raise RecordedError
        for index in np.flatnonzero(plan.sample).tolist():
            result.token_ids[index] = self._token(plan.request_ids[index], int(plan.output_position[index]))
        return result

    def close(self) -> None: ...

    def _token(self, request_id: str, output_position: int) -> int:
        if request_id == PROBE.request_id:
            return END_TOKEN_ID
        answer = self._answers[self._handles[request_id]]
        if answer.reason is FinishReason.STOP and output_position == answer.num_tokens:
            return END_TOKEN_ID
        return answer.token(answer.prompt_tokens + output_position)


@dataclass(slots=True, frozen=True)
class ReplayHandle:
    executor: ReplayExecutor
    plan: StepPlan

    def wait(self) -> StepResult:
        return self.executor.result(self.plan)
