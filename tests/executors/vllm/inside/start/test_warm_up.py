"""What vLLM compiles when it is first used, it has used before the first request."""

import os
from typing import Any

import pytest
from torch._dynamo.utils import counters

from neaptide.engine.interfaces import StepHandle
from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.vllm.warm_up import warm_up
from tests.executors.vllm.inside.runs import LIMITS, Run, prompts

compiles_here = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET") or os.environ.get("NEAPTIDE_TEST_RANKS")),
    reason="nothing is compiled by the second runner, nor in this process where the workers are others",
)


def num_compiled() -> int:
    """Functions, in this process since it began."""
    return int(counters["frames"]["ok"])


@compiles_here
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"temperature": 0.5, "logprobs": 5},
        {"temperature": 0.5, "top_p": 0.8, "top_k": 5, "min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {5: 2.0}},
    ],
)
def test_no_request_waits_for_a_compiler(started: StartedExecutor, params: dict[str, Any]) -> None:
    """To be run before other tests of the executor, which would compile the same."""
    before = num_compiled()
    assert before > 0
    run = Run(started.executor)
    for i, prompt in enumerate(prompts(5, seed=31)):
        run.add(str(i), prompt, **params)
        run.step()  # one row, then more
    run.finish()
    assert num_compiled() == before


def test_nothing_that_the_warm_up_asks_for_is_refused(
    started: StartedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that fails on its own warms nothing up, and nobody is told."""
    executor, submit, handles = started.executor, started.executor.submit, []

    def submitted(plan: StepPlan) -> StepHandle:
        handles.append(submit(plan))
        return handles[-1]

    monkeypatch.setattr(executor, "submit", submitted)
    warm_up(executor, LIMITS["max_num_seqs"], LIMITS["max_num_batched_tokens"])
    assert [handle.wait().errors for handle in handles] == [{}] * 12
