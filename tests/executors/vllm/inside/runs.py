"""Runs requests through an engine on the vllm executor, and compares their text with the reference."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.interfaces import Executor, StepHandle
from neaptide.engine.steps.plan import StepPlan
from tests.executors.engine_run import NUM_OUTPUT, EngineRun
from tests.executors.vllm.inside.families import VOCAB

if TYPE_CHECKING:  # ``conftest`` has something to do before vLLM is imported
    from neaptide.executors.vllm.vllm_executor import VllmExecutor

WEIGHTS = os.environ.get("NEAPTIDE_TEST_WEIGHTS")
"""What kind of quantised weights, if they are; vLLM's CPU build has kernels for those in bfloat16 alone."""
DTYPE = "bfloat16" if WEIGHTS else "float32"
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 32, 48, 192
BLOCK_BYTES = (48 if os.environ.get("NEAPTIDE_TEST_FAMILY") == "gemma4" else 32) * (512 if WEIGHTS else 1024)
"""Two layers, 64 numbers of a key and of a value; gemma4's second layer has twice as many."""
NUM_HOST_BLOCKS = 64
LIMITS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 512}
GAP = 0.1 if WEIGHTS else 1e-3
LEAST_COMPARED = 10
"""Tokens of an answer, of 12, by default: prompts are such that no family is in doubt before that."""


class Narrow:
    """The executor with fewer blocks, so that requests push each other out; ``before`` is called with every plan."""

    def __init__(
        self, executor: Executor, num_blocks: int, before: Callable[[StepPlan], None] = lambda plan: None
    ) -> None:
        self._executor = executor
        self.num_blocks = num_blocks
        self.before = before

    def submit(self, plan: StepPlan) -> StepHandle:
        self.before(plan)
        return self._executor.submit(plan)

    def close(self) -> None:
        """It is shared, and lives on."""


class Run(EngineRun):
    """On the vllm executor."""

    def __init__(
        self, executor: Executor, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0, **scheduler: Any
    ) -> None:
        told = cast("VllmExecutor", executor).translator.told
        # Engines before it on this executor have gone without a last word.
        executor.submit(StepPlan.of_parts(0, [], finished_ids=list(told))).wait()
        self.device = Narrow(executor, num_blocks)
        values = LIMITS | {"offline_max_kv_ratio": 1.0} | scheduler
        cache = CacheConfig(block_size=BLOCK_SIZE, num_host_blocks=num_host_blocks)
        config = EngineConfig(cache=cache, scheduler=SchedulerConfig(**values))
        super().__init__(config, self.device, may_fail=True)


def prompts(count: int, seed: int, low: int = 5, high: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def assert_all_greedy(
    model: PreTrainedModel, asked: Mapping[str, Sequence[int]], run: Run, least_share: float = 0.85
) -> None:
    """Every answer is greedy, and at least this share of all their tokens was compared."""
    compared = sum(assert_greedy(model, prompt, run.tokens[name], 0) for name, prompt in asked.items())
    assert compared >= least_share * NUM_OUTPUT * len(asked)


@torch.no_grad()
def assert_greedy(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], least: int = LEAST_COMPARED
) -> int:
    """Equal to ``transformers`` up to the first position where its two best logits are within the gap.

    Returns how many tokens were compared; fewer than ``least`` fail.
    """
    assert len(tokens) == NUM_OUTPUT
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    for i, token in enumerate(tokens):
        best = logits[len(prompt) + i - 1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            assert i >= least, f"too close to call after {i} tokens: the test wants another prompt"
            return i
        assert token == int(best.indices[0]), f"token {i}"
    return len(tokens)
