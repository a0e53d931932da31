"""A step's results on their way from the device to the engine."""

from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.clock import Clock
from neaptide.engine.params import NUMERICAL_ERROR
from neaptide.engine.steps.plan import StepResult
from neaptide.executors.torch.logprobs import Scored, to_host
from neaptide.kernels.transfer import HostCopy


@dataclass(slots=True)
class SampledTokens:
    """The new token of every request that sampled."""

    request_ids: list[str]
    parts: IntArray
    """[rows] their parts of the plan."""
    on_host: HostCopy
    """Tokens [rows] int64, and [rows] bool: the logits were finite."""


@dataclass(slots=True)
class TokenScores:
    """Log-probabilities of the new tokens of those that asked for them."""

    request_ids: list[str]
    tops: list[int]
    on_host: HostCopy
    """The parts of ``Scored``."""


@dataclass(slots=True)
class PromptScores:
    """Part of a request's prompt log-probabilities."""

    request_id: str
    top: int
    on_host: HostCopy
    """The parts of ``Scored``, and one bool: the logits were finite."""


@dataclass(slots=True)
class Pending:
    """A step that has been submitted."""

    result: StepResult
    sampled: SampledTokens | None = None
    scores: TokenScores | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)


class TorchHandle:
    """A submitted step."""

    def __init__(self, pending: Pending, clock: Clock):
        self._pending = pending
        self._clock = clock
        self._done = False

    def wait(self) -> StepResult:
        """The host waits for this step's copies here, and for nothing that was submitted after it."""
        pending, result = self._pending, self._pending.result
        if self._done:
            return result
        self._done = True
        start_s = self._clock.now()
        if pending.sampled is not None:
            _collect_tokens(result, pending.sampled)
        if pending.scores is not None:
            records = to_host(Scored(*pending.scores.on_host.wait()), pending.scores.tops)
            result.logprobs.update(zip(pending.scores.request_ids, records, strict=True))
        for part in pending.prompt_scores:
            _collect_prompt_scores(result, part)
        for request_id in result.errors:
            result.logprobs.pop(request_id, None)
            result.prompt_logprobs.pop(request_id, None)
        result.sample_s += self._clock.now() - start_s
        return result


def _collect_tokens(result: StepResult, sampled: SampledTokens) -> None:
    token_ids, finite = (part.numpy() for part in sampled.on_host.wait())
    result.token_ids[sampled.parts] = token_ids
    for row in np.flatnonzero(~finite).tolist():
        result.errors[sampled.request_ids[row]] = NUMERICAL_ERROR


def _collect_prompt_scores(result: StepResult, part: PromptScores) -> None:
    *scored, finite = part.on_host.wait()
    if not bool(finite):
        result.errors[part.request_id] = NUMERICAL_ERROR
        return
    on_host = Scored(*scored)
    records = to_host(on_host, [part.top] * on_host.token_ids.shape[0])
    result.prompt_logprobs.setdefault(part.request_id, []).extend(records)
