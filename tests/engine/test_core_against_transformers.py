"""The whole engine (scheduler, cache, executor) against ``transformers``: whatever happens to a request on the way,
its greedy text is the one it gets alone, in the sense of the gap rule; prompt log-probabilities are within tolerance.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.messages import AddRequest
from neaptide.engine.params import SamplingParams, Tier
from neaptide.kernels import host_rows
from tests.executors.driver import GAP, VOCAB, make_executor, write_checkpoint
from tests.executors.engine_run import NUM_OUTPUT, EngineRun

BLOCK_SIZE = 4
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gqa-untied": {"num_key_value_heads": 2},
    "mha-tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, LlamaForCausalLM]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(directory, **CHECKPOINTS[request.param])


class Run(EngineRun):
    """On the torch executor."""

    def __init__(
        self,
        directory: Path,
        num_blocks: int = 256,
        dtype: str = "float32",
        may_fail: bool = False,
        num_host_blocks: int = 0,
        **scheduler: Any,
    ) -> None:
        executor = make_executor(
            directory, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, num_host_blocks=num_host_blocks
        )
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE, num_host_blocks=num_host_blocks),
            scheduler=SchedulerConfig(max_model_len=128, offline_max_kv_ratio=1.0, **scheduler),
        )
        super().__init__(config, executor, may_fail)


def assert_greedy(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Equal to the reference up to the first position where its two best logits are within the gap."""
    assert len(tokens) == NUM_OUTPUT
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    for i, token in enumerate(tokens):
        best = logits[len(prompt) + i - 1].topk(2)
        if best.values[0] - best.values[1] < GAP:
            assert i > 0, "the test's prompt is too close to call from the start"
            return
        assert token == int(best.indices[0]), f"token {i}"


def prompts(count: int, seed: int, low: int = 5, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def test_alone(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    for prompt in prompts(3, seed=1):
        run = Run(directory)
        run.add("a", prompt)
        run.finish()
        assert_greedy(model, prompt, run.tokens["a"])


def test_batched(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    run = Run(directory)
    asked = prompts(12, seed=2)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, run.tokens[str(i)])


@pytest.mark.parametrize("max_tokens_per_step", [1, 3, 7, 16])
def test_chunked(checkpoint: tuple[Path, LlamaForCausalLM], max_tokens_per_step: int) -> None:
    directory, model = checkpoint
    run = Run(directory, max_num_batched_tokens=max_tokens_per_step)
    asked = prompts(2, seed=3)
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, run.tokens[str(i)])


def test_with_prefix_hits(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    run = Run(directory)
    prefix = prompts(1, seed=4, low=30, high=31)[0]
    asked = [prefix + tail for tail in prompts(4, seed=5, low=1, high=9)]
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
        run.step()  # its prompt is in the cache before the next arrives
    run.finish()
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, run.tokens[str(i)])
        assert run.ends[str(i)].num_cached_tokens == (28 if i else 0)


def test_with_prefix_hits_in_the_step_that_computes_the_prefix(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    run = Run(directory, policy="fcfs")
    prefix = prompts(1, seed=4, low=30, high=31)[0]
    # The last has one token to compute, as a decode has.
    asked = [prefix + tail for tail in prompts(4, seed=5, low=1, high=9)] + [prefix[:29]]
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.step()
    assert all(len(tokens) == 1 for tokens in run.tokens.values())
    run.finish()
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, run.tokens[str(i)])
        assert run.ends[str(i)].num_cached_tokens == (28 if i else 0)


def test_after_preemption_and_beside_other_work(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    run = Run(directory, num_blocks=24, max_num_batched_tokens=40)
    offline = prompts(6, seed=6, low=10, high=25)
    online = prompts(6, seed=7, low=10, high=25)
    for i, prompt in enumerate(offline):
        run.add(f"f{i}", prompt, Tier.FLEX)
    for i, prompt in enumerate(online):
        for _ in range(3):
            run.step()
        run.add(f"a{i}", prompt)
    run.finish()
    assert any(end.num_preemptions for end in run.ends.values())
    for i, prompt in enumerate(offline):
        assert_greedy(model, prompt, run.tokens[f"f{i}"])
    for i, prompt in enumerate(online):
        assert_greedy(model, prompt, run.tokens[f"a{i}"])


@pytest.mark.acceptance("A7", "ten times the KV cache admitted, a preemption forced at every second step", count=40)
@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_over_admission_with_forced_preemption_fails_nobody(
    checkpoint: tuple[Path, LlamaForCausalLM], num_host_blocks: int
) -> None:
    directory, model = checkpoint
    run = Run(directory, num_blocks=32, max_num_batched_tokens=64, num_host_blocks=num_host_blocks)
    asked = prompts(40, seed=9, low=15, high=26)
    for i, prompt in enumerate(asked):
        run.add(f"r{i}", prompt, Tier.DEFAULT if i % 4 == 0 else Tier.FLEX)
    assert sum(len(prompt) + 12 for prompt in asked) >= 9 * 32 * BLOCK_SIZE
    queues = run.core.scheduler.queues
    steps = 0
    while run.core.has_work:
        run.step()
        steps += 1
        if steps % 2 == 0 and len(queues.running_offline) > 1:
            run.preempt(next(iter(queues.running_offline.values())))
            run.core.check_integrity()
    assert sum(end.num_preemptions for end in run.ends.values()) > 40
    assert (run.loaded_blocks > 100) == (num_host_blocks > 0)
    for i, prompt in enumerate(asked):
        assert run.ends[f"r{i}"].error is None
        assert_greedy(model, prompt, run.tokens[f"r{i}"])


def test_failed_copies_to_host_memory_change_no_text(
    checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = checkpoint
    write, copies = host_rows._Thread._write, itertools.count()

    def every_third_fails(*args: Any) -> None:
        if next(copies) % 3 == 0:
            raise RuntimeError("broken")
        write(*args)

    monkeypatch.setattr(host_rows._Thread, "_write", every_third_fails)
    run = Run(directory, num_blocks=16, num_host_blocks=64)
    asked = prompts(12, seed=9, low=15, high=26)
    for i, prompt in enumerate(asked):
        run.add(f"r{i}", prompt, Tier.FLEX)
    queues = run.core.scheduler.queues
    while run.core.has_work:
        run.step()
        if len(queues.running_offline) > 1:
            run.preempt(next(iter(queues.running_offline.values())))
    assert next(copies) > 10
    assert run.loaded_blocks > 10
    for i, prompt in enumerate(asked):
        assert_greedy(model, prompt, run.tokens[f"r{i}"])


@pytest.mark.acceptance("A7", "a request that can never fit")
def test_request_that_can_never_fit_is_refused_at_once(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    run = Run(checkpoint[0], num_blocks=8)
    prompt = prompts(1, seed=10, low=30, high=31)[0]
    run.core.handle(AddRequest("big", prompt, SamplingParams(max_tokens=3), Tier.DEFAULT, 0.0, 1.0, 1.0))
    (output,) = run.core.step().outputs
    assert output.error is not None


@pytest.mark.parametrize("max_tokens_per_step", [5, 64])
def test_prompt_logprobs(checkpoint: tuple[Path, LlamaForCausalLM], max_tokens_per_step: int) -> None:
    directory, model = checkpoint
    run = Run(directory, max_num_batched_tokens=max_tokens_per_step)
    prompt, other = prompts(2, seed=8)
    run.add("other", other, Tier.FLEX)
    run.add("warm", prompt)
    run.finish()  # its blocks are cached now; scoring must not use them
    run.add("a", prompt, max_tokens=0, prompt_logprobs=2)
    run.finish()
    scores = run.ends["a"].prompt_logprobs
    assert scores is not None
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    assert [s.token_id for s in scores] == prompt[1:]
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[position, score.token_id]), abs=1e-4)
        assert score.top_logprobs == pytest.approx(expected[position].topk(2).values.tolist(), abs=1e-4)


def test_seeded_sampling_does_not_depend_on_the_batch(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, _ = checkpoint
    prompt = prompts(1, seed=9)[0]
    alone = Run(directory)
    alone.add("a", prompt, temperature=1.0, seed=5)
    alone.finish()
    crowded = Run(directory, max_num_batched_tokens=16)
    for i, other in enumerate(prompts(5, seed=10)):
        crowded.add(f"o{i}", other, temperature=1.0)
    crowded.add("a", prompt, temperature=1.0, seed=5)
    crowded.finish()
    assert crowded.tokens["a"] == alone.tokens["a"]
