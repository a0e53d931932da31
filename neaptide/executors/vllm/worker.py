"""Code that runs inside vLLM's workers, in this process or in one process per rank, which imports it."""

import math
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from neaptide.engine.process.parent import STOP_SIGNALS


class WorkerExtension:
    """A base class that vLLM adds to its worker class in each worker process.

    On a CPU with AMX, vLLM's attention uses tiles. Linux ends a process with SIGILL if it uses tiles without requesting
    them. vLLM leaves the request to oneDNN, whose products a small model may never use.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "WorkerExtension":
        import torch

        torch.cpu._init_amx()
        return super().__new__(cls)


def ignore_stop_signals(worker: Any) -> None:
    """Makes a worker ignore stop signals. Ctrl-C reaches every process of a terminal, but the engine ends its
    workers."""
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
    """Allocates host memory for copies of this worker's KV blocks. On a CPU the system provides it on first write.

    A row of it is a block of all layers, as bytes.
    """
    import torch

    from neaptide.kernels.host_rows import HostRows

    caches = _caches_by_block(worker, num_blocks)
    row_bytes = sum(_bytes_per_block(cache) for cache in caches)
    worker.neaptide_host = HostRows(num_slots, (row_bytes,), torch.uint8, caches[0].device)
    worker.neaptide_saves = []


def copy_blocks(
    worker: Any, num_blocks: int, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]
) -> None:
    """Copies KV blocks to host memory, which goes on while later work runs, then others from it, before later work.

    Args:
        saves: (block, slot of host memory).
        loads: (slot of host memory, block).
    """
    import torch

    from neaptide.kernels.transfer import to_device

    worker.neaptide_saves = []
    host, caches = worker.neaptide_host, _caches_by_block(worker, num_blocks)
    device = caches[0].device
    with torch.inference_mode():
        if saves:
            blocks, slots = np.array(saves, np.int64).T
            sources = to_device(torch.from_numpy(blocks), device)
            worker.neaptide_saves = host.save(slots, lambda piece: _gather(caches, sources[piece]))
        if loads:
            slots, blocks = np.array(loads, np.int64).T
            targets = to_device(torch.from_numpy(blocks), device)
            host.load(slots, lambda piece, loaded: _scatter(caches, targets[piece], loaded))


def finish_saves(worker: Any) -> Any:
    """An output that vLLM waits for as for a step's. It comes once the saves of the last ``copy_blocks`` are done, or
    raises their error."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Saved(AsyncModelRunnerOutput):  # type: ignore[misc]
        def __init__(self, saves: list[Any]) -> None:
            self._saves = saves

        def get_output(self) -> Any:
            for save in self._saves:
                save.result()

    return Saved(worker.neaptide_saves)


def _gather(caches: list[Any], blocks: Any) -> Any:
    """Blocks of all caches, [blocks, bytes per block]."""
    import torch

    row_bytes = sum(_bytes_per_block(cache) for cache in caches)
    staged = torch.empty((len(blocks), row_bytes), dtype=torch.uint8, device=blocks.device)
    for cache, part in zip(caches, _parts(caches, staged), strict=True):
        torch.index_select(cache, 0, blocks, out=part)
    return staged


def _scatter(caches: list[Any], blocks: Any, staged: Any) -> None:
    for cache, part in zip(caches, _parts(caches, staged), strict=True):
        cache.index_copy_(0, blocks, part)


def _parts(caches: list[Any], staged: Any) -> Iterator[Any]:
    """Each cache's part of staged blocks, [blocks, ...] in the cache's type."""
    end = 0
    for cache in caches:
        start, end = end, end + _bytes_per_block(cache)
        yield staged[:, start:end].view(cache.dtype).unflatten(1, cache.shape[1:])


def _bytes_per_block(cache: Any) -> int:
    return int(math.prod(cache.shape[1:]) * cache.itemsize)


def _caches_by_block(worker: Any, num_blocks: int) -> list[Any]:
    """Views of the layers' caches with the blocks as first dimension."""
    caches = worker.model_runner.kv_caches
    tensors = [tensor for cache in caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])]
    return [_by_block(tensor, num_blocks) for tensor in tensors]


def _by_block(cache: Any, num_blocks: int) -> Any:
    import torch

    # Depending on the attention kernel, keys and values are a dimension before or after the blocks, and blocks may be
    # split further.
    dim = next(d for d, size in enumerate(cache.shape) if size >= num_blocks and size % num_blocks == 0)
    if cache.itemsize == 1:
        cache = cache.view(torch.uint8)  # torch cannot copy rows of 8-bit floats
    return cache.movedim(dim, 0).unflatten(0, (num_blocks, -1))


# ---- what the runners keep of requests ----


def place_generators(worker: Any, draws: list[tuple[str, int | None]]) -> None:
    """Seeds the generators of requests with seeds on the V1 runner, between a step's forward pass and its sampling.

    V1's generators advance with every draw, so tokens would depend on preemptions and wasted samples. For a chunk that
    samples nothing V1 rewinds them, which CPU generators cannot do. Here each draw has its own seed, and a chunk has no
    generator.

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
    """Makes the runner score prompt chunks again, between a step's forward pass and its sampling.

    V1 does not score a prompt again after its last chunk, and V2 appends new scores to its old ones. Both assume that
    steps run once.

    Args:
        wanted: request ids, each with the number of most likely tokens.
    """
    runner = worker.model_runner
    in_progress = _kept_by_v2(runner)
    for request_id, top in wanted:
        if in_progress is not None:
            in_progress.get(request_id, []).clear()
        elif request_id in runner.requests:
            runner.num_prompt_logprobs[request_id] = top


def take_scores(worker: Any, chunks: Sequence[tuple[str, int, int]]) -> dict[str, tuple[Any, Any]]:
    """Takes the scores of unfinished prompts after a step's sampling. The runners keep them until the last chunk.

    Args:
        chunks: request ids, each with its chunk's first position and the position after its last.

    Returns:
        Token ids and log-probabilities, both [positions, 1 + most likely ones], where there are any. Only the first
            rank returns them, because it answers for all ranks.
    """
    runner = worker.model_runner
    if worker.rank:
        return {}
    in_progress, scores = _kept_by_v2(runner), {}
    if in_progress is None:
        runner._sync_device()  # V1 copies them asynchronously
    for request_id, start, end in chunks:
        if in_progress is not None:
            kept = [(part.logprob_token_ids, part.logprobs) for part in in_progress.get(request_id, ())]
        else:
            whole = getattr(runner.requests.get(request_id), "in_progress_prompt_logprobs_cpu", None)
            kept = [] if whole is None else [(whole.logprob_token_ids[start:end], whole.logprobs[start:end])]
        if len(kept) == 1:
            # Copies, because V1 keeps writing to the same memory.
            scores[request_id] = (kept[0][0].cpu().numpy().copy(), kept[0][1].cpu().numpy().copy())
    return scores


def _kept_by_v2(runner: Any) -> Any:
    """V2's scores by request; None on V1."""
    kept = getattr(runner, "prompt_logprobs_worker", None)
    return None if kept is None else kept.in_progress_prompt_logprobs
