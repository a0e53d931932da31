"""Warm-up steps before the first request.

vLLM compiles parts of its sampler on first use, in eager mode too. That may take longer than the engine's hang
detection allows, and a first client would wait for it.
"""

from llguidance import LLMatcher

from neaptide.engine.interfaces import Executor
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan

SCORED = SamplingParams(max_tokens=2, temperature=1.0, logprobs=1, prompt_logprobs=1)
"""Unseeded sampling with scores: what is compiled on a CPU."""
CHOSEN = SamplingParams(
    max_tokens=2,
    min_tokens=1,
    temperature=1.0,
    top_p=0.9,
    top_k=2,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    seed=0,
    grammar=LLMatcher.grammar_from_regex(r"(.|\n)*"),
)
"""Every parameter that changes a choice: on a GPU each is a kernel compiled on first use."""
_PROMPT = [0, 0]


def warm_up(executor: Executor, max_requests: int, max_step_tokens: int) -> None:
    """Runs one request alone, then two at once, because code compiled for one row may not fit more.

    Each gets two tokens, because penalties need output.

    Args:
        max_requests: most requests at once that the workers were started for.
        max_step_tokens: most tokens of a step.

    Raises:
        Exception: the executor raised; the same requests from a client would fail.
    """
    for count in range(1, min(2, max_requests, max_step_tokens // len(_PROMPT), executor.num_blocks) + 1):
        for params in (SCORED, CHOSEN):
            _answer(executor, {f"warm-up {count}.{i}": i for i in range(count)}, params)


def _answer(executor: Executor, blocks: dict[str, int], params: SamplingParams) -> None:
    """Generates two tokens per request, in its one block. Requests that the executor rejects get no second token."""
    parts = [ScheduledRequest(name, _PROMPT, 0, [block], True, 0) for name, block in blocks.items()]
    new = [NewRequest(name, _PROMPT, params) for name in blocks]
    first = executor.submit(StepPlan.of_parts(-1, parts, new)).wait()
    tokens = dict(zip(blocks, first.token_ids.tolist(), strict=True))
    parts = [
        ScheduledRequest(name, [tokens[name]], len(_PROMPT), [block], True, 1)
        for name, block in blocks.items()
        if name not in first.errors
    ]
    if parts:
        executor.submit(StepPlan.of_parts(-1, parts)).wait()
    executor.submit(StepPlan.of_parts(-1, [], finished_ids=list(blocks))).wait()
