"""What the host prepares for a step."""

import shutil
import tracemalloc

import pytest
import torch

from neaptide.engine.steps.plan import ScheduledRequest, StepPlan
from neaptide.executors.torch.input_batch import build_input_batch
from neaptide.kernels.choice import choose_kernels
from neaptide.kernels.native import COMPILERS
from neaptide.kernels.paged_attention import Shape

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MOST_BYTES = 1_500_000
"""Ten arrays of a number for each block; 64 tables as long as the longest would be 4 MB each."""


@pytest.mark.parametrize("kernels", ["torch", *(["native"] if any(map(shutil.which, COMPILERS)) else [])])
def test_a_long_context_pads_none_of_the_others(kernels: str) -> None:
    """Memory goes by the blocks that requests have, not by their number times the longest one's."""
    parts = []
    for row, context in enumerate([300] * 63 + [131_071]):
        blocks = [row * 20 + place for place in range(context // BLOCK_SIZE + 1)]
        parts.append(ScheduledRequest(f"r{row}", [1], context, blocks, sample=True, output_position=1))
    plan = StepPlan.of_parts(1, parts)
    shape = Shape(9, 3, 64, BLOCK_SIZE)
    planner = choose_kernels(shape, dtype=torch.float32, device=CPU, cpu_kernels=kernels).plan_attention
    tracemalloc.start()
    try:
        batch = build_input_batch(plan, planner, 100, CPU, lambda request_id, position: None)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # ``of_parts`` has blocks of one token in its table: the slots are those of the plan's own blocks all the same.
    assert batch.attention.slots[-1] == parts[-1].block_ids[-1] * BLOCK_SIZE + 131_071 % BLOCK_SIZE
    assert most_bytes < MOST_BYTES
