"""What vLLM compiles when it is first used, it has used before the first request."""

import os
from typing import Any

import pytest
from torch._dynamo.utils import counters

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.runs import Run, prompts

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET") or os.environ.get("NEAPTIDE_TEST_RANKS")),
    reason="nothing is compiled by the second runner, nor in this process where the workers are others",
)


def num_compiled() -> int:
    """Functions, in this process since it began."""
    return int(counters["frames"]["ok"])


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 0.5, "logprobs": 5}]
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
