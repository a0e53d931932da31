"""What the engine's own cache finds of a pool in a planned order, one request after another.

Cache, pool and plan are those that serve; only the scheduler is left out. The numbers are therefore comparable to those
of the model in ``simulation.pools.prefix_cache``, which has the same frame.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.messages import AddBatch, PlanReady
from neaptide.engine.offline.planned import PlannedOrder, raw
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.engine.request import RequestStatus
from neaptide.engine.table import RequestTable
from neaptide.executors.simulated.trace_executor import PROMPT_VOCABULARY
from neaptide.loadgen.workloads.traces import TraceRequest, token_ids

BATCH_ID = "pool"


def found_tokens(
    requests: Sequence[TraceRequest], order: IntArray, capacities_tokens: Sequence[int], block_size: int
) -> list[int | None]:
    """Tokens of all prompts that a cache of each capacity finds; None if a prompt is larger than the cache."""
    with TemporaryDirectory(prefix="neaptide-cache-") as directory:
        stem = str(Path(directory, BATCH_ID))
        with TokenFileWriter(stem) as writer:
            for request in requests:
                writer.append(token_ids(request.segments, PROMPT_VOCABULARY))
        write_prefixes(stem)
        count = len(requests)
        message = AddBatch(
            BATCH_ID, stem, list(range(count)), [SamplingParams(max_tokens=1)], [0] * count, [], math.inf
        )
        longest = max((request.input_tokens for request in requests), default=0)
        return [
            _found(message, order, size // block_size, block_size) if size >= longest else None
            for size in capacities_tokens
        ]


def _found(message: AddBatch, order: IntArray, num_blocks: int, block_size: int) -> int:
    max_tokens = num_blocks * block_size + 1
    kv = KVCacheManager(num_blocks, RequestTable(1, max_tokens, block_size), evicts_by_reuse=True)
    pool = OfflinePool(by_prefix=True)
    pool.add_batch(message, 0.0, max_tokens)
    pool.follow(PlannedOrder.of(PlanReady([BATCH_ID], raw(np.zeros(len(order))), raw(order))))
    found = 0
    for number in range(len(order)):
        kv.look_up_uses(pool.take_moved_nodes())
        request = pool.pop()
        hit = kv.draft().match_prefix(request)
        found += hit.num_tokens
        request.assign_slot(kv.table, number + 1)
        kv.admit(request, hit)
        left = request.num_prompt_tokens - hit.num_tokens
        kv.grow(request, left)
        kv.publish(request, request.num_prompt_tokens)
        kv.want_no_more(request.prefix_nodes)
        kv.release(request)
        request.free_slot(RequestStatus.FINISHED)
        pool.ended(request)
    return found
