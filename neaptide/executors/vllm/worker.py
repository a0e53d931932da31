"""What runs inside vLLM's workers: in this process, or in one for each rank, which imports it there."""

import signal
from typing import Any


def ignore_stop_signals(worker: Any) -> None:
    """Ctrl-C goes to every process of a terminal; when a worker ends is the engine's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def zero_blocks(worker: Any, num_blocks: int, block_ids: list[int]) -> None:
    """Overwrites KV blocks with zeros.

    Args:
        num_blocks: of the whole cache; a tensor may divide a block further.
    """
    import torch

    with torch.inference_mode():
        for cache in _tensors(worker.model_runner.kv_caches):
            # Keys and values are one dimension before or behind the blocks, as the attention kernel wants it.
            dim = next(d for d, size in enumerate(cache.shape) if size >= num_blocks and size % num_blocks == 0)
            parts = cache.shape[dim] // num_blocks
            for block in block_ids:
                cache.narrow(dim, block * parts, parts).zero_()


def _tensors(caches: Any) -> list[Any]:
    """One tensor a layer, or several."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])]


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
