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
from neaptide_lab.two_tenants.cache import TwoTenantDraft, swap_out_or_preempt
from tests.executors.driver import leading_agreement, make_executor, random_prompt
from tests.executors.engine_run import NUM_OUTPUT, EngineRun

Gqa = tuple[Path, LlamaForCausalLM]
BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 200


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
    cache = CacheConfig(block_size=BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS, slot_copies=True)
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
        assert isinstance(draft.kv, TwoTenantDraft)
        if draft.kv.can_swap_out(victim):
            swap_out_or_preempt(draft, victim)
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
