"""Prompt log-probabilities, fetched with every chunk so that a step can be retried.

vLLM's runners would collect them and return them once, with the last chunk.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.executors.vllm.collect import record
from neaptide.executors.vllm.runner_state import RunnerState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ScoredChunk:
    """The part of a prompt that a step scores: at each position, the next token."""

    request_id: str
    start: int
    """First position."""
    token_ids: list[int]
    """The tokens after the chunk's positions; empty if the step computes only the prompt's last token."""
    top: int
    """Number of most likely tokens to return."""
    is_last: bool
    """Whether the prompt ends in this step."""

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.token_ids)


def chunks_to_score(plan: StepPlan, told: Mapping[str, RunnerState], scored: set[str]) -> list[ScoredChunk]:
    """The plan's chunks of ``scored`` requests whose prompts are not complete.

    A request with output that recomputes its prompt after a preemption already has its scores.
    """
    chunks: list[ScoredChunk] = []
    if not scored:
        return chunks
    starts, ends, num_output = plan.num_computed.tolist(), plan.ends.tolist(), plan.output_position.tolist()
    for request_id, start, end, num_said in zip(plan.request_ids, starts, ends, num_output, strict=True):
        if request_id not in scored or num_said:
            continue
        new = told[request_id].new
        prompt, top = new.prompt_token_ids, new.params.prompt_logprobs
        if start < len(prompt) and top is not None:
            chunks.append(ScoredChunk(request_id, start, prompt[start + 1 : end + 1], top, end >= len(prompt)))
    return chunks


def collect_scores(chunks: Sequence[ScoredChunk], taken: Mapping[str, Any], output: Any, result: StepResult) -> None:
    """Writes the scores into ``result``. A request fails if the runner scored other tokens.

    Args:
        taken: token ids and log-probabilities of chunks that are not their prompts' last.
        output: a ``ModelRunnerOutput`` with the scores of last chunks, possibly after those of the whole prompt.
    """
    for chunk in chunks:
        request_id, count = chunk.request_id, len(chunk.token_ids)
        if request_id in result.errors or not count:
            continue
        found = _of_last(output.prompt_logprobs_dict.get(request_id)) if chunk.is_last else taken.get(request_id)
        ids, values = (np.empty((0, 1)), np.empty((0, 1))) if found is None else (part[-count:] for part in found)
        if ids[:, 0].tolist() != chunk.token_ids:
            logger.error("request %s: vLLM's runner scored other tokens than %d of its prompt", request_id, count)
            result.errors[request_id] = INTERNAL_ERROR
        elif np.isnan(values).any():
            result.errors[request_id] = NUMERICAL_ERROR
        else:
            rows = zip(ids.tolist(), values.tolist(), strict=True)
            result.prompt_logprobs[request_id] = [record(row, column, chunk.top) for row, column in rows]


def _of_last(scores: Any) -> tuple[Any, Any] | None:
    return None if scores is None else (scores.logprob_token_ids.numpy(), scores.logprobs.numpy())
