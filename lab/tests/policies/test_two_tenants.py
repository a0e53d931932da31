"""Blocks with two tenants on the torch executor: bytes, and texts."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.engine.params import Tier
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.steps.timer import StepTimer
from neaptide.executors.torch.step_results import TorchHandle
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide_lab.policies.bros import BrosNotes
from tests.executors.driver import leading_agreement, make_executor, random_prompt
from tests.executors.engine_run import NUM_OUTPUT, EngineRun

Gqa = tuple[Path, LlamaForCausalLM]
BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 200
Slots = list[tuple[int, int]]


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


class CheckedExecutor(TorchExecutor):
    """Checks the bytes of every slot before and after it is copied."""

    def attach(self) -> None:
        self.saved: dict[tuple[int, int], Tensor] = {}
        self.num_saved = self.num_moved = self.num_restored = 0

    def submit(self, plan: StepPlan) -> TorchHandle:
        copies = plan.slot_copies or SlotCopies()
        self.saved |= self._bytes(copies.saves)
        expected = self._bytes(copies.moves)
        for run in copies.restores:
            expected |= {(run.target, slot): self.saved[run.source, slot] for slot in range(run.first, run.end)}
        handle = super().submit(plan)
        for (block, slot), content in expected.items():
            assert torch.equal(self._slot(block, slot), content)
        self.num_saved += copies.num_saved
        self.num_moved += copies.num_moved
        self.num_restored += copies.num_restored
        return handle

    def _bytes(self, runs: list[SlotRun]) -> dict[tuple[int, int], Tensor]:
        return {(run.target, slot): self._slot(run.source, slot) for run in runs for slot in range(run.first, run.end)}

    def _slot(self, block: int, slot: int) -> Tensor:
        return torch.stack([layer[block, slot] for layer in self._runner.kv_cache])


def run_of(directory: Path, *, forces: Callable[[EngineRun], None]) -> tuple[EngineRun, CheckedExecutor]:
    """Runs offline requests with online ones that need most of the cache, repeatedly; ``forces`` is called after every
    second step."""
    plain = make_executor(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS)
    plain.__class__ = CheckedExecutor
    executor: CheckedExecutor = plain  # type: ignore[assignment]
    executor.attach()
    cache = CacheConfig(block_size=BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS, two_tenant_blocks=True)
    scheduler = SchedulerConfig(policy="bros", max_model_len=96)
    run = EngineRun(EngineConfig(cache=cache, scheduler=scheduler), executor)
    for number in range(4):
        run.add(f"be{number}", random_prompt(14 + 3 * number, number), Tier.FLEX, max_tokens=3 * NUM_OUTPUT)
    num_steps = 0
    while run.core.has_work:
        if num_steps % 3 == 0 and num_steps < 60:
            run.add(f"rt{num_steps}", random_prompt(9 + num_steps % 5, 100 + num_steps))
        run.step()
        num_steps += 1
        if num_steps % 2 == 0:
            forces(run)
    return run, executor


def assert_texts(model: LlamaForCausalLM, run: EngineRun) -> None:
    for name, tokens in run.tokens.items():
        is_offline = name.startswith("be")
        number = int(name[2:])
        prompt = random_prompt(14 + 3 * number, number) if is_offline else random_prompt(9 + number % 5, 100 + number)
        assert len(tokens) == (3 if is_offline else 1) * NUM_OUTPUT
        assert leading_agreement(model, prompt, tokens) > 0, name


def swap_out_all(run: EngineRun) -> None:
    """Every offline request that can is swapped out."""
    scheduler = run.core.scheduler
    draft = Draft(scheduler.index, 0.0, scheduler.queues, StepBudget(scheduler.cost_model, scheduler.max_step_tokens))
    draft.notes = BrosNotes({})
    for victim in list(scheduler.queues.running_offline.values()):
        if draft.kv.can_swap_out(victim):
            draft.swap_out(victim)
    assert scheduler.apply(draft, StepTimer(VirtualClock())) is None


def test_sharing_and_restoring_change_no_byte_and_no_text(gqa: Gqa) -> None:
    run, executor = run_of(gqa[0], forces=lambda _: None)
    assert executor.num_saved > 50
    assert executor.num_moved > 5
    assert executor.num_restored > 50
    assert_texts(gqa[1], run)


def test_nor_does_a_forced_swap_after_every_second_step(gqa: Gqa) -> None:
    run, executor = run_of(gqa[0], forces=swap_out_all)
    assert executor.num_restored > 500
    assert_texts(gqa[1], run)
