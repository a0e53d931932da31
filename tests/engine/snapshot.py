"""The state of an engine as plain values, to compare what it was with what it is."""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from neaptide.engine.core import EngineCore
from neaptide.engine.kv.prefix_nodes import PrefixNode
from neaptide.engine.offline.lanes import FlexLane, JobLane, Lane
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.sharing.by_shares import ByShares
from neaptide.engine.request import Request
from neaptide.engine.scheduler.actions import Action, Admit, DrawPool, Grow, Preempt, Schedule, ScheduleRows
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.table import RequestTable

SHARED = {"config", "kv", "queues", "cost_model", "headroom"}
"""Attributes of a policy that are looked at by themselves, or belong to others."""
DERIVED = {"block_hashes", "table"}
"""Attributes of a request that looking at it may fill, and its way to its row."""


def frozen(value: Any) -> Any:
    """Plain values in the place of objects; requests by their ids."""
    if isinstance(value, Request):
        return value.request_id
    if isinstance(value, PrefixNode):
        return value.depth_tokens, value.num_wanting, list(value.cached)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(frozen(key), frozen(item)) for key, item in value.items()]
    if isinstance(value, Set):
        return sorted(map(repr, map(frozen, value)))
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, Sequence | deque):
        return [frozen(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, frozen(getattr(value, field.name))) for field in fields(value)]
    if hasattr(value, "__dict__") and not callable(value):
        return [(name, frozen(item)) for name, item in vars(value).items() if name not in SHARED]
    return value


def policy_state(scheduler: Scheduler) -> Any:
    """What the policy remembers, and what it has to tell the executor."""
    return frozen(scheduler)


def request_state(request: Request, with_nodes: bool = True) -> Any:
    """Everything of a request, its row included.

    Args:
        with_nodes: what it shares with others of its job as well: that changes when one of these ends.
    """
    left_out = DERIVED if with_nodes else DERIVED | {"prefix_nodes"}
    own = [(name, frozen(getattr(request, name))) for name in Request.__slots__ if name not in left_out]
    return own, row_state(request.table, request.slot) if request.table is not None else None


def row_state(table: RequestTable, slot: int) -> Any:
    columns = [
        (name, column[slot].item())
        for name, column in vars(table).items()
        if isinstance(column, np.ndarray) and column.ndim == 1
    ]
    return columns, table.tokens[slot, : table.total[slot]].tolist(), table.blocks.blocks(slot)


def cache_state(core: EngineCore) -> Any:
    """Readers, hashes and order of all blocks."""
    pool = core.kv._pool
    hashes = [pool.hash_of(block) for block in range(pool.num_blocks)]
    return {
        "readers": list(pool.ref_counts),
        "online readers": [pool.online_ref_cnt(block) for block in range(pool.num_blocks)],
        "hashes": hashes,
        "index": [None if block_hash is None else pool.index.get(block_hash) for block_hash in hashes],
        "indexed": len(pool.index),
        "free": pool.free_blocks(0, pool.num_free),
        "cached": list(pool.eviction_order()),
        "online": pool.num_online,
    }


def queue_state(core: EngineCore) -> Any:
    """Which request stands where."""
    queues = core.scheduler.queues
    return {
        "waiting": frozen(queues.waiting_online),
        "online": frozen(queues.running_online),
        "offline": frozen(queues.running_offline),
        "returned": frozen(queues.pool.returned),
        "lanes": [(name, lane_state(lane)) for name, lane in queues.pool._lanes.items()],
        "turns": turns_state(queues.pool),
        "pooled": len(queues.pool),
        "slots": [None if request is None else request.request_id for request in queues.table.requests],
    }


def turns_state(pool: OfflinePool) -> Any:
    if not isinstance(pool.turns, ByShares):
        return None
    turns = pool.turns
    charged = [(name, out.answer_tokens, out.done_tokens) for name, out in turns._out.items()]
    return frozen(turns.shares.had), [turns.lanes[lane.share].had[lane] for lane in pool.lanes], charged


def lane_state(lane: Lane) -> Any:
    if isinstance(lane, JobLane):
        return [(part.rows_left.tolist(), part.ranks.tolist()) for part in lane.sources]
    assert isinstance(lane, FlexLane)
    return frozen(lane.requests)


def all_requests(core: EngineCore) -> list[Request]:
    """But for rows that have never run."""
    queues = core.scheduler.queues
    flex = [request for lane in queues.pool.lanes if isinstance(lane, FlexLane) for request in lane.requests]
    return [*queues.running(), *queues.waiting_online, *queues.pool.returned, *flex]


def state(core: EngineCore) -> Any:
    return {
        "queues": queue_state(core),
        "requests": {request.request_id: request_state(request) for request in all_requests(core)},
        "cache": cache_state(core),
        "policy": policy_state(core.scheduler),
    }


def described(draft: Draft) -> Any:
    """The whole of what a draft says."""
    return {
        "actions": [_described(action) for action in draft.actions],
        "limit": draft.limit_s,
        "shape": frozen(draft.budget.shape),
        "tokens left": draft.budget.tokens_left,
        "preempted": frozen(draft.preempted),
        "notes": frozen(draft.notes),
        "available": draft.kv.available,
    }


def _described(action: Action) -> Any:
    match action:
        case Preempt(request):
            return "preempt", request.request_id
        case Grow(request, num_tokens):
            return "grow", request.request_id, num_tokens
        case Admit(request, hit):
            return "admit", request.request_id, hit.num_tokens, list(hit.block_ids)
        case Schedule(request, num_tokens):
            return "take part", request.request_id, num_tokens
        case ScheduleRows(rows, _):
            return "rows take part", rows.tolist()
        case DrawPool(count):
            return "draw", count
