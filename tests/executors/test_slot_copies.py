"""Copies of single slots on the torch executor: which bytes go where, and in which order."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.engine.steps.plan import StepPlan
from neaptide.kernels import host_rows
from tests.executors.driver import make_executor

Gqa = tuple[Path, LlamaForCausalLM]


def copying(*, saves: list[SlotRun] | None = None, moves: list[SlotRun] | None = None) -> StepPlan:
    step = StepPlan.of_parts(1, [])
    step.slot_copies = SlotCopies(saves or [], moves or [])
    return step


def restoring(runs: list[SlotRun]) -> StepPlan:
    step = StepPlan.of_parts(2, [])
    step.slot_copies = SlotCopies(restores=runs)
    return step


def test_slots_come_back_byte_for_byte_and_no_others_change(gqa: Gqa) -> None:
    executor = make_executor(gqa[0], num_blocks=6, num_host_blocks=3)
    cache = executor._runner.kv_cache
    with torch.inference_mode():
        for layer in cache:
            layer.copy_(torch.randn_like(layer))
    before = [layer.clone() for layer in cache]
    executor.submit(copying(saves=[SlotRun(3, 2, 5, 9), SlotRun(1, 0, 0, 16)])).wait()
    with torch.inference_mode():
        for layer in cache:
            layer.zero_()
    executor.submit(restoring([SlotRun(0, 4, 3, 8), SlotRun(2, 5, 5, 7)])).wait()
    for layer, saved in zip(cache, before, strict=True):
        assert torch.equal(layer[4, 3:8], saved[1, 3:8])
        assert torch.equal(layer[5, 5:7], saved[3, 5:7])
        others = torch.ones(layer.shape[:2], dtype=torch.bool)
        others[4, 3:8] = others[5, 5:7] = False
        assert not layer[others].any()


def test_a_step_saves_then_moves_then_restores(gqa: Gqa) -> None:
    executor = make_executor(gqa[0], num_blocks=4, num_host_blocks=2)
    cache = executor._runner.kv_cache
    with torch.inference_mode():
        for layer in cache:
            layer[0], layer[1], layer[2] = 1.0, 2.0, 3.0
    executor.submit(copying(saves=[SlotRun(0, 0, 0, 16)])).wait()
    step = copying(saves=[SlotRun(1, 1, 0, 4)], moves=[SlotRun(2, 1, 0, 4), SlotRun(1, 3, 0, 4)])
    assert step.slot_copies is not None
    step.slot_copies.restores = [SlotRun(0, 2, 0, 4), SlotRun(1, 0, 0, 4)]
    executor.submit(step).wait()
    for layer in cache:
        assert [layer[block, 0, 0, 0].item() for block in range(4)] == [2.0, 3.0, 1.0, 2.0]
        assert [layer[block, 4, 0, 0].item() for block in range(4)] == [1.0, 2.0, 3.0, 0.0]


def test_a_step_raises_at_each_wait_if_a_copy_to_host_memory_failed(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(gqa[0], num_blocks=4, num_host_blocks=2)
    monkeypatch.setattr(host_rows._Thread, "_write", lambda *args: 1 / 0)
    whole = StepPlan.of_parts(1, [])
    whole.saves = [(0, 0)]
    handles = [executor.submit(whole), executor.submit(copying(saves=[SlotRun(0, 1, 0, 4)]))]
    monkeypatch.undo()
    other = executor.submit(copying(saves=[SlotRun(0, 0, 0, 4)]))
    for handle in handles * 2:
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    other.wait()
