"""Steps before the first request. vLLM compiles parts of its sampler when they are first used, in eager mode too; that
can take longer than an engine may say nothing before it is taken to hang, and a first client would wait for it."""

from llguidance import LLMatcher

from neaptide.engine.interfaces import Executor
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan

SCORED = SamplingParams(max_tokens=2, temperature=1.0, logprobs=1, prompt_logprobs=1)
"""Drawn without a seed, and scored: what is compiled on a CPU."""
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
"""All that changes a choice: on a GPU each is a kernel that is compiled when it is first used."""
_PROMPT = [0, 0]


def warm_up(executor: Executor, max_requests: int, max_step_tokens: int) -> None:
    """One request alone, then two at once: what is compiled for one row is not always fit for more. Two tokens each,
    for penalties are of what was put out.

    Args:
        max_requests: at once, which the workers were started for ...
        max_step_tokens: ... and tokens of a step.

    Raises:
        Exception: whatever the executor raises; the same requests of a client would fail.
    """
    for count in range(1, min(2, max_requests, max_step_tokens // len(_PROMPT), executor.num_blocks) + 1):
        for params in (SCORED, CHOSEN):
            _answer(executor, {f"warm-up {count}.{i}": i for i in range(count)}, params)


def _answer(executor: Executor, blocks: dict[str, int], params: SamplingParams) -> None:
    """Two tokens for each request, in the one block that it has. Of what the executor refuses there is no second."""
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
