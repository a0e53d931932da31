"""What runs inside vLLM's workers: in this process, or in one for each rank, which imports it there."""

import signal
from collections.abc import Sequence
from typing import Any


def ignore_stop_signals(worker: Any) -> None:
    """Ctrl-C goes to every process of a terminal; when a worker ends is the engine's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# ---- KV blocks; ``num_blocks`` is how many the whole cache has ----


def zero_blocks(worker: Any, num_blocks: int, block_ids: list[int]) -> None:
    """Overwrites KV blocks with zeros."""
    import torch

    with torch.inference_mode():
        for blocks in _caches_by_block(worker, num_blocks):
            for block in block_ids:
                blocks[block].zero_()


def reserve_host_blocks(worker: Any, num_blocks: int, num_slots: int) -> None:
    """Memory for copies of this worker's part of KV blocks. On a CPU the system gives it as it is written to."""
    import torch

    worker.neaptide_host_blocks = [
        torch.empty((num_slots, *blocks.shape[1:]), dtype=blocks.dtype, pin_memory=blocks.is_cuda)
        for blocks in _caches_by_block(worker, num_blocks)
    ]


def copy_blocks(
    worker: Any, num_blocks: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]
) -> None:
    """KV blocks to host memory, then others from it, and waits for that.

    Args:
        saves: (block, slot of host memory).
        loads: (slot of host memory, block).
    """
    import torch

    with torch.inference_mode():
        for kept, blocks in zip(worker.neaptide_host_blocks, _caches_by_block(worker, num_blocks), strict=True):
            if saves:
                sources, slots = torch.tensor(saves).unbind(1)
                kept.index_copy_(0, slots, blocks.index_select(0, sources.to(blocks.device)).cpu())
            if loads:
                slots, targets = torch.tensor(loads).unbind(1)
                blocks.index_copy_(0, targets.to(blocks.device), kept.index_select(0, slots).to(blocks.device))


def _caches_by_block(worker: Any, num_blocks: int) -> list[Any]:
    """Views of what the layers keep, with the blocks as their first dimension."""
    caches = worker.model_runner.kv_caches
    tensors = [tensor for cache in caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])]
    return [_by_block(tensor, num_blocks) for tensor in tensors]


def _by_block(cache: Any, num_blocks: int) -> Any:
    import torch

    # Keys and values are one dimension before or behind the blocks, as the attention kernel wants it; and it may divide
    # a block further.
    dim = next(d for d, size in enumerate(cache.shape) if size >= num_blocks and size % num_blocks == 0)
    if cache.itemsize == 1:
        cache = cache.view(torch.uint8)  # torch copies no rows of 8-bit floats
    return cache.movedim(dim, 0).unflatten(0, (num_blocks, -1))


def place_generators(worker: Any, draws: list[tuple[str, int | None]]) -> None:
    """Between a step's forward pass and its sampling, for requests with seeds, on the V1 runner.

    Its generators go on from draw to draw, so that a request's tokens depend on how often it was preempted or sampled
    in vain; and for a chunk that samples nothing it winds them back, which no generator of a CPU can do. Here each
    draw is seeded by its own, and a chunk has none.

    Args:
        draws: request ids, each with the seed of its draw; None for those that do not sample in this step.
    """
    runner = worker.model_runner
    batch = runner.input_batch
    for request_id, seed in draws:
        index = batch.req_id_to_index.get(request_id)
        if index is None:
            continue
        if seed is None:
            batch.generators.pop(index, None)
        else:
            generator = runner.requests[request_id].generator
            generator.manual_seed(seed)
            batch.generators[index] = generator
