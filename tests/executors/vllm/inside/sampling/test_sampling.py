"""Sampling parameters on vLLM's samplers: where ours and theirs mean the same, they give the same."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from neaptide.engine.params import Tier
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.registry import EXECUTORS
from tests.executors.vllm.inside.runs import NUM_OUTPUT, Run, prompts

Checkpoint = tuple[Path, PreTrainedModel]


@torch.no_grad()
def reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].double()
    return logits


def run_one(started: StartedExecutor, prompt: list[int], **params: Any) -> Run:
    run = Run(started.executor)
    run.add("a", prompt, **params)
    run.finish()
    return run


def test_logprobs_are_raw_and_as_many_as_asked(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    run = Run(started.executor)
    (prompt,) = prompts(1, seed=1)
    run.add("a", prompt, logprobs=3, temperature=0.7, seed=3)
    run.add("b", prompt, logprobs=0)
    run.add("c", prompt)
    run.finish()
    assert run.logprobs["c"] == []
    for name, top in (("a", 3), ("b", 0)):
        scores = run.logprobs[name]
        expected = torch.log_softmax(reference(checkpoint[1], prompt + run.tokens[name])[len(prompt) - 1 :], -1)
        assert [score.token_id for score in scores] == run.tokens[name]
        for position, score in enumerate(scores):
            assert len(score.top_ids) == top
            assert score.logprob == pytest.approx(float(expected[position, score.token_id]), abs=1e-3)
            assert score.top_logprobs == pytest.approx(expected[position].topk(top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("max_tokens_per_step", [5, 64])
def test_prompt_logprobs(checkpoint: Checkpoint, started: StartedExecutor, max_tokens_per_step: int) -> None:
    run = Run(started.executor, max_num_batched_tokens=max_tokens_per_step)
    prompt, other = prompts(2, seed=8, low=40)
    run.add("other", other, Tier.FLEX)
    run.add("warm", prompt)
    run.finish()  # its blocks are cached now; scoring must not use them
    run.add("a", prompt, max_tokens=0, prompt_logprobs=2)
    run.add("b", prompt, max_tokens=3, prompt_logprobs=0)
    run.finish()
    expected = torch.log_softmax(reference(checkpoint[1], prompt), -1)
    for name, top in (("a", 2), ("b", 0)):
        scores = run.prompt_logprobs[name]
        assert [score.token_id for score in scores] == prompt[1:]
        for position, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(expected[position, score.token_id]), abs=1e-3)
            assert score.top_logprobs == pytest.approx(expected[position].topk(top).values.tolist(), abs=1e-3)


def test_seeded_text_depends_on_nothing_else(started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=9, low=40)
    alone = run_one(started, prompt, temperature=1.0, seed=5)
    crowded = Run(started.executor, num_blocks=12, max_num_batched_tokens=16)
    for i, other in enumerate(prompts(5, seed=10)):
        crowded.add(f"o{i}", other, temperature=1.0, seed=i)
    crowded.add("a", prompt, Tier.FLEX, temperature=1.0, seed=5)
    steps = 0
    while crowded.core.has_work:
        crowded.step()
        steps += 1
        request = crowded.core.scheduler.queues.running_offline.get("a")
        if steps % 5 == 0 and request is not None:
            crowded.preempt(request)
    assert crowded.ends["a"].num_preemptions > 0
    assert crowded.tokens["a"] == alone.tokens["a"]


def test_seeds_differ(started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=9)
    texts = [run_one(started, prompt, temperature=1.0, seed=seed).tokens["a"] for seed in (-1, 0, 1, None)]
    assert len({tuple(text) for text in texts}) == 4


def test_biases_decide(started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=2)
    assert run_one(started, prompt, logit_bias={7: 100.0}).tokens["a"] == [7] * NUM_OUTPUT


def test_penalties_count_what_has_been_said_also_after_a_preemption(
    checkpoint: Checkpoint, started: StartedExecutor
) -> None:
    """A bias holds one token in front until its frequency has cost it the lead."""
    (prompt,) = prompts(1, seed=2)
    params: dict[str, Any] = {"logit_bias": {7: 100.0}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    whole = run_one(started, prompt, **params, max_tokens=60)
    run = Run(started.executor)
    run.add("a", prompt, Tier.FLEX, **params, max_tokens=60)
    for _ in range(20):
        run.step()
    run.preempt(run.core.scheduler.queues.running_offline["a"])
    run.finish()
    assert 30 < run.tokens["a"].count(7) < 60
    assert run.tokens["a"] == whole.tokens["a"]


def test_a_repetition_penalty_counts_the_prompt(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=2)
    logits = reference(checkpoint[1], prompt)[-1]
    seen = torch.tensor(sorted(set(prompt)))
    punished = torch.where(logits[seen] > 0, logits[seen] / 50.0, logits[seen] * 50.0)
    run = run_one(started, prompt, repetition_penalty=50.0, max_tokens=1)
    assert run.tokens["a"] == [int(logits.index_put((seen,), punished).argmax())]


def test_min_tokens_masks_the_ends(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=3)
    params: dict[str, Any] = {"logit_bias": {2: 100.0, 9: 50.0}, "ignore_eos": False}
    assert run_one(started, prompt, **params).tokens["a"] == []
    masked = run_one(started, prompt, **params, min_tokens=4)
    assert masked.tokens["a"] == [9, 9, 9, 9]
    assert masked.ends["a"].stop_token_id == 2
    assert run_one(started, prompt, **params, min_tokens=4, stop_token_ids=(9,)).tokens["a"].count(9) == 0


def test_as_many_ends_are_held_back_as_a_request_may_have(started: StartedExecutor) -> None:
    limit = EXECUTORS["vllm"].max_masked_ends
    assert limit is not None
    stops = tuple(range(6, 6 + limit - 1))
    (prompt,) = prompts(1, seed=3)
    run = run_one(started, prompt, ignore_eos=False, min_tokens=6, stop_token_ids=stops, logit_bias={9: 50.0, 2: 50.0})
    assert run.ends["a"].error is None
    assert len(run.tokens["a"]) == 6
    assert not {2, *stops}.intersection(run.tokens["a"])


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_cuts_leave_the_most_likely(started: StartedExecutor, cut: dict[str, Any]) -> None:
    if os.environ.get("TRITON_INTERPRET") and "min_p" not in cut:
        pytest.skip("Triton's interpreter does not run this kernel of vLLM's")
    (prompt,) = prompts(1, seed=4)
    greedy = run_one(started, prompt).tokens["a"]
    assert run_one(started, prompt, temperature=1.0, seed=1, **cut).tokens["a"] == greedy


def test_a_prompt_that_fills_the_length_is_scored(started: StartedExecutor) -> None:
    (prompt,) = prompts(1, seed=5, low=192, high=193)
    run = run_one(started, prompt, max_tokens=0, prompt_logprobs=0)
    assert len(run.prompt_logprobs["a"]) == 191
