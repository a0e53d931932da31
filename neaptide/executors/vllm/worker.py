"""What runs inside vLLM's workers: in this process, or in one for each rank, which imports it there."""

import signal
from collections.abc import Sequence
from typing import Any

from neaptide.engine.process.parent import STOP_SIGNALS


class WorkerExtension:
    """A base class that vLLM adds to its workers' class, in each worker's process.

    On a CPU with AMX, vLLM's attention computes with tiles. Linux gives them to a process that has asked for them, and
    ends another one with SIGILL. vLLM leaves the asking to oneDNN, whose products a small model may never use.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "WorkerExtension":
        import torch

        torch.cpu._init_amx()
        return super().__new__(cls)


def ignore_stop_signals(worker: Any) -> None:
    """Ctrl-C goes to every process of a terminal; when a worker ends is the engine's to say."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# ---- KV blocks; ``num_blocks`` is how many the whole cache has ----


def zero_blocks(worker: Any, num_blocks: int, block_ids: list[int]) -> None:
    """Overwrites KV blocks with zeros."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor(block_ids)
        for blocks in _caches_by_block(worker, num_blocks):
            blocks.index_fill_(0, ids.to(blocks.device, non_blocking=True), 0)


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


# ---- what the runners keep of requests ----


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


def score_prompts(worker: Any, wanted: Sequence[tuple[str, int]]) -> None:
    """Between a step's forward pass and its sampling: chunks of prompts are scored in it, whatever the runner has
    scored of them before.

    By itself V1 scores no prompt again of which it has scored the last chunk, and V2 puts what it scores behind what it
    has, for both rely on steps that are run once.

    Args:
        wanted: request ids, each with how many of the most likely tokens.
    """
    runner = worker.model_runner
    in_progress = _kept_by_v2(runner)
    for request_id, top in wanted:
        if in_progress is not None:
            in_progress.get(request_id, []).clear()
        elif request_id in runner.requests:
            runner.num_prompt_logprobs[request_id] = top


def take_scores(worker: Any, chunks: Sequence[tuple[str, int, int]]) -> dict[str, tuple[Any, Any]]:
    """Behind a step's sampling: what was scored of prompts that go on, which the runners keep for the last chunk.

    Args:
        chunks: request ids, each with the first position of its chunk and the one behind it.

    Returns:
        Token ids and log-probabilities, [positions, 1 + most likely ones] each, where there are any; on the first rank
        alone, for that is the one that answers for all.
    """
    runner = worker.model_runner
    if worker.rank:
        return {}
    in_progress, scores = _kept_by_v2(runner), {}
    if in_progress is None:
        runner._sync_device()  # it copies them aside
    for request_id, start, end in chunks:
        if in_progress is not None:
            kept = [(part.logprob_token_ids, part.logprobs) for part in in_progress.get(request_id, ())]
        else:
            whole = getattr(runner.requests.get(request_id), "in_progress_prompt_logprobs_cpu", None)
            kept = [] if whole is None else [(whole.logprob_token_ids[start:end], whole.logprobs[start:end])]
        if len(kept) == 1:
            # Copies, for V1 goes on to write to the same memory.
            scores[request_id] = (kept[0][0].cpu().numpy().copy(), kept[0][1].cpu().numpy().copy())
    return scores


def _kept_by_v2(runner: Any) -> Any:
    """By request, on the V2 runner; None on the other."""
    kept = getattr(runner, "prompt_logprobs_worker", None)
    return None if kept is None else kept.in_progress_prompt_logprobs
