"""Steps before the first request. vLLM compiles parts of its sampler when they are first used, in eager mode too; that
can take longer than an engine may say nothing before it is taken to hang, and a first client would wait for it."""

from neaptide.engine.interfaces import Executor
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan

_SCORED = SamplingParams(max_tokens=1, temperature=1.0, logprobs=1, prompt_logprobs=1)
"""Drawn without a seed, and scored: what is compiled on a CPU."""
_PROMPT = [0, 0]


def warm_up(executor: Executor, max_requests: int, max_step_tokens: int) -> None:
    """One request alone, then two at once: what is compiled for one row is not always fit for more.

    Args:
        max_requests: at once, which the workers were started for ...
        max_step_tokens: ... and tokens of a step.

    Raises:
        Exception: whatever the executor raises; the same requests of a client would fail.
    """
    for count in range(1, min(2, max_requests, max_step_tokens // len(_PROMPT), executor.num_blocks) + 1):
        ids = [f"warm-up {count}.{i}" for i in range(count)]
        parts = [ScheduledRequest(name, _PROMPT, 0, [i], True, 0) for i, name in enumerate(ids)]
        new = [NewRequest(name, _PROMPT, _SCORED) for name in ids]
        executor.submit(StepPlan.of_parts(-1, parts, new)).wait()
        executor.submit(StepPlan.of_parts(-1, [], finished_ids=ids)).wait()
