"""Online capacity of an engine, for a router and an autoscaler."""

from dataclasses import dataclass

import numpy as np

from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.budget import Reads
from neaptide.engine.scheduler.packing import LOOK_AHEAD
from neaptide.engine.steps.plan import BatchShape

TYPICAL_PROMPT_TOKENS = 1024
MAX_STRETCH = 10.0
"""Most times that decodes beside a prompt stretch its prefill time."""
FULL_SHARE = 0.95
"""Share of the KV blocks held by online work above which the engine counts as full."""


@dataclass(slots=True, frozen=True)
class OnlineRoom:
    free_slack_s: float
    """TTFT target that is left after all waiting prompts are computed while the streams run, in seconds. At most 0
    without a free slot or memory for another request."""
    prompt_token_s: float
    """Seconds of it that one more prompt token takes."""
    alone_token_s: float
    """Seconds that a prompt token takes without streams."""
    streams_share: float
    """Share of the variable step time within the TPOT target that the decodes of running streams take."""


def online_room(scheduler: Scheduler) -> OnlineRoom:
    """Capacity for online work. Offline work does not count, as it is preempted."""
    queues, kv, config, model = scheduler.queues, scheduler.kv, scheduler.config, scheduler.cost_model
    slots = np.array([request.slot for request in queues.running_online.values()], np.int64)
    streams = queues.table.with_output(slots)
    least_s = model.predict(decodes_shape(1, Reads(2, 2))).seconds
    alone_s = least_s
    if len(streams.rows):
        shared_tokens = kv.shared_reads_draft().alone(streams.rows)
        alone_s = model.predict(decodes_shape(len(streams.rows), Reads.among(streams.total, shared_tokens))).seconds
    stretch = 1.0 / max(1.0 - alone_s / config.tpot_slo_s, 1.0 / MAX_STRETCH) if len(streams.rows) else 1.0
    shape, draft = BatchShape(), kv.draft()
    num_missing_blocks = 0
    for request in queues.running_online.values():
        if request.num_uncomputed_tokens > 1:
            shape.add(request.num_uncomputed_tokens, request.num_computed_tokens)
    for place, request in enumerate(queues.waiting_online):
        # Later prompts of a long queue have not been hashed yet; hashing them now would stop every stream.
        is_known = place < LOOK_AHEAD or bool(request.block_hashes)
        cached = draft.match_prefix(request).num_tokens if is_known else 0
        shape.add(request.num_known_tokens - cached, cached)
        num_missing_blocks += (request.num_known_tokens - cached) // kv.block_size + 1
    typical = BatchShape()
    typical.add(TYPICAL_PROMPT_TOKENS, 0)
    token_s = (model.predict(typical).seconds - model.predict(BatchShape()).seconds) / TYPICAL_PROMPT_TOKENS
    ahead_s = model.predict(shape).seconds * stretch if shape.prefill_requests else 0.0
    free_s = config.ttft_slo_s - config.delivery_latency_s - ahead_s
    is_full = kv.num_online + num_missing_blocks > FULL_SHARE * kv.num_blocks
    if is_full or len(queues.running_online) + len(queues.waiting_online) >= config.max_num_seqs:
        free_s = min(free_s, 0.0)
    share = (alone_s - least_s) / max(config.tpot_slo_s - least_s, least_s)
    return OnlineRoom(free_s, token_s * stretch, token_s, share)


def decodes_shape(count: int, reads: Reads) -> BatchShape:
    """A step of so many decodes."""
    shape = BatchShape()
    shape.add_decodes(count, *reads)
    return shape
