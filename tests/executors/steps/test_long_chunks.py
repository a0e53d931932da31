"""An executor whose long chunks are computed by torch, beside steps that are one recorded call."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from neaptide.kernels import choice
from neaptide.kernels.paged_attention.long_chunks import ChunkShape, TorchChunks
from neaptide.kernels.paged_attention.native import NativePlan
from tests.executors.driver import EVERY_LOGPROB, Driver, assert_logprobs, make_executor, random_prompt
from tests.kernels.test_native_attention import needs_compiler


@needs_compiler
def test_long_chunks_by_torch_match_transformers(
    gqa: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = gqa
    monkeypatch.setattr(choice, "measured_choice", lambda *_: TorchChunks({ChunkShape(16, 0): True}))
    executor = make_executor(directory)
    by_torch: list[int] = []
    plan_attention = executor._runner.plan_attention

    def planned(*arguments: object) -> object:
        plan = plan_attention(*arguments)  # type: ignore[arg-type]
        assert isinstance(plan, NativePlan)
        by_torch.append(len(plan.chunks))
        assert executor._runner.recorded is None or not (plan.chunks and executor._runner.recorded.takes(plan))
        return plan

    monkeypatch.setattr(executor._runner, "plan_attention", planned)
    driver = Driver(executor)
    for index, length in enumerate((70, 5, 40)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(6, chunk=20)
    assert_logprobs(model, driver)
    assert sum(by_torch) >= 4
    assert 0 in by_torch
