"""Copies of a step's results from the device to the engine."""

from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.clock import Clock
from neaptide.engine.params import NUMERICAL_ERROR
from neaptide.engine.steps.plan import StepResult
from neaptide.executors.torch.sampling.logprobs import Scored, to_host
from neaptide.kernels.host_rows import Transfer
from neaptide.kernels.transfer import HostCopy


@dataclass(slots=True)
class SampledTokens:
    """The new token of every request that sampled."""

    request_ids: list[str]
    parts: IntArray
    """[rows] Their indices in the plan."""
    on_host: HostCopy
    """Tokens [rows] int64, and [rows] bool: whether the logits were finite."""


@dataclass(slots=True)
class TokenScores:
    """Log-probabilities of new tokens, for requests that asked for them."""

    request_ids: list[str]
    tops: list[int]
    on_host: HostCopy
    """The fields of ``Scored``."""


@dataclass(slots=True)
class PromptScores:
    """A part of a request's prompt log-probabilities."""

    request_id: str
    top: int
    on_host: HostCopy
    """The fields of ``Scored``, and one bool: whether the logits were finite."""


@dataclass(slots=True)
class Pending:
    """A step that has been submitted."""

    result: StepResult
    sampled: list[SampledTokens] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    """Copies to host memory."""

    def take(self, piece: "Pending", parts: IntArray) -> None:
        """Adds the results of a piece of the step; ``parts`` are the indices of its parts in the step."""
        result, found = self.result, piece.result
        result.errors |= found.errors
        result.late |= found.late
        result.mask_s = max(result.mask_s, found.mask_s)  # the masks are those of the whole step
        result.prepare_s += found.prepare_s
        result.model_s += found.model_s
        result.sample_s += found.sample_s
        self.sampled += [SampledTokens(each.request_ids, parts[each.parts], each.on_host) for each in piece.sampled]
        self.scores += piece.scores
        self.prompt_scores += piece.prompt_scores


class TorchHandle:
    """A submitted step."""

    def __init__(self, pending: Pending, clock: Clock):
        self._pending = pending
        self._clock = clock
        self._done = False

    def wait(self) -> StepResult:
        """Waits for this step's copies, and for nothing submitted later.

        Raises:
            Exception: a copy to host memory failed, at each call.
        """
        pending, result = self._pending, self._pending.result
        if self._done:
            return result
        start_s = self._clock.now()
        for save in pending.saves:
            save.result()
        self._done = True
        for sampled in pending.sampled:
            _collect_tokens(result, sampled)
        for scores in pending.scores:
            records = to_host(Scored(*scores.on_host.wait()), scores.tops)
            result.logprobs.update(zip(scores.request_ids, records, strict=True))
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
