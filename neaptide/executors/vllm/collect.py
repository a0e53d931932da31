"""Converts the answer of vLLM's model runner into a step result."""

import logging
from collections.abc import Mapping
from itertools import chain, compress
from math import inf
from typing import Any

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.executors.vllm.runner_state import RunnerState

logger = logging.getLogger(__name__)

_NONE: Mapping[str, str] = {}


def collect(
    plan: StepPlan, told: dict[str, RunnerState], output: Any, result: StepResult, failed: Mapping[str, str] = _NONE
) -> None:
    """Writes the runner's output into ``result``. Its errors name parts that the runner did not receive.

    Args:
        told: runner state of the plan's requests; requests that have since ended may be missing.
        output: a ``ModelRunnerOutput``.
        failed: parts that the runner computed, with their errors.
    """
    ids = plan.request_ids
    if result.errors:
        asked = np.array([request_id not in result.errors for request_id in ids], np.bool_)
        result.token_ids[asked], is_whole = _tokens(list(compress(ids, asked.tolist())), output)
    else:
        result.token_ids[:], is_whole = _tokens(ids, output)
    if not is_whole:
        for i in np.flatnonzero((result.token_ids < 0) & plan.sample).tolist():
            logger.error("request %s has no token: vLLM's runner did not sample for it", ids[i])
            result.errors.setdefault(ids[i], INTERNAL_ERROR)
    for request_id, error in failed.items():
        result.errors.setdefault(request_id, error)
    if output.num_nans_in_logits and any(output.num_nans_in_logits.values()):
        for request_id, count in output.num_nans_in_logits.items():
            if count:
                result.errors[request_id] = NUMERICAL_ERROR
    if output.logprobs is not None:
        _collect_logprobs(plan, told, output, result)
    for request_id in result.errors:
        result.logprobs.pop(request_id, None)
        result.prompt_logprobs.pop(request_id, None)


def _tokens(ids: list[str], output: Any) -> tuple[IntArray, bool]:
    """The sampled tokens [ids], -1 where there is none; and whether all are there."""
    sampled: list[list[int]] = output.sampled_token_ids
    is_whole = True
    try:
        tokens: IntArray = np.fromiter(chain.from_iterable(sampled), np.int64, len(sampled))
    except ValueError:  # too few tokens
        tokens, is_whole = np.array([tokens[0] if tokens else -1 for tokens in sampled], np.int64), False
    if ids != output.req_ids:
        places = output.req_id_to_index
        tokens = tokens[np.fromiter(map(places.__getitem__, ids), np.int64, len(ids))]
    return tokens, is_whole


def _collect_logprobs(plan: StepPlan, told: dict[str, RunnerState], output: Any, result: StepResult) -> None:
    """Records the log-probabilities. Rows are [sampled token, most likely tokens], as wide as the largest request
    needs."""
    all_ids, all_values = output.logprobs.logprob_token_ids, output.logprobs.logprobs
    for i in np.flatnonzero(plan.sample).tolist():
        request_id = plan.request_ids[i]
        known = told.get(request_id)
        if known is None or request_id in result.errors or (top := known.new.params.logprobs) is None:
            continue
        row = output.req_id_to_index[request_id]
        result.logprobs[request_id] = record(all_ids[row].tolist(), all_values[row].tolist(), top)


def record(ids: list[int], values: list[float], top: int) -> TokenLogprobs:
    # The runner scores after the grammar mask, so forbidden tokens are -inf.
    tops = [(token, value) for token, value in zip(ids[1 : top + 1], values[1 : top + 1], strict=True) if value > -inf]
    return TokenLogprobs(ids[0], values[0], [token for token, _ in tops], [value for _, value in tops])
