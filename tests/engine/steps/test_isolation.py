"""One request of eight raises, at every hook of a step: it fails, and the others' text stays what it is."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.kv.draft import KVDraft
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, FinishReason, Tier
from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.torch import torch_executor
from neaptide.executors.torch.input_batch import InputBatch
from neaptide.executors.torch.model_runner import ModelRunner
from tests.engine.harness import online
from tests.engine.policies import PUBLISHES_LATE
from tests.engine.test_core_against_transformers import Run, assert_greedy, prompts
from tests.executors.driver import write_checkpoint

POISON = "poison"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    directory = tmp_path_factory.mktemp("model")
    return directory, write_checkpoint(directory)


class Poison:
    """Raises at a hook whenever the poisoned request takes part, from its ``after``-th output token on."""

    def __init__(self, prompt: list[int], after: int) -> None:
        self._prompt = prompt
        self._least_tokens = len(prompt) + after
        self.times = 0

    def plan(self, kv: KVDraft, request: Any, *rest: Any) -> None:
        self._raise(request.request_id == POISON and request.num_tokens >= self._least_tokens)

    def prepare(self, plan: StepPlan, *rest: Any) -> None:
        ends = dict(zip(plan.request_ids, (plan.num_computed + plan.num_tokens).tolist(), strict=True))
        self._raise(ends.get(POISON, 0) >= self._least_tokens)

    def model(self, runner: ModelRunner, batch: InputBatch, giving_up: object = None) -> None:
        last_positions = dict(zip(batch.request_ids, batch.positions[batch.last_rows].tolist(), strict=True))
        self._raise(last_positions.get(POISON, -1) + 1 >= self._least_tokens)

    def sampler(self, logits: Any, states: Iterable[Any], positions: Iterable[int], *rest: Any) -> None:
        due = self._least_tokens - len(self._prompt)
        found = [p for s, p in zip(states, positions, strict=True) if s.prompt_token_ids == self._prompt and p >= due]
        self._raise(bool(found))

    def commit(self, kv: KVCacheManager, request: Any, *rest: Any) -> None:
        self._raise(request.request_id == POISON and request.num_tokens >= self._least_tokens)

    end = commit

    def _raise(self, due: bool) -> None:
        if due:
            self.times += 1
            raise RuntimeError("poisoned")


HOOKS: dict[str, tuple[Any, str]] = {
    "plan": (KVDraft, "blocks_needed"),
    "prepare": (torch_executor, "build_input_batch"),
    "model": (ModelRunner, "hidden_states"),
    "sampler": (torch_executor, "sample"),
    "commit": (KVCacheManager, "publish"),
    "end": (KVCacheManager, "publish_committed"),
}


def guarded(check: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return original(*args, **kwargs)

    return call


@pytest.mark.acceptance("A4", "one request of eight raises, in its first step and in its fourth")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
@pytest.mark.parametrize("hook", HOOKS)
def test_only_the_poisoned_request_fails(
    checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch, hook: str, tier: Tier, after: int
) -> None:
    directory, model = checkpoint
    poison, *others = prompts(8, seed=11)
    if hook == "commit" and after:
        pytest.skip("commit publishes prompts, and they are done")
    check = Poison(poison, after)
    owner, name = HOOKS[hook]
    # Decodes are planned all at once, and one by one only where blocks are short: for online ones, when offline
    # requests cannot make way any more.
    num_blocks = 256 if hook != "plan" else 32 if tier is Tier.DEFAULT else 48
    # Our policy publishes blocks of prompts when they are planned.
    policy = PUBLISHES_LATE if hook == "commit" else "neaptide"
    run = Run(directory, num_blocks=num_blocks, may_fail=True, policy=policy)
    monkeypatch.setattr(owner, name, guarded(getattr(check, hook), getattr(owner, name)))
    for i, prompt in enumerate(others):
        run.add(f"r{i}", prompt, Tier.DEFAULT if i % 2 else Tier.FLEX)
        if i == 3:
            run.add(POISON, poison, tier)
    run.finish()
    assert check.times > 0
    assert (run.ends[POISON].finish_reason, run.ends[POISON].error) == (FinishReason.ERROR, INTERNAL_ERROR)
    assert run.core.kv.available == run.core.kv.num_blocks
    for i, prompt in enumerate(others):
        assert run.ends[f"r{i}"].error is None
        assert_greedy(model, prompt, run.tokens[f"r{i}"])


@pytest.mark.parametrize("policy", ["fcfs", "neaptide"])
@pytest.mark.parametrize("hook", ["prepare", "model", "sampler"])
def test_readers_of_the_poisoned_requests_blocks_in_one_step_get_their_own_text(
    checkpoint: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch, hook: str, policy: str
) -> None:
    directory, model = checkpoint
    prefix, *tails = prompts(7, seed=13, low=17, high=18)
    poison, *others = [prefix + tail[: 1 + i] for i, tail in enumerate(tails)]
    check = Poison(poison, 0)
    owner, name = HOOKS[hook]
    run = Run(directory, may_fail=True, policy=policy)
    monkeypatch.setattr(owner, name, guarded(getattr(check, hook), getattr(owner, name)))
    run.add(POISON, poison)
    for i, prompt in enumerate(others):
        run.add(f"r{i}", prompt)
    run.finish()
    assert run.ends[POISON].error == INTERNAL_ERROR
    for i, prompt in enumerate(others):
        assert run.ends[f"r{i}"].error is None
        assert_greedy(model, prompt, run.tokens[f"r{i}"])


@pytest.mark.acceptance("A6", "a row of eight with NaN logits")
def test_blocks_with_nan_are_not_found_by_others(checkpoint: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = checkpoint
    run = Run(directory, may_fail=True, max_num_batched_tokens=16)
    poison, *others = prompts(8, seed=12, low=40, high=60)
    poison[5] = 0
    run.add(POISON, poison)
    # The prompt takes several steps: its first blocks are in the prefix index before the fault shows.
    for layer in run.core._executor._executor._runner.kv_cache:  # type: ignore[attr-defined]
        assert torch.isfinite(layer).all()
    with torch.inference_mode():
        run.core._executor._executor._runner.model.embedding[0] = float("nan")  # type: ignore[attr-defined]
    for i, prompt in enumerate(others):
        run.add(f"r{i}", prompt)
    run.finish()
    assert run.ends[POISON].error == NUMERICAL_ERROR
    for i, prompt in enumerate(others):
        assert_greedy(model, prompt, run.tokens[f"r{i}"])
    again = online("again", poison)
    run.core.handle(again)
    request = run.core.scheduler.queues.find("again")
    assert request is not None
    assert run.core.kv.draft().match_prefix(request).num_tokens == 0
